"""The tables of README.md from the JSONL files: `python experiments/compare_all/report.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks  # noqa: E402
import tables  # noqa: E402

STUDIES = {"speed": "single", "paced": "graph_parallel", "accuracy": "single"}


def main() -> None:
    for name, baseline in STUDIES.items():
        if rows := blocks.read(HERE / f"{name}.jsonl"):
            print(f"### {name}\n\n{tables.markdown(tables.comparison(rows, baseline=baseline))}")


if __name__ == "__main__":
    main()
