"""PyG models, unchanged: modules of `forward(x, edge_index)` that aggregate through gnnpar's folds."""
