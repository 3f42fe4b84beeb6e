"""gnnpar: compare parallelism strategies for distributed full-graph GNN training."""

__version__ = "0.1.0"
