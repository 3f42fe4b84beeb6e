"""gnnpar: compare parallelism strategies for distributed full-graph GNN training."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from gnnpar.api import check as check
    from gnnpar.api import compare as compare
    from gnnpar.api import distribute as distribute
    from gnnpar.api import plan as plan
    from gnnpar.api import sweep as sweep
    from gnnpar.api import train as train
    from gnnpar.data.hetero import homogeneous as homogeneous
    from gnnpar.training.loop import StopTraining as StopTraining
    from gnnpar.training.result.trained import load as load

_LAZY = dict.fromkeys(("check", "compare", "distribute", "plan", "sweep", "train"), "gnnpar.api") | {
    "StopTraining": "gnnpar.training.loop",
    "homogeneous": "gnnpar.data.hetero",
    "load": "gnnpar.training.result.trained",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use: ranks import this package and must start quickly."""
    if name in _LAZY:
        return vars(import_module(_LAZY[name]))[name]
    raise AttributeError(f"module 'gnnpar' has no attribute {name!r}")
