"""CoFree-GNN: every rank trains on edges of its own, and only gradients travel."""
