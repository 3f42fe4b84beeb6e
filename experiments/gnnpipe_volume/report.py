"""Volumes of GNNPipe's main table by formula, and bytes that were sent: tables and figure."""

import itertools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnnpipe_volume.paper import BYTES, both

HERE = Path(__file__).parent

import reports
from records import Files

Rows = dict[tuple[str, int, str], dict[str, Any]]
NAMES = ("graph", "pipeline", "hybrid")
SBM = ("gcn", "sage", "gcnii", "resgcn")  # models that are trained on sbm
STRATEGIES = {"graph_parallel": (1, 4), "gnnpipe": (4, 1), "hybrid": (2, 2)}  # stages, ways
COLOURS = ("#444444", "#d95f02", "#1b9e77")


def paper_table() -> str:
    """GiB an epoch at 8 GPUs, 32 layers: by formula, and as logged."""
    heads = ("graph", "model", "graph, pipeline, hybrid by formula, GiB", "as logged", "graph / pipeline", "as logged")
    lines, ratios = [reports.table(heads, [])], []
    for key, pair in both().items():
        ratios.append([each[0] / each[1] for each in pair])
        cells = [" / ".join(f"{value:.2f}" for value in each) for each in pair]
        lines.append(f"| {' | '.join((*key, *cells))} | {ratios[-1][0]:.2f} | {ratios[-1][1]:.2f} |")
    for name, of in (("geometric mean | 16 cells", statistics.geometric_mean), ("largest |", max)):
        ends = [of(each) for each in zip(*ratios, strict=True)]
        lines.append(f"| {name} | | | {ends[0]:.2f} | {ends[1]:.2f} |")
    return "\n".join(lines)


def deviations() -> list[float]:
    """Formula over log less 1, of all 48 volumes; logs have two decimals, so half a unit of the last is taken off."""
    pairs = [pair for formula, logged in both().values() for pair in zip(formula, logged, strict=True)]
    return [max(0.0, abs(ours - theirs) - 0.005) / theirs for ours, theirs in pairs]


def line(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the formulas need, also of lines that blocks.py has written."""
    if "job" not in row:
        return dict(row)
    model, layers, strategy = row["job"].split("; ")
    shape = {"nodes": row["graph"]["nodes"], "hidden": 32, "alpha": row["graph"]["alpha"]}
    stages, ways = STRATEGIES[strategy]
    about = {"model": model, "layers": int(layers), "strategy": strategy, "stages": stages, "ways": ways}
    return about | shape | {"bytes_per_epoch": row["result"]["bytes_per_epoch"]}


def expected(row: dict[str, Any], alpha: float) -> dict[str, float]:
    """Bytes an epoch by formula: halos over the ways, boundaries. `alpha`: of as many parts as there are ways."""
    each = 2 * BYTES * row["nodes"] * row["hidden"]
    carried = 2 if row["model"] == "gcnii" else 1
    rows = round(alpha * row["nodes"])  # alpha is kept in single precision
    return {"halo": each * row["layers"] * rows / row["nodes"], "stage": each * (row["stages"] - 1) * carried}


def sent(row: dict[str, Any]) -> dict[str, int]:
    counted = row["bytes_per_epoch"]
    return {"halo": counted["forward"] + counted["backward"], "stage": counted["stage"]}


def measured_table(rows: Rows) -> str:
    """sbm: bytes that were sent against the formulas, and ratios of volumes against alpha L / ((S - 1)(1 + delta))."""
    lines = []
    for (model, depth, strategy), row in rows.items():
        wanted, found = expected(row, row["alpha"]), sent(row)
        base = rows[model, depth, "graph_parallel"]
        ratio = sum(sent(base).values()) / max(1, sum(found.values()))
        carried = (row["stages"] - 1) * (2 if model == "gcnii" else 1)
        law = f"{base['alpha'] * depth / carried:.2f}" if strategy == "gnnpipe" else ""
        shape = (f"{row['stages']} x {row['ways']}", f"{row['alpha']:.3f}")
        counts = [each for name in ("halo", "stage") for each in (found[name], f"{wanted[name]:.0f}")]
        lines.append([model, depth, strategy, *shape, *counts, f"{ratio:.2f}", law])
    heads = (
        "model",
        "layers",
        "strategy",
        "S x W",
        "alpha(W)",
        "halo bytes",
        "by formula",
        "stage bytes",
        "by formula",
    )
    return reports.table((*heads, "graph_parallel / this", "alpha L / ((S - 1)(1 + delta))"), lines)


def draw(rows: Rows, files: Files) -> None:
    plt = reports.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.6), layout="constrained")
    for number, (name, colour) in enumerate(zip(NAMES, COLOURS, strict=True)):
        pairs = [(logged[number], formula[number]) for formula, logged in both().values()]
        axes[0].plot(*zip(*pairs, strict=True), "o", color=colour, ms=4, label=name)
    axes[0].plot([0.15, 16], [0.15, 16], "-", color="0.8", lw=1, zorder=0)
    axes[0].set(xscale="log", yscale="log", xlabel="logged by the authors, GiB", ylabel="by formula, GiB")
    axes[0].set_title("8 GPUs, 32 layers")
    axes[0].legend(frameon=False)
    for strategy, colour in zip(STRATEGIES, COLOURS, strict=True):
        mine = [row for (_, _, name), row in rows.items() if name == strategy]
        pairs = [(sum(expected(r, r["alpha"]).values()) / 2**20, sum(sent(r).values()) / 2**20) for r in mine]
        axes[1].plot(*zip(*pairs, strict=True), "o", color=colour, ms=4, label=strategy)
    ends = axes[1].get_xlim()
    axes[1].plot(ends, ends, "-", color="0.8", lw=1, zorder=0)
    axes[1].set(xscale="log", yscale="log", xlabel="by formula, MiB", ylabel="sent, MiB", title="sbm, 4 ranks")
    axes[1].legend(frameon=False)
    reports.save(figure, files.figure)


def report(files: Files) -> None:
    print(paper_table())
    print(f"\n48 volumes: the largest deviation beyond rounding is {max(deviations()):.2%}\n")
    found = {(row["model"], row["layers"], row["strategy"]): row for row in map(line, files.read())}
    if rows := {key: found[key] for key in itertools.product(SBM, (8, 32), STRATEGIES) if key in found}:
        print(measured_table(rows))
        draw(rows, files)
