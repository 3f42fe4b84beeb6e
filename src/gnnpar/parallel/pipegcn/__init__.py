"""PipeGCN: graph parallelism with the halo rows and boundary gradients of an earlier epoch."""
