"""Epochs and memory of each contender."""

import statistics
from collections.abc import Mapping
from typing import Any

import reports
from records import Files

MODELS = {"gcn": "GCN", "sage": "GraphSAGE", "gat": "GAT, 4 heads"}
HEADS = ("size of", "model", "contender", "ms an epoch (fastest to slowest)", "times as fast as `single`", "MiB")


def line(row: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """Times as fast: by the medians, and by the slowest of one over the fastest of the other."""
    epochs, faster, memory = row.get("error", "").partition(".")[0], "", ["", ""]
    if mine := row["milliseconds"]:
        theirs, (middle, single) = base["milliseconds"], map(statistics.median, (mine, base["milliseconds"]))
        epochs = f"{middle:.2f} ({min(mine):.2f} to {max(mine):.2f})"
        faster = f"{single / middle:.2f} ({min(theirs) / max(mine):.2f} to {max(theirs) / min(mine):.2f})"
    if row["peak_mib"] is not None:  # a CPU does not tell
        memory = [f"{row['peak_mib']:.0f}", f"{row['peak_mib'] / base['peak_mib']:.2f}"]
    return [row["graph"], MODELS[row["model"]], row["contender"], epochs, "1" if row is base else faster, *memory]


def report(files: Files) -> None:
    for card, rows in reports.by(files.read(), lambda row: row["hardware"]).items():
        of, graphs = reports.by(rows, lambda row: (row["graph"], row["model"])), dict.fromkeys(r["graph"] for r in rows)
        cells = [of[graph, model] for graph in graphs for model in MODELS if (graph, model) in of]
        bases = [next(row for row in cell if row["contender"] == "single") for cell in cells]
        lines = [line(row, base) for cell, base in zip(cells, bases, strict=True) for row in cell]
        print(f"\n{card}\n\n{reports.table([*HEADS, 'of `single`'], lines)}")
