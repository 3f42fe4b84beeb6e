"""Graph parallelism: one halo exchange an aggregation; AdaQP is this with its codec and overlap."""
