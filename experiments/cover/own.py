"""The table of rows.csv, above that of epochs."""

import csv
from collections.abc import Iterator
from pathlib import Path

import graphs

HERE = Path(__file__).parent
prepare = graphs.untyped_debian


def before() -> str:
    return "\n".join(["### Rows", "", *rows_table(), "", ""])


def rows_table() -> Iterator[str]:
    """A line a graph and partitioner: rows under a cover as a share of halo rows, by parts; at four parts in full."""
    with (HERE / "rows.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    of = {(line["graph"], line["partition"], int(line["parts"])): line for line in lines}
    parts = sorted({int(line["parts"]) for line in lines})
    heads = ["graph", "cut", *(f"{p} parts" for p in parts), "halo rows, 4 parts", "rows", "partial rows", "least"]
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for graph, cut in dict.fromkeys((line["graph"], line["partition"]) for line in lines):
        found = [of[graph, cut, p] for p in parts]
        shares = [
            f"{(int(each['rows']) + int(each['partial_rows'])) / max(1, int(each['halo_rows'])):.2f}" for each in found
        ]
        four = of[graph, cut, 4]
        full = [f"{four[name]}" for name in ("halo_rows", "rows", "partial_rows")]
        yield "| " + " | ".join([graph, cut, *shares, *full, str(four["least"] or "not counted")]) + " |"
