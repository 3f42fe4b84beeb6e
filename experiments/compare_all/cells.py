"""Rows of the studies by cell: a study and a model; in it differences paired by seed, ratios formed inside blocks."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from compare_all.studies import METHODS

from gnnpar.report.statistics import Verdict, family, geometric_mean, mean, non_inferiority

Row = Mapping[str, Any]
Rows = Sequence[Row]
Cell = tuple[str, str]  # study, model
Cells = Mapping[Cell, Mapping[str, Rows]]  # method -> its rows
EXACT = ("single", "vanilla", "graph_parallel", "graph_parallel bf16", "single, all threads")
LINKS = {"speed": "loopback", "paced": "1 Gbit/s"}  # study -> over what
MARGIN = 0.3  # points
VERDICTS = ("not inferior", "inconclusive", "inferior")


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


def methods_of(cells: Cells) -> list[str]:
    """Every method that is in some cell, in one order everywhere."""
    names = dict.fromkeys(name for methods in cells.values() for name in methods)
    return sorted(names, key=lambda name: METHODS.index(name) if name in METHODS else -1)


def points(rows: Rows) -> dict[int, float]:
    """seed -> test metric at the best validation, in percent."""
    return {row["result"]["seed"]: 100 * row["result"]["metric"]["test_at_best_val"] for row in rows}


def differences(rows: Rows, base: Rows) -> list[float]:
    """In points, paired by seed."""
    ours, theirs = points(rows), points(base)
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def seconds(rows: Rows) -> dict[int, float]:
    """block -> mean epoch: what a method does now and then is part of it."""
    return {row["block"]: row["result"]["epoch_seconds"]["mean"] for row in rows}


def ratios(rows: Rows, base: Rows) -> list[float]:
    """How many times faster than the base, one a block."""
    ours, theirs = seconds(rows), seconds(base)
    return [theirs[block] / ours[block] for block in sorted(ours.keys() & theirs.keys())]


def best_baseline(methods: Mapping[str, Rows]) -> str | None:
    """The fastest that is exact or rounds to bf16 (protocol, rule 2)."""
    timed = {name: geometric_mean(list(seconds(methods[name]).values())).value for name in EXACT if name in methods}
    return min(timed, key=lambda name: timed[name]) if timed else None


def speedups(cells: Cells, base: str | None) -> list[list[str]]:
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
            line.append(f"{e.value:.2f}" + (f" [{e.low:.2f}, {e.high:.2f}]" if e.low == e.low else ""))
        over = f"{geometric_mean(means).value:.2f} ({len(means)})" if means else "-"
        lines.append([*line, over])
    return lines


def judged(cells: Cells, name: str) -> dict[str, tuple[Verdict | str, float]]:
    """Every cell in which it trained beside `single` -> what paired differences say of accuracy, and their mean.

    Verdicts of a method are one family over its cells. unfit: the control passes too, and the cell says nothing, nor
    is it one of the family.
    """
    off: dict[str, list[float]] = {}
    unfit = set()
    for (study, model), methods in cells.items():
        found = differences(methods.get(name, ()), methods.get("single", ()))
        if not found or name == "single":
            continue
        off[f"{study} {model}"] = found
        control = differences(methods.get("control", ()), methods["single"])
        if "control" not in name and control and non_inferiority(control, MARGIN) == "not inferior":
            unfit.add(f"{study} {model}")
    fit = [cell for cell in off if cell not in unfit]
    verdicts: dict[str, Verdict] = dict(zip(fit, family([off[cell] for cell in fit], MARGIN), strict=True))
    return {cell: (verdicts.get(cell, "unfit"), mean(found).value) for cell, found in off.items()}


def counts(verdicts: Sequence[Verdict | str], kinds: Sequence[str]) -> list[str]:
    """How many of each kind; '-' where there are none at all."""
    return [str(verdicts.count(kind)) if verdicts else "-" for kind in kinds]


def verdicts(cells: Cells) -> list[list[str]]:
    """A line a method: cells, verdicts by kind, the mean difference and the worst, verdicts where messages matter.

    The last are those of cells whose control is inferior, corrected as one of all cells, like the others.
    """
    lines = []
    control = judged(cells, "control")
    for name in methods_of(cells):
        if found := judged(cells, name):
            shown = counts([verdict for verdict, _ in found.values()], (*VERDICTS, "unfit"))
            worst = min(found, key=lambda cell: found[cell][1])
            average = mean([off for _, off in found.values()]).value
            telling = [verdict for cell, (verdict, _) in found.items() if control.get(cell, ("",))[0] == "inferior"]
            there = ", ".join(f"{telling.count(kind)} {kind}" for kind in VERDICTS) if telling else "-"
            lines.append([name, str(len(found)), *shown, f"{average:+.2f}", f"{found[worst][1]:+.2f} ({worst})", there])
    return lines
