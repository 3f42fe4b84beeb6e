"""Tables and figure of README.md: `python experiments/rivals/report.py [--figure FILE]`.

Differences are paired by seed with exact training. "not inferior": the one-sided 95 % bound lies above -MARGIN points;
"not converged": the last fifth of the epochs raises the best validation by more than MARGIN points.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any  # of JSON

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import pictures
import records
from jobs import CUTS, GRAPHS, HELD, SENDERS, STUDIES, TIMED, VARIANTS

from gnnpar.report.statistics import geometric_mean, mean, non_inferiority

MARGIN = 1.0  # points
MIB = 2**20
DRAWN_POINTS = 20  # of a curve
LAST = 0.8  # of a run: what validation gains after it
COLOURS = ("#000000", "#999999", "#d95f02", "#e6ab02", "#1b9e77", "#66a61e", "#7570b3", "#e7298a", "#a6761d")
DRAWN = (
    "exact",
    "control",
    "pipegcn",
    "pipegcn both",
    "bns 0.1",
    "bns 0.01",
    "sancus k=4",
    "digest k=10",
    "cofree",
)
Row = Mapping[str, Any]
Runs = dict[int, Row]  # by seed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--figure", type=Path, default=HERE / "figure.svg")
    studies = studies_of(records.read(HERE / "accuracy.jsonl"))
    for study, variants in studies.items():
        show(f"{study}, {len(variants['exact'])} seeds", accuracy_table(variants))
        print("\n".join(["", *notes(variants)]))
    counted = records.read(HERE / "bytes.jsonl")
    if counted:
        show("bytes against the cut: three layers of GraphSAGE, 64 wide, MiB an epoch", bytes_table(counted))
    held = records.read(HERE / "memory.jsonl")
    if held:
        show("memory: the fullest of 4 ranks, MiB", memory_table(held))
    timed = records.read(HERE / "times.jsonl")
    if timed:
        show("times: two ranks, inside blocks", times_table(timed))
    draw(studies, counted, parser.parse_args().figure)


def show(title: str, lines: Iterable[str]) -> None:
    print("\n".join(["", f"### {title}", "", *lines]))


def studies_of(rows: Iterable[Row]) -> dict[str, dict[str, Runs]]:
    found: dict[str, dict[str, Runs]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        study, variant = row["job"].split("; ")
        found[study][variant][row["result"]["seed"]] = row
    return {
        study: {name: found[study][name] for name in VARIANTS if name in found[study]}
        for study in STUDIES
        if "exact" in found[study]
    }


def points(run: Row) -> float:
    """Test metric at the best validation, in percent."""
    return 100 * run["result"]["metric"]["test_at_best_val"]


def over_exact(runs: Runs, exact: Runs) -> list[float]:
    return [points(runs[seed]) - points(exact[seed]) for seed in sorted(runs.keys() & exact.keys())]


def late_gain(run: Row) -> float:
    """Points by which the last fifth of a run raises its best validation."""
    end = LAST * run["result"]["epochs"]
    before = max(row["metric/val"] for row in run["curve"] if row["epoch"] < end)
    return 100 * (max(row["metric/val"] for row in run["curve"]) - before)


def average(runs: Runs, *path: str) -> float:
    """Of a number of result.json."""
    values = []
    for run in runs.values():
        value: Any = run["result"]
        for key in path:
            value = value[key]
        values.append(value)
    return statistics.fmean(values)


def accuracy_table(variants: dict[str, Runs]) -> Iterator[str]:
    exact = variants["exact"]
    sent = average(exact, "bytes_per_epoch", "total")
    yield (
        "| variant | test | over exact, points (95 %) | verdict | gradient error | cosine | MiB an epoch | of exact "
        "| last loss | late gain |"
    )
    yield "|" + "---|" * 10
    for name, runs in variants.items():
        differences = over_exact(runs, exact)
        gap, bytes_sent = mean(differences), average(runs, "bytes_per_epoch", "total")
        error = average(runs, "fidelity", "relative_error", "mean")
        cosine = average(runs, "fidelity", "cosine", "mean")
        gain = statistics.fmean(late_gain(run) for run in runs.values())
        verdict = "not converged" if gain > MARGIN else non_inferiority(differences, MARGIN)
        verdict = "" if name == "exact" else verdict
        yield (
            f"| {name} | {statistics.fmean(points(run) for run in runs.values()):.1f} "
            f"| {gap.value:+.1f} ({gap.low:+.1f} to {gap.high:+.1f}) | {verdict} | {error:.3f} | {cosine:.3f} "
            f"| {bytes_sent / MIB:.3f} | {bytes_sent / sent:.3f} | {average(runs, 'loss', 'last'):.3f} | {gain:+.1f} |"
        )


def notes(variants: dict[str, Runs]) -> Iterator[str]:
    exact = variants["exact"]
    gain = statistics.fmean(late_gain(run) for run in exact.values())
    yield f"The last fifth of the epochs raises the best validation of exact training by {gain:.1f} points."
    if "control" in variants:
        control = non_inferiority(over_exact(variants["control"], exact), MARGIN)
        fit = {"not inferior": "is unfit for", "inferior": "can carry"}.get(control, "may not carry")
        yield f"The control is {control}: the graph {fit} a claim of no loss."


def bytes_table(rows: Sequence[Row]) -> Iterator[str]:
    """Forward and backward rows, all ranks; the sum of gradients is the same for all three."""
    found = {(row["graph"], row["cut"], row["world_size"], row["strategy"]): row for row in rows}
    ranks = sorted({row["world_size"] for row in rows})
    yield "| graph | cut | ranks | halos | feature | cagnet | feature / halos |"
    yield "|" + "---|" * 7
    for graph in GRAPHS:
        for cut in CUTS:
            for count in ranks:
                if (graph, cut, count, SENDERS[0]) not in found:
                    continue
                halos, feature, cagnet = (rows_sent(found[graph, cut, count, each]) for each in SENDERS)
                yield (
                    f"| {graph} | {cut} | {count} | {halos / MIB:.2f} | {feature / MIB:.2f} | {cagnet / MIB:.2f} "
                    f"| {feature / halos:.2f} |"
                )


def rows_sent(row: Row) -> float:
    return row["bytes_per_epoch"]["forward"] + row["bytes_per_epoch"]["backward"]


CATEGORIES = ("features", "structure", "activations", "halo")


def memory_table(rows: Sequence[Row]) -> Iterator[str]:
    found = {row["job"]: row["result"] for row in rows}
    whole = max(found["graph_parallel"]["memory_bytes"]["peak"])
    yield "| variant | peak | of graph_parallel | " + " | ".join(CATEGORIES) + " |"
    yield "|" + "---|" * (3 + len(CATEGORIES))
    for name in (name for name in HELD if name in found):
        memory = found[name]["memory_bytes"]
        peak = max(memory["peak"])
        live = " | ".join(f"{memory['live'][key] / MIB:.2f}" for key in CATEGORIES)
        yield f"| {name} | {peak / MIB:.1f} | {peak / whole:.2f} | {live} |"


def times_table(rows: Sequence[Row]) -> Iterator[str]:
    """Times faster than vanilla and than overlapped graph parallelism, geometric means of ratios inside blocks."""
    seconds: dict[str, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        link, name = row["job"].split("; ")
        seconds[link][name][row["block"]] = row["result"]
    yield "| links | strategy | epoch, ms | times vanilla (95 %) | times overlapped fp32 | waits, ms | MiB an epoch |"
    yield "|" + "---|" * 7
    for link, names in seconds.items():
        for name in (name for name in TIMED if name in names):
            base = names["vanilla"].keys() & names["graph_parallel"].keys()
            runs = {block: run for block, run in names[name].items() if block in base}
            if not runs:
                continue
            vanilla = geometric_mean([epoch(names["vanilla"][b]) / epoch(run) for b, run in runs.items()])
            overlapped = geometric_mean([epoch(names["graph_parallel"][b]) / epoch(run) for b, run in runs.items()])
            spent = [run["breakdown_seconds"] for run in runs.values()]
            waits = statistics.fmean(each["exposed_wire"] + each["exposed_skew"] for each in spent)
            sent = statistics.fmean(run["bytes_per_epoch"]["total"] for run in runs.values()) / MIB
            yield (
                f"| {link} | {name} | {1e3 * statistics.fmean(map(epoch, runs.values())):.1f} "
                f"| {vanilla.value:.2f} ({vanilla.low:.2f} to {vanilla.high:.2f}) | {overlapped.value:.2f} "
                f"| {1e3 * waits:.1f} | {sent:.2f} |"
            )


def epoch(result: Row) -> float:
    return result["epoch_seconds"]["mean"]


def draw(studies: dict[str, dict[str, Runs]], counted: Sequence[Row], file: Path) -> None:
    """Training loss and validation of each study, mean over seeds; last: feature parallelism's bytes over halos'."""
    plt = pictures.pyplot(8)
    figure, axes = plt.subplots(2, len(studies) + 1, figsize=(3.4 * (len(studies) + 1), 5), squeeze=False)
    for column, (study, variants) in enumerate(studies.items()):
        losses, metrics = axes[:, column]
        for name, colour in zip(DRAWN, COLOURS, strict=True):
            if name in variants:
                losses.plot(*curve(variants[name], "loss/train"), color=colour, lw=1.1, label=name)
                metrics.plot(*curve(variants[name], "metric/val"), color=colour, lw=1.1, label=name)
        top = max(curve(variants["exact"], "loss/train")[1])
        losses.set(title=study, ylabel="training loss", ylim=(0, 1.2 * top))
        metrics.set(xlabel="epoch", ylabel="validation")
    losses, metrics = axes[:, -1]
    found = {(row["graph"], row["cut"], row["world_size"], row["strategy"]): row for row in counted}
    for axis, cut in zip((losses, metrics), CUTS, strict=True):
        for graph, colour in zip(GRAPHS, COLOURS, strict=False):
            ranks = [n for n in (2, 4, 8) if (graph, cut, n, "feature") in found]
            ratios = [
                rows_sent(found[graph, cut, n, "feature"]) / rows_sent(found[graph, cut, n, "graph_parallel"])
                for n in ranks
            ]
            axis.plot(ranks, ratios, "o-", color=colour, ms=3, lw=1, label=graph)
        axis.axhline(1, color="0.7", lw=0.8)
        axis.set(yscale="log", ylabel="bytes: feature / halos", title=f"{cut} cut")
        axis.set_xticks([2, 4, 8], ["2", "4", "8"])
    metrics.set(xlabel="ranks")
    losses.legend(frameon=False, fontsize=6)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(DRAWN), frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    pictures.save(figure, file)
    plt.close(figure)


def curve(runs: Runs, key: str) -> tuple[list[int], list[float]]:
    """Epochs, at most DRAWN_POINTS of them and the last, and the mean over seeds at each."""
    at: dict[int, list[float]] = defaultdict(list)
    for run in runs.values():
        every = -(-len(run["curve"]) // DRAWN_POINTS)
        for row in run["curve"][::-every]:
            at[row["epoch"] + 1].append(row[key])
    return sorted(at), [statistics.fmean(at[epoch]) for epoch in sorted(at)]


if __name__ == "__main__":
    main()
