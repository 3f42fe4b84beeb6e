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

SHORT = {"strategy.codec.period": 2, "strategy.codec.warmup": 1, "strategy.codec.trace_epochs": 2}
"""How often AdaQP chooses bits in a run of a few epochs."""

OWN = "PyG's loop"
CONTROL = "control"
STRATEGIES: Mapping[str, Mapping[str, object]] = {
    "single": {},
    "graph_parallel": {},
    "adaqp": {},
    "sar": {},
    "gnnpipe": {},
    CONTROL: {"strategy": "graph_parallel", "codec": "drop"},
}

MORE = ("GIN", "GCN", "EdgeCNN")
"""Models of the stage `more`: PyG's loop and `single` alone, seeds up to MORE_SEEDS."""
MORE_SEEDS = 20
