"""Losses and accuracies of strategies beside PyG's own loop.

A loss is equal where it differs from that of PyG's loop by at most EQUAL of itself in every epoch. Accuracies are those
of the test nodes at the best validation, and their differences paired by seed.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any  # of JSON

import reports
from pyg_models.cells import OWN, PAIRED, SPECS, STRATEGIES, TOLD
from records import Files

from gnnpar.report.statistics import FEWEST_SEEDS, mean

EQUAL = 1e-12
MARGIN = 1.0  # points
Row = Mapping[str, Any]
Cells = dict[tuple[str, str], dict[int, Row]]  # model, variant -> seed -> row


def report(files: Files) -> None:
    rows = files.read()
    reports.show("losses: strategy x model", losses_table(of_stage(rows, "losses")))
    five, paired = of_stage(rows, "accuracy"), of_stage(rows, "paired")
    refused = {(row["model"], row["variant"]) for row in rows if "refused" in row}
    own, masked = {name: five[name, OWN] for name in SPECS}, {name: paired[name, PAIRED] for name in TOLD["paired"]}
    reports.show("accuracy: strategy x model, points over PyG's loop", matrix(five, own, refused))
    reports.show("accuracy: strategy x model, points over PyG's loop with our masks", matrix(five, masked, refused))
    reports.show("accuracy: the same masks", paired_table(five, paired))
    reports.show("accuracy: five seeds", accuracy_table(five))
    reports.show("accuracy: fifteen more seeds", accuracy_table(of_stage(rows, "more")))
    reports.show("accuracy: all twenty", accuracy_table(with_more(rows)))
    reports.show("refused", refusals(rows))


def of_stage(rows: Iterable[Row], stage: str) -> Cells:
    found: Cells = defaultdict(dict)
    for row in rows:
        if row["stage"] == stage:
            found[row["model"], row["variant"]][row["seed"]] = row
    return found


def with_more(rows: Sequence[Row]) -> Cells:
    """PyG's loop and `single` of the models of the stage `more`, all seeds."""
    five, more = of_stage(rows, "accuracy"), of_stage(rows, "more")
    return {key: {**five[key], **runs} for key, runs in more.items()}


def losses_table(cells: Cells) -> str:
    """The largest difference of a loss from that of PyG's loop, relative to it."""
    lines = [[strategy, *(loss_cell(cells, name, strategy) for name in SPECS)] for strategy in STRATEGIES]
    return reports.table(["strategy", *SPECS], [line for line in lines if any(line[1:])])


def loss_cell(cells: Cells, name: str, strategy: str) -> str:
    row = cells.get((name, strategy), {}).get(0)
    if row is None:
        return ""
    if "refused" in row:
        return "refused"
    theirs = cells[name, OWN][0]["losses"]
    error = max(abs(a - b) / b for a, b in zip(row["losses"], theirs, strict=True))
    return f"{'equal' if error <= EQUAL else 'approximate'} ({error:.0e})"


def matrix(cells: Cells, own: Mapping[str, Mapping[int, Row]], refused: Collection[tuple[str, str]]) -> str:
    """Mean difference of accuracy, and what a seed differs by at most."""
    lines = []
    for strategy in (name for name in STRATEGIES if name not in TOLD["losses_alone"]):
        shown = [
            "refused" if (name, strategy) in refused else gap_cell(cells.get((name, strategy), {}), runs)
            for name, runs in own.items()
        ]
        lines += [[strategy, *shown]] if any(shown) else []
    return reports.table(["strategy", *own], lines)


def gap_cell(runs: Mapping[int, Row], own: Mapping[int, Row]) -> str:
    if not (gaps := differences(runs, own)):
        return ""
    gap = statistics.fmean(gaps)
    return f"{gap:+.1f} (a seed: {max(map(abs, gaps)):.1f}), {'within' if abs(gap) <= MARGIN else 'beyond'}"


def accuracy_table(cells: Cells) -> str:
    lines = []
    for name, variant in itertools.product(SPECS, (OWN, *STRATEGIES)):
        runs = {seed: row for seed, row in cells.get((name, variant), {}).items() if "refused" not in row}
        if runs:
            shown = ["", ""]
            if variant != OWN:
                gap = mean(differences(runs, cells.get((name, OWN), {})), fewest=FEWEST_SEEDS)
                shown = [reports.interval(gap, "+.1f"), "yes" if abs(gap.value) <= MARGIN else "no"]
            lines.append([name, variant, f"{points(runs.values()):.1f}", *shown, len(runs)])
    heads = ("model", "run", "test, %", "over PyG's loop, points (95 %)", "within a point", "seeds")
    return reports.table(heads, lines)


def paired_table(ours: Cells, theirs: Cells) -> str:
    """`single` beside PyG's loop with the masks of gnnpar: seeds, weights, masks and evaluations are the same."""
    lines = []
    for name in SPECS:
        if own := theirs.get((name, PAIRED)):
            runs = {seed: row for seed, row in ours[name, "single"].items() if seed in own}
            tests = [f"{points(each.values()):.1f}" for each in (own, runs)]
            lines.append([name, *tests, f"{max(map(abs, differences(runs, own))):.1f}", len(own)])
    heads = ("PyG's loop, our masks, %", "single, %", "largest difference of a seed, points", "seeds")
    return reports.table(("model", *heads), lines)


def points(rows: Iterable[Row]) -> float:
    return statistics.fmean(100 * row["test"] for row in rows)


def differences(runs: Mapping[int, Row], own: Mapping[int, Row]) -> Sequence[float]:
    return [100 * (runs[seed]["test"] - own[seed]["test"]) for seed in sorted(runs.keys() & own.keys())]


def refusals(rows: Iterable[Row]) -> str:
    """Every line with which a strategy refuses, and the models it is of."""
    found = reports.by((row for row in rows if "refused" in row), lambda row: (row["variant"], row["refused"]))
    lines = [
        (strategy, ", ".join(dict.fromkeys(row["model"] for row in mine)), line)
        for (strategy, line), mine in found.items()
    ]
    return reports.table(("strategy", "models", "line"), lines)
