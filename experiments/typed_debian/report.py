"""Compare losses on several ranks with those on one, and show the cost of inexact strategies.

Differences are paired by seed with exact training; "late gain": the points by which the last fifth of the epochs raises
the best validation.
"""

from collections.abc import Sequence

import paired
import reports
from paired import Row
from records import Files
from reports import Measured

MARGIN = 1.0  # points


def job(row: Row) -> str:
    cell, method = ("cut", "variant") if "cut" in row else ("ranks", "strategy")
    return row.get("job") or f"{row[cell]}; {row[method]}"


def refused(row: Row) -> str:
    return row.get("refused") or (row.get("result") or {}).get("error") or ""


def before(files: Files, measured: Measured) -> str:
    cuts = paired.cells({**row, "job": job(row)} for row in files.read("accuracy") if not refused(row))
    methods = list(measured["losses"][0].methods)
    rows = sorted(files.read("losses"), key=lambda row: (methods.index(job(row)[3:]), job(row)))
    shown = {"losses: fp64, dropout on": losses_table(rows)}
    for (cut,), variants in cuts.items():
        heads = {"of exact": "of METIS exact"}
        how = {"margin": MARGIN, "nbytes": paired.sent, "form": ("+.2f", ".2f"), "heads": heads, "seeds": True}
        shown[f"strategies, {cut} cut"] = paired.accuracy_table(variants, cuts["metis",]["exact"], **how)
    return "".join(f"\n### {title}\n\n{table}\n" for title, table in shown.items())


def losses_table(rows: Sequence[Row]) -> str:
    """Every epoch's loss beside that of the single device."""
    losses = {
        job(row): row.get("losses") or [point["loss/train"] for point in row["curve"]]
        for row in rows
        if not refused(row)
    }
    lines = []
    for row in rows:
        ranks, strategy = job(row).split("; ")
        cells = [f"refused: {refused(row).removeprefix('rank 0: ValueError: ')}", "", ""]
        if not refused(row):
            error = max(abs(a - b) / b for a, b in zip(losses[job(row)], losses["1; single"], strict=True))
            cells = [f"{losses[job(row)][-1]:.15f}", f"{error:.0e}", f"{paired.sent(row):.2f}"]
        lines.append([strategy, ranks, *cells])
    heads = ("strategy", "ranks", "last loss", "largest relative difference", "MiB an epoch")
    return reports.table(heads, lines)
