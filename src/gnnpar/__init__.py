"""gnnpar: compare parallelism strategies for distributed full-graph GNN training."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gnnpar.training.result.trained import load as load


def __getattr__(name: str) -> Any:
    """`gnnpar.load`, imported when it is asked for: ranks import this package and must be up quickly."""
    if name == "load":
        from gnnpar.training.result.trained import load

        return load
    raise AttributeError(f"module 'gnnpar' has no attribute {name!r}")
