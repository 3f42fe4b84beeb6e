"""The command line of a study's report: `report.py [FILE] [--figure FILE]`, both beside it unless they are named."""

import argparse
from pathlib import Path
from typing import NamedTuple


class Asked(NamedTuple):
    """Raw lines to read and the figure to draw."""

    file: Path
    figure: Path


def asked(folder: Path, *, file: str | None = None) -> Asked:
    """What the command line says. `file`: name of the raw lines where others can be named; None: they cannot."""
    parser = argparse.ArgumentParser()
    if file is not None:
        parser.add_argument("file", nargs="?", type=Path, default=folder / file)
    parser.add_argument("--figure", type=Path, default=folder / "figure.svg")
    options = parser.parse_args()
    return Asked(getattr(options, "file", folder / "results.jsonl"), options.figure)
