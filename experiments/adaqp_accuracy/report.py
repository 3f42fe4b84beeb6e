"""The tables of results.jsonl: `python experiments/adaqp_accuracy/report.py [FILE]`.

Differences are paired by seed; "not inferior" is protocol rule 12 with a margin of 0.3 points. Where the drop control
passes too, the dataset cannot carry the claim. Targets are the exact runs' mean best validation less one deviation.
"""

import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from gnnpar.report.statistics import mean, non_inferiority

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records

MARGIN = 0.3
Runs = dict[int, dict[str, Any]]  # by seed


def verdict(runs: Runs, exact: Runs) -> str:
    """Test accuracy at best validation against the exact run of the same seed, in points."""
    differences = [100 * (runs[s]["test"] - exact[s]["test"]) for s in sorted(runs.keys() & exact.keys())]
    estimate = mean(differences)
    interval = "" if math.isnan(estimate.low) else f" ({estimate.low:+.2f} to {estimate.high:+.2f})"
    return f"{estimate.value:+.2f}{interval} | {non_inferiority(differences, MARGIN)}"


def errors(runs: Runs) -> tuple[float, dict[str, float]]:
    """Relative gradient error over all probes: overall, and by layer."""
    probes = [probe for run in runs.values() for probe in run["probes"]]
    layers: dict[str, list[float]] = defaultdict(list)
    for probe in probes:
        for name, (_, error) in probe["fidelity/layers"].items():
            layers[name].append(error or 0.0)
    total = statistics.fmean(probe["fidelity/relative_error"] for probe in probes)
    return total, {name: statistics.fmean(values) for name, values in sorted(layers.items())}


def to_target(runs: Runs, target: float) -> str:
    """Epochs and megabytes of halos until validation reaches the target: medians; > where half of them never do."""
    reached = []
    for run in runs.values():
        hit = next((row for row in run["curve"] if row[1] >= target), None)
        reached.append((hit[0], hit[3]) if hit else (math.inf, math.inf))
    epochs, nbytes = (statistics.median(column) for column in zip(*reached, strict=True))
    if math.isinf(epochs):
        last = next(iter(runs.values()))
        return f"> {last['epochs']} | > {last['halo_bytes'] / 1e6:.1f}"
    return f"{epochs:.0f} | {nbytes / 1e6:.1f}"


def table(title: str, codecs: dict[str, Runs]) -> None:
    exact = codecs["exact"]
    best = [run["best_val"] for run in exact.values()]
    target = statistics.fmean(best) - (statistics.stdev(best) if len(best) > 1 else 0.0)
    print(f"\n### {title}, {len(exact)} seeds, {next(iter(exact.values()))['epochs']} epochs")
    print(f"\nTarget of validation: {100 * target:.2f} %")
    columns = ["codec", "test", "over exact, points (95 %)", "verdict", "gradient error", "by layer", "MB"]
    columns += ["epochs to target", "MB to target"]
    print("\n| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for codec, runs in codecs.items():
        test = statistics.fmean(100 * run["test"] for run in runs.values())
        total, layers = errors(runs)
        by_layer = " ".join(f"{value:.3f}" for value in layers.values())
        sent = statistics.fmean(run["halo_bytes"] for run in runs.values()) / 1e6
        cells = (
            f"{test:.2f} | {verdict(runs, exact)} | {total:.4f} | {by_layer} | {sent:.1f} | {to_target(runs, target)}"
        )
        print(f"| {codec} | {cells} |")
    if "adaptive_4" in codecs and "uniform_4" in codecs:
        ours, theirs = codecs["adaptive_4"], codecs["uniform_4"]
        pairs = [(late_error(ours[seed]), late_error(theirs[seed])) for seed in sorted(ours.keys() & theirs.keys())]
        logs = [math.log(a / b) for a, b in pairs if a and b]  # a model that has died has no gradient to be wrong
        ratio = mean(logs)
        value, low, high = (math.exp(x) for x in (ratio.value, ratio.low, ratio.high))
        interval = f"{value:.3f} ({low:.3f} to {high:.3f}), {len(logs)} of {len(pairs)} seeds"
        print(f"\nGradient error of adaptive_4 over uniform_4, after the warm-up: {interval}")
    if "drop" in codecs:
        control = verdict(codecs["drop"], exact).rpartition("| ")[2]
        fit = "is unfit for" if control == "not inferior" else "can carry" if control == "inferior" else "may not carry"
        print(f"\nThe drop control is {control}: the dataset {fit} the claim.")


def late_error(run: dict[str, Any]) -> float:
    """Without the probe of epoch 0, before bits were chosen."""
    return statistics.fmean(probe["fidelity/relative_error"] for probe in run["probes"] if probe["epoch"] > 0)


def main(path: Path) -> None:
    cells: dict[tuple[str, str, int], dict[str, Runs]] = defaultdict(lambda: defaultdict(dict))
    rows = records.read(path)
    for row in rows:  # a later run of the same cell replaces an earlier one
        cells[row["dataset"], row["model"], row["ranks"]][row["codec"]][row["seed"]] = row
    print(f"{rows[-1]['processor']}, {rows[-1]['cores']} cores, torch {rows[-1]['torch']}, {rows[-1]['session'][:10]}")
    for (dataset, model, ranks), codecs in cells.items():
        table(f"{dataset}, {model}, {ranks} ranks", codecs)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results.jsonl")
