"""Rows of the studies by cell: a study and a model; in it differences paired by seed, ratios formed inside blocks."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from studies import BASELINES, DEEP, TIMED, TRAINED

from gnnpar.results.statistics import Verdict, geometric_mean, mean, non_inferiority

Row = Mapping[str, Any]
Rows = Sequence[Row]
Cell = tuple[str, str]  # study, model
EXACT = [name for name in BASELINES if "control" not in name and "minibatch" not in name] + ["single, all threads"]
ORDER = list(TIMED | TRAINED | DEEP)  # of lines in tables and figures
MARGIN = 0.3  # points


def method_of(row: Row) -> str:
    """The job without its model; who it is in every study."""
    return re.sub(f"^{row['result']['model']} ", "", row["job"])


def by_cell(studies: Mapping[str, Rows]) -> dict[Cell, dict[str, list[Row]]]:
    """(study, model) -> method -> its completed rows."""
    cells: dict[Cell, dict[str, list[Row]]] = {}
    for study, rows in studies.items():
        for row in rows:
            if row["result"]["status"] == "completed":
                cells.setdefault((study, row["result"]["model"]), {}).setdefault(method_of(row), []).append(row)
    return cells


def methods_of(cells: Mapping[Cell, Mapping[str, Rows]]) -> list[str]:
    """Every method that is in some cell, in one order everywhere."""
    names = dict.fromkeys(name for methods in cells.values() for name in methods)
    return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else -1)


def points(rows: Rows) -> dict[int, float]:
    """seed -> test metric at the best validation, in percent."""
    return {row["result"]["seed"]: 100 * row["result"]["metric"]["test_at_best_val"] for row in rows}


def differences(rows: Rows, base: Rows) -> list[float]:
    """In points, paired by seed."""
    ours, theirs = points(rows), points(base)
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def seconds(rows: Rows) -> dict[int, float]:
    """block -> median epoch."""
    return {row["block"]: row["result"]["epoch_seconds"]["median"] for row in rows}


def ratios(rows: Rows, base: Rows) -> list[float]:
    """How many times faster than the base, one a block."""
    ours, theirs = seconds(rows), seconds(base)
    return [theirs[block] / ours[block] for block in sorted(ours.keys() & theirs.keys())]


def best_baseline(methods: Mapping[str, Rows]) -> str | None:
    """The fastest that is exact or rounds to bf16 (protocol, rule 2)."""
    timed = {name: geometric_mean(list(seconds(methods[name]).values())).value for name in EXACT if name in methods}
    return min(timed, key=lambda name: timed[name]) if timed else None


def speedups(cells: Mapping[Cell, Mapping[str, Rows]], base: str | None) -> list[list[str]]:
    """A line a method: times faster than `base` in every cell (None: its best baseline), and the mean over all.

    Left out: mini-batches, whose epoch is other work, and cached first layers, whose baseline is another.
    """
    lines = []
    for name in (n for n in methods_of(cells) if "minibatch" not in n and "cached" not in n):
        line, means = [name], []
        for methods in cells.values():
            against = base or best_baseline(methods)
            found = ratios(methods.get(name, ()), methods.get(against or "", ()))
            if not found:
                line.append("-")
                continue
            e = geometric_mean(found)
            means.append(e.value)
            line.append(f"{e.value:.2f}" + (f" [{e.low:.2f}, {e.high:.2f}]" if e.n > 1 else ""))
        over = f"{geometric_mean(means).value:.2f} ({len(means)})" if means else "-"
        lines.append([*line, over])
    return lines


def verdicts(cells: Mapping[Cell, Mapping[str, Rows]]) -> list[list[str]]:
    """A line a method, over all cells in which `single` trained: what the paired differences say of accuracy.

    Unfit: cells whose control passes too; they are in no other count.
    """
    lines = []
    for name in (n for n in methods_of(cells) if not n.startswith("single")):
        counts: dict[Verdict | str, int] = {}
        means: dict[str, float] = {}
        for (study, model), methods in cells.items():
            found = differences(methods.get(name, ()), methods.get("single", ()))
            if not found:
                continue
            control = differences(methods.get("control", ()), methods["single"])
            unfit = "control" not in name and control and non_inferiority(control, MARGIN) == "not inferior"
            verdict = "unfit" if unfit else non_inferiority(found, MARGIN)
            counts[verdict] = counts.get(verdict, 0) + 1
            means[f"{study} {model}"] = mean(found).value
        if means:
            worst = min(means, key=lambda cell: means[cell])
            shown = [str(counts.get(v, 0)) for v in ("not inferior", "inconclusive", "inferior", "unfit")]
            average = f"{mean(list(means.values())).value:+.2f}"
            lines.append([name, str(len(means)), *shown, average, f"{means[worst]:+.2f} ({worst})"])
    return lines
