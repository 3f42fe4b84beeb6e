"""CoFree-GNN: every rank trains on its own edges, and only gradients travel."""
