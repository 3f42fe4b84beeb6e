"""What `convergence` trains, as data: cells of a graph and a model, each with the same methods and seeds."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

UNTYPED = Path(__file__).with_name("debian_untyped.npz")
SEEDS = 10
LONGEST = 2000  # epochs
PATIENCE = 200  # epochs without a better validation
EVERY = 10  # epochs between evaluations

COMMON = [
    f"epochs={LONGEST}",
    f"eval_every={EVERY}",
    f"early_stopping.patience={PATIENCE // EVERY}",
    "partition.seed=${seed}",
    "threads_per_rank=1",
    "checkpoint.keep=0",
]
TWO_RANKS = ["world_size=2", "comm=threads"]
# the numbers of gnnpipe do not depend on the number of stages: one rank trains the 8 chunks of two
PIPE = ["strategy=gnnpipe", "world_size=1", "strategy.chunks=8"]
EXACT_START = "strategy.history_init=exact"
METHODS = {
    "exact": ["strategy=single"],
    "drop": ["strategy=graph_parallel", "codec=drop", *TWO_RANKS],
    "gnnpipe": PIPE,
    "gnnpipe, exact start": [*PIPE, EXACT_START],
    "adaqp": ["strategy=adaqp", *TWO_RANKS],
    # its own knobs, and staleness of others
    "gnnpipe, refresh 5": [*PIPE, "strategy.refresh=5"],
    "gnnpipe, exact refresh": [*PIPE, EXACT_START, "strategy.refresh_exact=true"],
    "gnnpipe, 32 chunks": [*PIPE, "strategy.chunks=32"],
    "gnnpipe, fresh once": [*PIPE, "strategy.gradient=fresh"],
    "pipegcn": ["strategy=pipegcn", *TWO_RANKS],
}
CORE = ("exact", "drop", "gnnpipe", "gnnpipe, exact start", "adaqp")  # before any other method of any cell

# seeds draw the split of real graphs, and graph and split of the block model
DATASETS = {
    "squirrel": ["dataset=squirrel", "dataset.split_index=null"],
    "cs": ["dataset=cs", "dataset.split_seed=null"],
    "physics": ["dataset=physics", "dataset.split_seed=null"],
    "debian": [  # no type of an edge is read, and its masks are drawn anew
        "dataset=npz",
        "dataset.name=debian_untyped",
        f"dataset.path={UNTYPED}",
        "dataset.split=random",
        "dataset.split_seed=null",
        "dataset.train_fraction=0.2",
        "dataset.val_fraction=0.2",
    ],
    "sbm_verdict": ["dataset=sbm_verdict"],
    "sbm_reddit": ["dataset=sbm_reddit", "dataset.graph_seed=null", "dataset.split_seed=null"],
}
FILES = {"squirrel": "Squirrel", "cs": "CS", "physics": "Physics", "debian": "debian"}  # folders of raw files
DECAY = {"squirrel", "cs", "physics"}  # as the models' papers train on graphs of this kind
DEEP = ["model.hidden=32", "model.dropout=0.2"]
SHALLOW = ["model.hidden=64", "model.dropout=0.5", "optim.lr=0.01"]
MODELS = {
    "gcn": SHALLOW,
    "sage": SHALLOW,
    "gcnii": [*DEEP, "optim.lr=0.01"],  # rates of gnnpipe_convergence
    "resgcn": [*DEEP, "optim.lr=0.003"],
}


class Cell(NamedTuple):
    """A graph and a model of some depth."""

    dataset: str
    model: str
    layers: int

    @property
    def name(self) -> str:
        return f"{self.dataset} {self.model} {self.layers}"

    @property
    def overrides(self) -> Sequence[str]:
        decay = ["optim.weight_decay=5e-4"] if self.dataset in DECAY else []
        model = [f"model={self.model}", f"model.num_layers={self.layers}", *MODELS[self.model]]
        return [*DATASETS[self.dataset], *decay, *model]

    def job(self, method: str) -> str:
        return f"{self.name}; {method}"


# the most telling and quickest first; the last ones are for a night
CELLS = [
    Cell("squirrel", "gcn", 2),
    Cell("sbm_verdict", "gcn", 3),
    Cell("sbm_verdict", "resgcn", 8),
    Cell("squirrel", "sage", 3),
    Cell("sbm_verdict", "gcnii", 8),
    Cell("squirrel", "gcnii", 8),
    Cell("squirrel", "resgcn", 8),
    Cell("cs", "gcn", 2),
    Cell("cs", "sage", 2),
    Cell("sbm_verdict", "sage", 3),
    Cell("debian", "gcn", 3),
    Cell("debian", "sage", 3),
    Cell("sbm_verdict", "resgcn", 16),
    Cell("sbm_verdict", "gcnii", 16),
    Cell("squirrel", "resgcn", 32),
    Cell("squirrel", "gcnii", 32),
    Cell("sbm_verdict", "resgcn", 32),
    Cell("sbm_verdict", "gcnii", 32),
    Cell("cs", "resgcn", 8),
    Cell("cs", "gcnii", 8),
    Cell("physics", "gcn", 2),
    Cell("physics", "sage", 2),
    Cell("debian", "resgcn", 8),
    Cell("sbm_reddit", "gcn", 2),
]
