"""Start N ranks of a function and watch them; knows nothing of training."""
