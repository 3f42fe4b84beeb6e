"""Rows on the wire under halo=rows and halo=cover, counted for graphs, partitioners and numbers of parts.

    GNNPAR_DATA=FOLDER python experiments/cover/rows.py    # to rows.csv, about 20 minutes; skips rows that the file has

Every cover is counted once more by linear programming (HiGHS), which knows nothing of matchings: the constraints of a
vertex cover of a bipartite graph are totally unimodular, so the optimum of the relaxation is the least cover.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from gnnpar.config.compose import compose
from gnnpar.data.dataset import Dataset
from gnnpar.folds.cover import count_cover
from gnnpar.partition.partition import Metis, Random

GRAPHS = ("debian", "tolokers", "computers", "physics", "cs", "blogcatalog", "squirrel", "cora", "citeseer", "rmat")
PARTS = (2, 4, 8, 16)
PARTITIONERS = {"metis": Metis(), "random": Random()}
CHECKED = 300_000  # edges of a cut that is counted once more


def count(dataset: Dataset, kind: str, parts: int) -> dict[str, Any]:
    """Rows of all ranks in one exchange; folds of equal weights (GCN, GraphSAGE, GIN)."""
    part_of = PARTITIONERS[kind].part_of(dataset, parts)
    rows, partial, _ = count_cover(dataset.edge_index, part_of, parts, None, (1, 1), 0).sum((1, 2))
    src, dst = dataset.edge_index
    cut = part_of[src] != part_of[dst]
    halo = len(torch.unique(part_of[dst[cut]] * dataset.num_nodes + src[cut]))
    line = {"graph": dataset.name, "partition": kind, "parts": parts, "cut_edges": int(cut.sum()), "halo_rows": halo}
    line |= {"rows": int(rows), "partial_rows": int(partial)}
    checked = int(cut.sum()) <= CHECKED
    return {**line, "least": round(sum(least(dataset, part_of, parts))) if checked else None}


def least(dataset: Dataset, part_of: torch.Tensor, parts: int) -> Iterator[float]:
    """The least cover of each ordered pair of parts, by linear programming."""
    src, dst = (ends.numpy() for ends in dataset.edge_index)
    of = part_of.numpy()
    for p in range(parts):
        for q in range(parts):
            edges = (of[dst] == p) & (of[src] == q)
            if p == q or not edges.any():
                continue
            _, i = np.unique(dst[edges], return_inverse=True)
            _, j = np.unique(src[edges], return_inverse=True)
            rows, width = np.arange(len(i)), i.max() + j.max() + 2
            ends = np.concatenate([i, j + i.max() + 1])
            matrix = coo_matrix((-np.ones(2 * len(i)), (np.concatenate([rows, rows]), ends)), shape=(len(i), width))
            found = linprog(np.ones(width), A_ub=matrix.tocsr(), b_ub=-np.ones(len(i)), bounds=(0, 1), method="highs")
            assert found.status == 0, found.message
            yield found.fun


def main(out: Path) -> None:
    done = set()
    if out.exists():
        with out.open(encoding="utf-8") as file:
            done = {(line["graph"], line["partition"], int(line["parts"])) for line in csv.DictReader(file)}
    for graph in GRAPHS:
        scale = ["dataset.scale=14"] if graph == "rmat" else []
        settings = compose([f"dataset={graph}", "dataset.self_loops=keep", *scale])
        dataset = settings.load_dataset()
        for kind in PARTITIONERS:
            for parts in PARTS:
                if (dataset.name, kind, parts) not in done:
                    line = count(dataset, kind, parts)
                    new = not out.exists()
                    with out.open("a", encoding="utf-8") as file:
                        writer = csv.DictWriter(file, line, lineterminator="\n")
                        writer.writerows([dict(zip(line, line, strict=True)), line] if new else [line])
                    print(line, flush=True)


if __name__ == "__main__":
    main(Path(__file__).with_name("rows.csv"))
