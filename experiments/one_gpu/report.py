"""The table of README.md from the lines: python experiments/one_gpu/report.py."""

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records

MODELS = {"gcn": "GCN", "sage": "GraphSAGE", "gat": "GAT, 4 heads"}
BASE = "single"


def times(row: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """How many times as fast as the base: by the medians, and by the slowest of one over the fastest of the other."""
    mine, theirs = row["milliseconds"], base["milliseconds"]
    if row is base:
        return "1"
    middle = statistics.median(theirs) / statistics.median(mine)
    return f"{middle:.2f} ({min(theirs) / max(mine):.2f} to {max(theirs) / min(mine):.2f})"


def line(row: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    name = [row["graph"], MODELS[row["model"]], row["contender"]]
    if not row["milliseconds"]:
        return "| " + " | ".join([*name, row["error"].partition(".")[0], "", "", ""]) + " |"
    epochs = row["milliseconds"]
    middle = f"{statistics.median(epochs):.2f} ({min(epochs):.2f} to {max(epochs):.2f})"
    memory = ["", ""]
    if row["peak_mib"] is not None:  # a CPU does not tell
        memory = [f"{row['peak_mib']:.0f}", f"{row['peak_mib'] / base['peak_mib']:.2f}"]
    return "| " + " | ".join([*name, middle, times(row, base), *memory]) + " |"


def main() -> None:
    rows = records.read(HERE / "results.jsonl")
    heads = ["size of", "model", "contender", "ms an epoch (fastest to slowest)", "times as fast as `single`"]
    heads += ["MiB", "of `single`"]
    for card in dict.fromkeys(row["hardware"] for row in rows):
        print(f"\n{card}\n", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", sep="\n")
        for graph in dict.fromkeys(row["graph"] for row in rows):
            for model in MODELS:
                cell = [row for row in rows if (row["hardware"], row["graph"], row["model"]) == (card, graph, model)]
                for row in cell:
                    print(line(row, next(each for each in cell if each["contender"] == BASE)))


if __name__ == "__main__":
    main()
