"""Folds (aggregations) over blocks of in-edges. They depend on tensors and kernels only."""
