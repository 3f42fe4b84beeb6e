"""Epochs of the jobs of a study in blocks, beside each other: `blocks.by_job` gives the lines."""

from collections.abc import Mapping, Sequence
from typing import Any

from gnnpar.report.statistics import Estimate, geometric_mean, mean

EXPOSED = ("exposed_wire", "exposed_skew", "reduce")
Cells = Mapping[str, Mapping[int, Mapping[str, Any]]]  # job -> block -> its line


def seconds(line: Mapping[str, Any]) -> float:
    """Of an epoch, on the mean."""
    return float(line["result"]["epoch_seconds"]["mean"])


def milliseconds(cells: Cells, job: str) -> str:
    """Geometric mean over blocks."""
    return f"{1000 * geometric_mean([seconds(line) for line in cells[job].values()]).value:.0f}"


def times(cells: Cells, job: str, base: str) -> Estimate:
    """How many times as fast as the base in the same block."""
    common = sorted(cells[job].keys() & cells[base].keys())
    return geometric_mean([seconds(cells[base][block]) / seconds(cells[job][block]) for block in common])


def times_text(cells: Cells, job: str, base: str) -> str:
    """`times`, with its 95 % interval."""
    found = times(cells, job, base)
    return "1" if job == base else f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def share_percent(cells: Cells, job: str) -> float:
    """Of an epoch that passes in communication, on the mean of three blocks or more: what no work hides."""
    shares = [
        sum(line["result"]["breakdown_seconds"][part] for part in EXPOSED) / seconds(line)
        for line in cells[job].values()
    ]
    return 100 * mean(shares, fewest=3).value


def peak_mib(cells: Cells, job: str) -> float:
    """Of the fullest rank of all blocks."""
    return max(max(line["result"]["memory_bytes"]["peak"]) for line in cells[job].values()) / 2**20


def table(cells: Cells, cell: str, names: Sequence[str], bases: Sequence[str]) -> list[str]:
    """A line a strategy of the jobs `CELL; NAME`: its epoch, times over each base, share of communication, memory."""
    heads = ["strategy", "ms an epoch", *(f"times {base}" for base in bases), "share", "MiB of a rank"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in names:
        job = f"{cell}; {name}"
        line = [f"`{name}`", milliseconds(cells, job)]
        line += [times_text(cells, job, f"{cell}; {base}") for base in bases]
        line += [f"{share_percent(cells, job):.0f}%", f"{peak_mib(cells, job):.0f}"]
        lines.append("| " + " | ".join(line) + " |")
    return lines


def sent_mib(line: Mapping[str, Any]) -> float:
    """In an epoch, by all ranks."""
    return line["result"]["bytes_per_epoch"]["total"] / 2**20
