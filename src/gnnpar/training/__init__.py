"""The training loop of one rank, from settings to the last epoch."""
