"""Folds over blocks of in-edges. They know tensors and kernels only."""
