"""`gnnpar ablate FILE`: `gnnpar study FILE` of a file of factors."""

from gnnpar.cli.study import run

__all__ = ["run"]
