"""Read runs and compare them. `load("multirun/**")` and `history(run)` are for notebooks."""

from gnnpar.report.comparison import history, load

__all__ = ["history", "load"]
