"""BNS-GCN: graph parallelism on a sample of the boundary rows, drawn anew every epoch."""
