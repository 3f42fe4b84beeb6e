"""What `typed_debian` runs, as data."""

from collections.abc import Mapping
from typing import Any  # values of overrides

Overrides = Mapping[str, Any]

MODEL: Overrides = {"model.hidden": 32, "model.encoder": "linear", "model.num_bases": 5}
COMMON: Overrides = {**MODEL, "comm": "threads", "threads_per_rank": 1, "checkpoint.keep": 0, "tracker": "jsonl"}

SAME: Overrides = {**COMMON, "precision": "fp64", "epochs": 5, "eval_every": 5}
"""Of the stage `losses`; dropout is on."""
SAME_ON: Mapping[str, tuple[int, ...]] = {
    "single": (1,),
    "graph_parallel": (1, 2, 4),
    "sar": (1, 2, 4),
    "cagnet": (4,),
    "feature": (4,),
}

TRAINED: Overrides = {**COMMON, "world_size": 4, "epochs": 80, "eval_every": 5, "fidelity_every": 20, "optim.lr": 0.03}
"""Of the stage `accuracy`."""
EXACT, CONTROL = "exact", "control"
VARIANTS: Mapping[str, Overrides] = {
    EXACT: {"strategy": "graph_parallel"},
    CONTROL: {"strategy": "graph_parallel", "codec": "drop"},
    "bf16": {"strategy": "graph_parallel", "codec": "bf16"},
    "adaqp": {"strategy": "adaqp"},
    "pipegcn": {"strategy": "pipegcn"},
    "bns 0.5": {"strategy": "bns", "strategy.rate": 0.5},
    "cofree": {"strategy": "cofree"},
    "gnnpipe P=2": {"strategy": "gnnpipe", "world_size": 2},
}
CUTS: Mapping[str, tuple[str, ...]] = {"metis": tuple(VARIANTS), "random": (CONTROL, "adaqp")}
"""Exact losses do not depend on the cut: on the random one, variants are compared with exact training on METIS's."""
REFUSED = ("minibatch", "tag")
