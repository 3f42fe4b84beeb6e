"""Compare the losses of gnnpar with those of the public code: table and figure."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any  # of JSON

HERE = Path(__file__).parent

import reports
from records import Files

Rows = Mapping[str, Sequence[Mapping[str, Any]]]  # by case


def mean_curve(rows: Sequence[Mapping[str, Any]], whose: str) -> list[float]:
    return [statistics.fmean(losses) for losses in zip(*(row[whose] for row in rows), strict=True)]


def table(cases: Rows) -> str:
    """Curves are means over seeds; the difference is the largest of any epoch, of the loss of the public code there."""
    lines = []
    for case, rows in cases.items():
        ours, theirs = mean_curve(rows, "ours"), mean_curve(rows, "theirs")
        largest = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
        ends = [f"{curve[at]:.4f}" for at in (29, -1) for curve in (ours, theirs)]
        means = f"{statistics.fmean(ours) / statistics.fmean(theirs):.3f}"
        lines.append([case, len(rows), *ends, f"{largest:.1e}", means])
    heads = ("case", "seeds", "ours, epoch 30", "theirs", "ours, last", "theirs", "largest difference")
    return reports.table((*heads, "mean of all epochs, ours / theirs"), lines)


def draw(cases: Rows, files: Files) -> None:
    plt = reports.pyplot(8)
    figure, axes = plt.subplots(1, len(cases), figsize=(1.9 * len(cases), 2.2), sharey=True, layout="constrained")
    for axis, (case, rows) in zip(axes, cases.items(), strict=True):
        axis.plot(mean_curve(rows, "theirs"), color="#d95f02", lw=2.5, label="public code")
        axis.plot(mean_curve(rows, "ours"), color="#000000", lw=1, label="gnnpar")
        axis.set_title(case.replace(" from", "\nfrom"), fontsize=7)
        axis.set(xlabel="epoch", yscale="log")
    axes[0].set_ylabel("training loss")
    axes[0].legend(frameon=False)
    reports.save(figure, files.figure)


def report(files: Files) -> None:
    rows = sorted(files.read(), key=lambda row: (order(row["case"]), row["seed"]))
    cases = reports.by(rows, lambda row: row["case"])
    reports.show("losses, 60 epochs, 2 ranks", table(cases))
    draw(cases, files)


def order(case: str) -> tuple[bool, float, str]:
    """PipeGCN's cases by name from the exact one, then BNS-GCN's from rate 1 down."""
    method, _, rate = case.partition(" ")
    return (method == "bns", -float(rate) if method == "bns" else 0.0, "" if case == "vanilla" else case)
