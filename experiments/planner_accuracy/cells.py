"""What is predicted and then measured: cells of a graph, a model, ranks and links, and the candidates of each.

Fixed before the first measurement. A candidate is named as the planner's table names it.
"""

from __future__ import annotations

from dataclasses import dataclass

GRAPHS = {
    "sbm 4k": ("dataset=sbm", "dataset.num_nodes=4000"),
    "sbm 8k": ("dataset=sbm", "dataset.num_nodes=8000"),
    "sbm 20k": ("dataset=sbm", "dataset.num_nodes=20000", "dataset.num_features=128"),
    "reddit 2 %": ("dataset=sbm_reddit", "dataset.scale=0.02", "dataset.avg_degree=60"),
}
MODELS = {
    "gcn 3": ("model=gcn", "model.num_layers=3", "model.hidden=64"),
    "gcn 3 x 128": ("model=gcn", "model.num_layers=3", "model.hidden=128"),
    "sage 3": ("model=sage", "model.num_layers=3", "model.hidden=64"),
    "gat 2": ("model=gat", "model.num_layers=2", "model.hidden=64"),
    "resgcn 16": ("model=resgcn", "model.num_layers=16", "model.hidden=32"),
    "gcnii 12": ("model=gcnii", "model.num_layers=12", "model.hidden=32"),
}
VANILLA, OVERLAP, BF16 = "graph_parallel, no overlap", "graph_parallel", "graph_parallel, 16 bit"
EIGHT, FOUR, TWO = "adaqp, 8 bit", "adaqp, 4 bit", "adaqp, 2 bit"
SAR, EAGER = "sar, prefetch 0, push", "sar, prefetch 1, push"
ONE, CHUNKS = "gnnpipe 2 stages, 1 chunk", "gnnpipe 2 stages, 8 chunks"
LOOPBACK = "loopback"


@dataclass(frozen=True)
class Cell:
    """`link`: loopback, or Gbit/s of each of two shaped hosts, which one rank has no use for. `threads`: of a rank."""

    graph: str
    model: str
    link: str
    candidates: tuple[str, ...]
    ranks: int = 2
    threads: int = 1

    @property
    def name(self) -> str:
        return f"{self.graph}; {self.model}; {self.ranks} ranks; {self.link}"

    @property
    def jobs(self) -> list[str]:
        return [f"{self.name}; {label}" for label in self.candidates]

    @property
    def overrides(self) -> list[str]:
        shaped = self.link != LOOPBACK and self.ranks > 1
        paced = ["launch=paced", f"launch.rate_gbps={self.link.split()[0]}"] if shaped else []
        here = [f"world_size={self.ranks}", f"threads_per_rank={self.threads}", "seed=0", "topology=measured", *paced]
        return [*GRAPHS[self.graph], *MODELS[self.model], *here]


CELLS = (
    Cell("sbm 8k", "gcn 3", LOOPBACK, (VANILLA, OVERLAP, BF16, EIGHT, SAR, ONE, CHUNKS)),
    Cell("sbm 8k", "gcn 3", "0.3 Gbit/s", (VANILLA, OVERLAP, BF16, EIGHT, FOUR, CHUNKS)),
    Cell("sbm 8k", "gcn 3", "0.05 Gbit/s", (OVERLAP, BF16, EIGHT, FOUR, TWO, CHUNKS)),
    Cell("sbm 20k", "sage 3", LOOPBACK, (VANILLA, OVERLAP, BF16, FOUR, EAGER, CHUNKS)),
    Cell("sbm 20k", "sage 3", "1 Gbit/s", (VANILLA, OVERLAP, BF16, FOUR, SAR)),
    Cell("reddit 2 %", "gcn 3 x 128", "0.1 Gbit/s", (OVERLAP, BF16, EIGHT, TWO, CHUNKS)),
    Cell("reddit 2 %", "gat 2", LOOPBACK, (VANILLA, OVERLAP, BF16, SAR, CHUNKS)),
    Cell("reddit 2 %", "gat 2", "0.3 Gbit/s", (OVERLAP, BF16, FOUR, SAR, CHUNKS)),
    Cell("sbm 4k", "resgcn 16", LOOPBACK, (OVERLAP, BF16, FOUR, ONE, CHUNKS)),
    Cell("sbm 4k", "resgcn 16", "0.1 Gbit/s", (VANILLA, OVERLAP, BF16, FOUR, ONE, CHUNKS)),
    Cell("sbm 4k", "gcnii 12", "0.3 Gbit/s", (OVERLAP, BF16, FOUR, ONE, CHUNKS)),
    *(
        Cell(graph, model, LOOPBACK, ("single",), ranks=1)
        for graph, model in [
            ("sbm 8k", "gcn 3"),
            ("sbm 20k", "sage 3"),
            ("reddit 2 %", "gat 2"),
            ("sbm 4k", "resgcn 16"),
        ]
    ),
)

SMOKE = (
    Cell("sbm 4k", "gcn 3", LOOPBACK, (OVERLAP, CHUNKS)),
    Cell("sbm 4k", "gcn 3", "0.3 Gbit/s", (OVERLAP, FOUR)),
    Cell("sbm 4k", "gcn 3", LOOPBACK, ("single",), ranks=1),
)
