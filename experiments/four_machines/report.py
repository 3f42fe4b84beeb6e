"""Tables of README.md from results.jsonl: `python experiments/four_machines/report.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
from paired import table
from run import METHODS

BASES = ("vanilla", "graph_parallel", "single")


if __name__ == "__main__":
    found = blocks.by_job(HERE / "results.jsonl")
    for layers in METHODS:
        print(f"### {layers} layers", "", *table(found, layers, list(METHODS[layers]), BASES), "", sep="\n")
