"""Tables of README.md: `python experiments/pyg_models/report.py [FILE]`.

A loss is equal where it differs from that of PyG's loop by at most EQUAL of itself in every epoch. Accuracies are those
of the test nodes at the best validation, and their differences paired by seed.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any  # of JSON

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records
import reports
from cells import BY_MASKS, LOSSES_ALONE, OWN, PAIRED, SPECS, STRATEGIES

from gnnpar.report.statistics import FEWEST_SEEDS, mean

EQUAL = 1e-12
MARGIN = 1.0  # points
Row = Mapping[str, Any]
Cells = dict[tuple[str, str], dict[int, Row]]  # model, variant -> seed -> row


def main() -> None:
    rows = records.read(reports.asked(HERE, file="results.jsonl").file)
    show("losses: strategy x model", losses_table(of_stage(rows, "losses")))
    five, paired = of_stage(rows, "accuracy"), of_stage(rows, "paired")
    refused = {(row["model"], row["variant"]) for row in rows if "refused" in row}
    own, masked = {name: five[name, OWN] for name in SPECS}, {name: paired[name, PAIRED] for name in BY_MASKS}
    show("accuracy: strategy x model, points over PyG's loop", matrix(five, own, refused))
    show("accuracy: strategy x model, points over PyG's loop with our masks", matrix(five, masked, refused))
    show("accuracy: the same masks", paired_table(five, paired))
    show("accuracy: five seeds", accuracy_table(five))
    show("accuracy: fifteen more seeds", accuracy_table(of_stage(rows, "more")))
    show("accuracy: all twenty", accuracy_table(with_more(rows)))
    show("refused", refusals(rows))


def show(title: str, lines: Iterable[str]) -> None:
    print("\n".join(["", f"### {title}", "", *lines]))


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


def losses_table(cells: Cells) -> Iterator[str]:
    """The largest difference of a loss from that of PyG's loop, relative to it."""
    yield "| strategy | " + " | ".join(SPECS) + " |"
    yield "|" + "---|" * (1 + len(SPECS))
    for strategy in STRATEGIES:
        shown = [loss_cell(cells, name, strategy) for name in SPECS]
        if any(shown):
            yield f"| {strategy} | " + " | ".join(shown) + " |"


def loss_cell(cells: Cells, name: str, strategy: str) -> str:
    row = cells.get((name, strategy), {}).get(0)
    if row is None:
        return ""
    if "refused" in row:
        return "refused"
    theirs = cells[name, OWN][0]["losses"]
    error = max(abs(a - b) / b for a, b in zip(row["losses"], theirs, strict=True))
    return f"{'equal' if error <= EQUAL else 'approximate'} ({error:.0e})"


def matrix(cells: Cells, own: Mapping[str, Mapping[int, Row]], refused: Collection[tuple[str, str]]) -> Iterator[str]:
    """Mean difference of accuracy, and what a seed differs by at most."""
    yield "| strategy | " + " | ".join(own) + " |"
    yield "|" + "---|" * (1 + len(own))
    for strategy in STRATEGIES:
        shown = [
            "refused" if (name, strategy) in refused else gap_cell(cells.get((name, strategy), {}), runs)
            for name, runs in own.items()
        ]
        if any(shown) and strategy not in LOSSES_ALONE:
            yield f"| {strategy} | " + " | ".join(shown) + " |"


def gap_cell(runs: Mapping[int, Row], own: Mapping[int, Row]) -> str:
    if not (gaps := differences(runs, own)):
        return ""
    gap = statistics.fmean(gaps)
    return f"{gap:+.1f} (a seed: {max(map(abs, gaps)):.1f}), {'within' if abs(gap) <= MARGIN else 'beyond'}"


def accuracy_table(cells: Cells) -> Iterator[str]:
    yield "| model | run | test, % | over PyG's loop, points (95 %) | within a point | seeds |"
    yield "|" + "---|" * 6
    for name in SPECS:
        for variant in (OWN, *STRATEGIES):
            runs = {seed: row for seed, row in cells.get((name, variant), {}).items() if "refused" not in row}
            if runs:
                yield f"| {name} | {variant} | {accuracy(runs, cells.get((name, OWN), {}), variant)} | {len(runs)} |"


def accuracy(runs: Mapping[int, Row], own: Mapping[int, Row], variant: str) -> str:
    tests = f"{points(runs.values()):.1f}"
    if variant == OWN:
        return f"{tests} |  | "
    gap = mean(differences(runs, own), fewest=FEWEST_SEEDS)
    inside = "yes" if abs(gap.value) <= MARGIN else "no"
    return f"{tests} | {gap.value:+.1f} ({gap.low:+.1f} to {gap.high:+.1f}) | {inside}"


def paired_table(ours: Cells, theirs: Cells) -> Iterator[str]:
    """`single` beside PyG's loop with the masks of gnnpar: seeds, weights, masks and evaluations are the same."""
    yield "| model | PyG's loop, our masks, % | single, % | largest difference of a seed, points | seeds |"
    yield "|" + "---|" * 5
    for name in SPECS:
        if own := theirs.get((name, PAIRED)):
            runs = {seed: row for seed, row in ours[name, "single"].items() if seed in own}
            largest = max(map(abs, differences(runs, own)))
            yield f"| {name} | {points(own.values()):.1f} | {points(runs.values()):.1f} | {largest:.1f} | {len(own)} |"


def points(rows: Iterable[Row]) -> float:
    return statistics.fmean(100 * row["test"] for row in rows)


def differences(runs: Mapping[int, Row], own: Mapping[int, Row]) -> Sequence[float]:
    return [100 * (runs[seed]["test"] - own[seed]["test"]) for seed in sorted(runs.keys() & own.keys())]


def refusals(rows: Iterable[Row]) -> Iterator[str]:
    """Every line with which a strategy refuses, and the models it is of."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        if "refused" in row and row["model"] not in found[row["variant"], row["refused"]]:
            found[row["variant"], row["refused"]].append(row["model"])
    yield "| strategy | models | line |"
    yield "|" + "---|" * 3
    for (strategy, line), names in found.items():
        yield f"| {strategy} | {', '.join(names)} | {line} |"


if __name__ == "__main__":
    main()
