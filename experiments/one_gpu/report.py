"""Epochs and memory of each contender."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

import reports
from records import Files

MODELS = {"gcn": "GCN", "sage": "GraphSAGE", "gat": "GAT, 4 heads"}
BASE = "single"


def times(row: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """How many times as fast as the base: by the medians, and by the slowest of one over the fastest of the other."""
    mine, theirs = row["milliseconds"], base["milliseconds"]
    if row is base:
        return "1"
    middle = statistics.median(theirs) / statistics.median(mine)
    return f"{middle:.2f} ({min(theirs) / max(mine):.2f} to {max(theirs) / min(mine):.2f})"


def line(row: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    name = [row["graph"], MODELS[row["model"]], row["contender"]]
    if not row["milliseconds"]:
        return [*name, row["error"].partition(".")[0], "", "", ""]
    epochs = row["milliseconds"]
    memory = ["", ""]
    if row["peak_mib"] is not None:  # a CPU does not tell
        memory = [f"{row['peak_mib']:.0f}", f"{row['peak_mib'] / base['peak_mib']:.2f}"]
    return [
        *name,
        f"{statistics.median(epochs):.2f} ({min(epochs):.2f} to {max(epochs):.2f})",
        times(row, base),
        *memory,
    ]


def report(files: Files) -> None:
    heads = ["size of", "model", "contender", "ms an epoch (fastest to slowest)", "times as fast as `single`"]
    for card, rows in reports.by(files.read(), lambda row: row["hardware"]).items():
        of, graphs = reports.by(rows, lambda row: (row["graph"], row["model"])), dict.fromkeys(r["graph"] for r in rows)
        cells = [of[graph, model] for graph in graphs for model in MODELS if (graph, model) in of]
        bases = [next(row for row in cell if row["contender"] == BASE) for cell in cells]
        lines = [line(row, base) for cell, base in zip(cells, bases, strict=True) for row in cell]
        print(f"\n{card}\n\n{reports.table([*heads, 'MiB', 'of `single`'], lines)}")
