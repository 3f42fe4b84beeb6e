"""Blocks of in-edges and the folds over them. Leaf of gnnpar: knows tensors and kernels only."""
