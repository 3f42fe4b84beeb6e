"""`gnnpar ablate FILE`: `gnnpar study FILE` for a file of factors."""

from gnnpar.cli.study import run

__all__ = ["run"]
