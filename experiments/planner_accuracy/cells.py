"""Cells of a graph, a model, ranks and links, and the candidates of each: cells.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # of YAML

import yaml


@dataclass(frozen=True)
class Cell:
    """`problem`: overrides of graph and model. `threads`: of a rank."""

    graph: str
    model: str
    link: str
    candidates: Sequence[str]
    ranks: int = 2
    threads: int = 1
    problem: Sequence[str] = ()

    @property
    def jobs(self) -> list[str]:
        name = f"{self.graph}; {self.model}; {self.ranks} ranks; {self.link}"
        return [f"{name}; {label}" for label in self.candidates]

    @property
    def overrides(self) -> list[str]:
        shaped = self.link != "loopback" and self.ranks > 1
        paced = ["launch=paced", f"launch.rate_gbps={self.link.split()[0]}"] if shaped else []
        here = [f"world_size={self.ranks}", f"threads_per_rank={self.threads}", "seed=0", "topology=measured", *paced]
        return [*self.problem, *here]


def cells(which: str, *files: Path) -> list[Cell]:
    """Return the `cells` or `smoke` of the last file; graphs and models are in any."""
    told: list[dict[str, Any]] = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]
    known = {name: overrides for each in told for key in ("graphs", "models") for name, overrides in each[key].items()}
    return [Cell(*each, problem=[*known[each[0]], *known[each[1]]]) for each in told[-1][which]]


CELLS = Path(__file__).with_name("cells.yaml")
