"""The order of the parts."""

PARTS = ("rounds", "pipelines")
