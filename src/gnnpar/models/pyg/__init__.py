"""PyG models as they are: a module of `forward(x, edge_index)`, whose convolutions aggregate through gnnpar's folds."""
