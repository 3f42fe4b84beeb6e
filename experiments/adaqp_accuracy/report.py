"""Accuracy and gradient error of each codec.

Differences are paired by seed; "not inferior" is protocol rule 12 with a margin of 0.3 points. Where the drop control
passes too, the dataset cannot carry the claim. Targets are the exact runs' mean best validation less one deviation.
"""

import math
import statistics
from collections import defaultdict
from typing import Any

import reports
from paired import control, gap, target
from records import Files, Row

from gnnpar.report.statistics import mean, non_inferiority

MARGIN = 0.3
Runs = dict[int, Row]  # by seed


def errors(runs: Runs) -> tuple[float, dict[str, float]]:
    """Relative gradient error over all probes: overall, and by layer."""
    probes = [probe for run in runs.values() for probe in run["probes"]]
    layers: dict[str, list[float]] = defaultdict(list)
    for probe in probes:
        for name, (_, error) in probe["fidelity/layers"].items():
            layers[name].append(error or 0.0)
    total = statistics.fmean(probe["fidelity/relative_error"] for probe in probes)
    return total, {name: statistics.fmean(values) for name, values in sorted(layers.items())}


def differences(runs: Runs, exact: Runs) -> list[float]:
    """Test accuracy at best validation less that of the exact run of the same seed, in points."""
    return [100 * (runs[seed]["test"] - exact[seed]["test"]) for seed in sorted(runs.keys() & exact.keys())]


def to_target(runs: Runs, target: float) -> tuple[str, str]:
    """Epochs and megabytes of halos until validation reaches the target: medians; > where half of them never do."""
    reached = []
    for run in runs.values():
        hit = next((row for row in run["curve"] if row[1] >= target), None)
        reached.append((hit[0], hit[3]) if hit else (math.inf, math.inf))
    epochs, nbytes = (statistics.median(column) for column in zip(*reached, strict=True))
    if math.isinf(epochs):
        last = next(iter(runs.values()))
        return f"> {last['epochs']}", f"> {last['halo_bytes'] / 1e6:.1f}"
    return f"{epochs:.0f}", f"{nbytes / 1e6:.1f}"


def table(title: str, codecs: dict[str, Runs]) -> None:
    exact = codecs["exact"]
    goal = target(run["best_val"] for run in exact.values())
    found = {codec: errors(runs) for codec, runs in codecs.items()}
    over = {codec: differences(runs, exact) for codec, runs in codecs.items()}
    of = {
        "codec": str,
        "test": lambda codec: f"{statistics.fmean(100 * run['test'] for run in codecs[codec].values()):.2f}",
        "over exact, points (95 %)": lambda codec: gap(over[codec]),
        "verdict": lambda codec: non_inferiority(over[codec], MARGIN),
        "gradient error": lambda codec: f"{found[codec][0]:.4f}",
        "by layer": lambda codec: " ".join(f"{value:.3f}" for value in found[codec][1].values()),
        "MB": lambda codec: f"{statistics.fmean(run['halo_bytes'] for run in codecs[codec].values()) / 1e6:.1f}",
        "epochs to target": lambda codec: to_target(codecs[codec], goal)[0],
        "MB to target": lambda codec: to_target(codecs[codec], goal)[1],
    }
    print(f"\n### {title}, {len(exact)} seeds, {next(iter(exact.values()))['epochs']} epochs")
    print(f"\nTarget of validation: {100 * goal:.2f} %\n\n{reports.columns(of, codecs)}")
    if "adaptive_4" in codecs and "uniform_4" in codecs:
        ours, theirs = codecs["adaptive_4"], codecs["uniform_4"]
        pairs = [(late_error(ours[seed]), late_error(theirs[seed])) for seed in sorted(ours.keys() & theirs.keys())]
        logs = [math.log(a / b) for a, b in pairs if a and b]  # a model that has died has no gradient to be wrong
        ratio = mean(logs)
        value, low, high = (math.exp(x) for x in (ratio.value, ratio.low, ratio.high))
        interval = f"{value:.3f} ({low:.3f} to {high:.3f}), {len(logs)} of {len(pairs)} seeds"
        print(f"\nGradient error of adaptive_4 over uniform_4, after the warm-up: {interval}")
    if "drop" in codecs:
        print(control(over["drop"], MARGIN))


def late_error(run: dict[str, Any]) -> float:
    """Without the probe of epoch 0, before bits were chosen."""
    return statistics.fmean(probe["fidelity/relative_error"] for probe in run["probes"] if probe["epoch"] > 0)


def shaped(row: Row) -> Row:
    """Return a line of blocks.py as one of the first runs, which were made in one process."""
    if "job" not in row:
        return row
    dataset, model, ranks, codec = row["job"].split("; ")
    result = row["result"]
    sent, epochs, metric = result["bytes_per_epoch"], result["epochs"], result["metric"]
    halo = [point["comm/total_bytes_so_far"] - (point["epoch"] + 1) * sent["reduce"] for point in row["curve"]]
    curve = [
        (point["epoch"] + 1, point["metric/val"], point["metric/test"], nbytes)
        for point, nbytes in zip(row["curve"], halo, strict=True)
    ]
    about = {"dataset": dataset, "model": model, "ranks": int(ranks), "codec": codec, "seed": result["seed"]}
    about |= {"processor": result["hardware"].partition(",")[0], "cores": result["cores"]}
    about |= {"torch": result["versions"]["torch"]}
    about |= {"session": str(result["commit"]), "epochs": epochs, "curve": curve, "probes": row["probes"]}
    best = {"best_val": metric["best_val"], "test": metric["test_at_best_val"]}
    return about | best | {"halo_bytes": (sent["total"] - sent["reduce"]) * epochs}


def report(files: Files) -> None:
    cells: dict[tuple[str, str, int], dict[str, Runs]] = defaultdict(lambda: defaultdict(dict))
    rows = list(map(shaped, files.read()))
    for row in rows:  # a later run of the same cell replaces an earlier one
        cells[row["dataset"], row["model"], row["ranks"]][row["codec"]][row["seed"]] = row
    print(f"{rows[-1]['processor']}, {rows[-1]['cores']} cores, torch {rows[-1]['torch']}, {rows[-1]['session'][:10]}")
    for (dataset, model, ranks), codecs in cells.items():
        table(f"{dataset}, {model}, {ranks} ranks", codecs)
