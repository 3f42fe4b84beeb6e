"""Tables over cells, a line a method. A cell is a study and a model; in it differences are paired by seed, and ratios
formed inside blocks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import reports
from compare_all.run import METHODS

from gnnpar.report.formatting import ratio
from gnnpar.report.statistics import Verdict, family, geometric_mean, mean, non_inferiority

Row = Mapping[str, Any]
Rows = Sequence[Row]
Cell = tuple[str, str]  # study, model
Cells = Mapping[Cell, Mapping[str, Rows]]  # method -> its rows
EXACT = ("single", "vanilla", "graph_parallel", "graph_parallel bf16", "single, all threads")
LINKS = {"speed": "loopback", "paced": "1 Gbit/s"}  # study -> over what
MARGIN = 0.3  # points
VERDICTS = ("not inferior", "inconclusive", "inferior")
ACCURACY = ("strategy", "cells", *VERDICTS, "unfit", "mean difference", "worst", "where the control is inferior")
GLANCE = ("strategy", "exactness", *(f"speed, {link}" for link in LINKS.values()), "sent", "peak/rank")
GLANCE += (*VERDICTS, "gradient error")
NOTE = """Speed (times faster), bytes and memory beside vanilla, means over models. Accuracy: cells, by what paired
differences to `single` say of a loss of 0.3 points, corrected over the cells of a strategy (Holm); those whose control
passes too are in none of the three. Gradient: from the best cell to the worst. What was not timed here has its bytes
from studies over seeds, beside `graph_parallel` on as many ranks; the rivals were timed in `experiments/rivals`.
"""


def by_cell(studies: Mapping[str, Rows]) -> Cells:
    """(study, model) -> method, as it is named in every study -> its completed rows."""
    rows = [(study, row["result"]["model"], row) for study, some in studies.items() for row in some]
    completed = [each for each in rows if each[-1]["result"]["status"] == "completed"]
    return {
        cell: reports.by((row for *_, row in mine), lambda row: row["job"].removeprefix(f"{row['result']['model']} "))
        for cell, mine in reports.by(completed, lambda each: each[:2]).items()
    }


def methods_of(cells: Cells, without: Sequence[str] = ()) -> list[str]:
    """Return the methods of all cells in the order of METHODS, without those with a word of `without` in their name."""
    names = dict.fromkeys(name for methods in cells.values() for name in methods)
    some = [name for name in names if not any(word in name for word in without)]
    return sorted(some, key=lambda name: METHODS.index(name) if name in METHODS else -1)


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


def speedups(cells: Cells, base: str | None) -> Iterable[list[str]]:
    """Times faster than `base` in every cell (None: its best baseline), and the mean over all.

    Left out: mini-batches, whose epoch is other work, and cached first layers, whose baseline is another.
    """
    bases = [methods.get(base or best_baseline(methods) or "", ()) for methods in cells.values()]
    for name in methods_of(cells, without=("minibatch", "cached")):
        pairs = zip(cells.values(), bases, strict=True)
        found = [ratios(methods.get(name, ()), against) for methods, against in pairs]
        means = [geometric_mean(each) if each else None for each in found]
        values = [each.value for each in means if each]
        yield [name, *map(ratio, means), f"{geometric_mean(values).value:.2f} ({len(values)})" if values else "-"]


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


def counts(found: Iterable[tuple[Verdict | str, float]], kinds: Sequence[str]) -> list[str]:
    """How many verdicts of each kind; '-' where there are none at all."""
    verdicts = [verdict for verdict, _ in found]
    return [str(verdicts.count(kind)) if verdicts else "-" for kind in kinds]


def verdicts(cells: Cells) -> Iterable[list[str]]:
    """Cells, verdicts by kind, the mean difference and the worst, verdicts where messages matter.

    The last are those of cells whose control is inferior, corrected as one of all cells, like the others.
    """
    control = {cell for cell, (verdict, _) in judged(cells, "control").items() if verdict == "inferior"}
    for name in methods_of(cells):
        if found := judged(cells, name):
            worst = min(found, key=lambda cell: found[cell][1])
            average = mean([off for _, off in found.values()]).value
            telling = counts([each for cell, each in found.items() if cell in control], VERDICTS)
            there = ", ".join(f"{n} {kind}" for n, kind in zip(telling, VERDICTS, strict=True) if n != "-") or "-"
            shown = counts(found.values(), (*VERDICTS, "unfit"))
            yield [name, str(len(found)), *shown, f"{average:+.2f}", f"{found[worst][1]:+.2f} ({worst})", there]


def glance(timed: Cells, trained: Cells) -> Iterable[list[str]]:
    """What each strategy costs beside vanilla, and whether its accuracy is that of `single`.

    Speeds, bytes and memory are those of vanilla times what is shown, means over models (speeds geometric; none of
    mini-batches, whose epoch is other work); cells of accuracy are counted, unfit ones left out. A cached first layer
    is left out, as its baseline is another.
    """
    both: dict[Cell, Mapping[str, Rows]] = {**timed, **trained}
    for name in methods_of(both, without=("cached",)):
        first = next(methods[name][0] for methods in both.values() if name in methods)
        bytes_sent = _share(timed, name, sent)
        if not any(name in methods for methods in timed.values()):
            bytes_sent = _share(trained, name, sent, base="graph_parallel")
        costs = [*(_speed(timed, name, study) for study in LINKS), bytes_sent, _share(timed, name, peak)]
        shown = counts(judged(trained, name).values(), VERDICTS)
        yield [name, ", ".join(first["result"]["exactness"]), *costs, *shown, _error(trained, name)]


def sent(row: Row) -> float:
    """Bytes an epoch, over all ranks."""
    return row["result"]["bytes_per_epoch"]["total"]


def peak(row: Row) -> float:
    """Bytes of the rank that needs most."""
    return max(row["result"]["memory_bytes"]["peak"])


def _speed(cells: Cells, name: str, study: str) -> str:
    beside = [ratios(m.get(name, ()), m.get("vanilla", ())) for (where, _), m in cells.items() if where.endswith(study)]
    means = [geometric_mean(found).value for found in beside if found]
    return f"{geometric_mean(means).value:.2f}" if means and "minibatch" not in name else "-"


def _share(cells: Cells, name: str, of: Callable[[Row], float], *, base: str = "vanilla") -> str:
    """Beside another base than vanilla, of cells in which both have as many ranks."""
    shares = [
        mean(list(map(of, methods[name]))).value / mean(list(map(of, methods[base]))).value
        for methods in cells.values()
        if {name, base} <= methods.keys()
        and (base == "vanilla" or len({methods[each][0]["result"]["world_size"] for each in (name, base)}) == 1)
    ]
    return f"{mean(shares).value:.2f}" if shares else "-"


def _error(cells: Cells, name: str) -> str:
    """Of the gradient beside the exact one, at the same weights: from the best cell to the worst."""
    means = []
    for methods in cells.values():
        probes = [row["result"]["fidelity"] for row in methods.get(name, ())]
        if errors := [probe["relative_error"]["mean"] for probe in probes if probe]:
            means.append(mean(errors).value)
    return " to ".join(dict.fromkeys(f"{end(means):.2g}" for end in (min, max))) if means else "-"
