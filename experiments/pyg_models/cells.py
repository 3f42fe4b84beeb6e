"""What `pyg_models` runs, as data: PyG's models, their settings, and the strategies."""

from collections.abc import Mapping
from dataclasses import dataclass

MODULE = "torch_geometric.nn.models"
EVALUATED = 5  # epochs between evaluations
RANKS = 2


@dataclass(frozen=True)
class Spec:
    """One of PyG's models. `kwargs`: less dropout. `loops`: of gnnpar's graph; GATConv puts its own in their place.
    `steps`, `epochs`: of the stages `losses` and `accuracy`. `width`: principal components of the features that
    accuracy is measured on; None: all features."""

    kwargs: Mapping[str, object]
    dropout: float = 0.5
    lr: float = 0.01
    loops: bool = False
    steps: int = 10
    epochs: int = 100
    width: int | None = None


SMALL = {"hidden_channels": 16, "num_layers": 2}
WIDE = {"hidden_channels": 64, "num_layers": 2}
SPECS: Mapping[str, Spec] = {
    "GCN": Spec(SMALL, epochs=200),
    "GraphSAGE": Spec(WIDE),
    "GAT": Spec({**WIDE, "heads": 8}, dropout=0.6, lr=0.005, loops=True),
    "GIN": Spec(WIDE),
    "PNA": Spec(
        {**SMALL, "aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification", "attenuation"]},
        steps=3,
        width=64,
    ),
    "EdgeCNN": Spec(SMALL, width=64),
}
DEGREES = ("PNA",)  # classes that need the histogram of in-degrees
WEIGHT_DECAY = 5e-4

GIVEN = {"comm": "threads", "threads_per_rank": 1, "world_size": RANKS, "eval_every": EVALUATED}
GIVEN |= {"checkpoint.keep": 0, "tracker": "jsonl", "optim.weight_decay": WEIGHT_DECAY}
"""Of every run."""
SHORT = {"strategy.codec.period": 2, "strategy.codec.warmup": 1, "strategy.codec.trace_epochs": 2}
"""How often AdaQP chooses bits in a run of a few epochs."""

OWN = "PyG's loop"
PAIRED = "PyG's loop, our masks"
"""The same with the masks that gnnpar draws; for models without attention dropout, which PyG draws by its own edges."""
CONTROL = "control"
ONE_PIPE, ONE_HYBRID = "gnnpipe, one chunk", "hybrid, one chunk"
STRATEGIES: Mapping[str, Mapping[str, object]] = {
    "single": {},
    "graph_parallel": {},
    "adaqp": {},
    "sar": {},
    ONE_PIPE: {"strategy": "gnnpipe", "strategy.chunks": "one"},
    ONE_HYBRID: {"strategy": "hybrid", "strategy.chunks": "one", "world_size": 4},
    "gnnpipe": {},
    "minibatch": {},
    CONTROL: {"strategy": "graph_parallel", "codec": "drop"},
}

LOSSES_ALONE = (ONE_PIPE, ONE_HYBRID)
"""Variants whose losses say all: they are those of `single`."""
BY_MASKS = ("GCN", "GraphSAGE", "GIN", "PNA", "EdgeCNN")
"""Models of the stage `paired`."""

MORE = ("GIN", "GCN", "EdgeCNN")
"""Models of the stage `more`: PyG's loop and `single` alone, seeds up to MORE_SEEDS."""
MORE_SEEDS = 20
