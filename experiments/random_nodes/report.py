"""Accuracy of random nodes, and the time to it.

Differences are paired by seed with full-graph training; "late gain": the points by which the last fifth of the epochs
raises the best validation. The target of "time to accuracy" is full-graph training's mean best validation less one
deviation of its seeds; seconds are epochs until a validation reaches it, times the median seconds of an epoch.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import reports
from paired import Row, Runs, cells, differences, each, late_gain, target, test, validation, verdict
from records import Files

from gnnpar.report.formatting import interval
from gnnpar.report.statistics import FEWEST_SEEDS, geometric_mean, mean

MARGIN = 1.0  # points
FULL = "full"
HEADINGS = ("model", "variant", "test, %", "over full, points", "verdict", "epochs", "steps an epoch")
TIMES = ("graph", "variant", "target, %", "ms an epoch", "times full", "epochs to target", "s to target", "reached by")
HEADINGS += ("in-edges of a step's nodes kept", "late gain", "seeds")


def job(row: Row) -> str:
    names = [row[key] for key in ("graph", "model", "variant") if key in row]
    return row.get("job") or "; ".join(names)


def report(files: Files) -> None:
    found = cells({**row, "job": job(row)} for row in files.read())
    for graph, models in reports.by(found, lambda cell: cell[0]).items():
        lines = [
            (model, variant, *columns(variant, runs, found[graph, model][FULL]))
            for _, model in models
            for variant, runs in found[graph, model].items()
        ]
        reports.show(graph, reports.table(HEADINGS, lines))
    if timed := list(times(found, files.read("times"))):
        reports.show("Time to accuracy", reports.table(TIMES, timed))


def columns(variant: str, runs: Runs, full: Runs) -> list[object]:
    first, found, gain = next(iter(runs.values())), differences(runs, full), late_gain(runs)
    over = interval(mean(found), signed=True) if len(found) >= FEWEST_SEEDS else each(found)
    judged = ["", ""] if variant == FULL else [over, verdict(found, gain, MARGIN)]
    steps = first.get("steps") or first.get("sampled", {}).get("sample/steps") or 1
    about = [first["result"]["epochs"], steps, kept(variant, first)]
    return [f"{test(runs):.1f}", *judged, *about, f"{gain:+.1f}", len(runs)]


def times(found: Mapping[tuple[str, ...], Mapping[str, Runs]], rows: Sequence[Row]) -> Iterator[tuple[object, ...]]:
    """Yield lines of GCN: epochs and seconds are means over the seeds that reach the target."""
    seconds: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        graph, variant = job(row).split("; ")
        seconds[graph, variant][row["block"]] = row["result"]["epoch_seconds"]["median"]
    for (graph, variant), blocks in sorted(seconds.items()):
        full, runs = found[graph, "gcn"][FULL], found[graph, "gcn"][variant]
        aim = target(max(value for _, value in validation(row)) for row in full.values())
        epochs = [next((epoch + 1 for epoch, value in validation(row) if value >= aim), None) for row in runs.values()]
        reached, each_epoch = [each for each in epochs if each is not None], statistics.median(blocks.values())
        ratio = geometric_mean([blocks[block] / seconds[graph, FULL][block] for block in blocks])
        average = statistics.fmean(reached) if reached else None
        needed = ["-", "-"] if average is None else [f"{average:.0f}", f"{average * each_epoch:.3g}"]
        many = "1" if variant == FULL else reports.interval(ratio)
        yield (
            graph,
            variant,
            f"{100 * aim:.1f}",
            f"{1000 * each_epoch:.0f}",
            many,
            *needed,
            f"{len(reached)} of {len(epochs)}",
        )


def kept(variant: str, run: Row) -> str:
    """Share of the edges that the steps of an epoch have together, without self loops."""
    edges = run.get("edges") or run.get("sampled", {}).get("sample/edges")
    if edges is None:
        return {"control": "0"}.get(variant, "1")
    nodes, whole = run.get("nodes") or run["graph"]["nodes"], run.get("whole") or run["graph"]["edges"]
    return f"{(edges - nodes) / (whole - nodes):.3f}"
