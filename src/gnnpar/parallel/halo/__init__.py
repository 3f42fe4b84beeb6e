"""Graph parallelism: one halo exchange per aggregation; AdaQP is this with its codec and overlap."""
