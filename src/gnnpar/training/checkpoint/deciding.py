"""Settings that a run may have otherwise than the epochs that it goes on from, and what that changes."""

OF_NUMBERS = (
    "strategy",
    "partition",
    "optim",
    "precision",
    "first_layer",
    "row_order",
    "seed",
    "task",
    "world_size",
    "tf32",
    "deterministic",
    "eval_every",
    "early_stopping",
)
"""Losses and weights follow from them, or which epoch is the best on validation."""

OF_TIME = ("comm", "launch", "device", "threads_per_rank")
"""Epochs take as long as these say, and compute the same."""
