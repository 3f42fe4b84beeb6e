"""Epochs of each mode at the operating point, and the curve over rates.

Ratios form inside a block (mean epoch of vanilla over mean epoch of the mode, re-assignment included); geometric mean
and 95 % interval over blocks.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import reports
from records import Files

from gnnpar.report.statistics import geometric_mean

PARTS = {
    "compute": ("compute", "other", "bubble"),
    "encode": ("encode",),
    "exposed": ("exposed_wire", "exposed_skew"),
    "reduce": ("reduce",),
}
COLORS = {"vanilla": "#444444", "bf16_overlap": "#1b9e77", "adaqp_p": "#d95f02", "adaqp_q": "#7570b3"}
COLORS |= {"uniform_8": "#e7298a", "uniform_4": "#66a61e", "uniform_2": "#e6ab02"}
COLORS |= {"adaptive": "#a6761d", "adaptive_paper": "#1f78b4"}
Rows = list[dict[str, Any]]


def ratios(rows: Rows, base: str, mode: str) -> list[float]:
    """Epoch time of the base over the mode's, by block."""
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        times[row["mode"], row["block"]].append(row["time/epoch_seconds"])
    blocks = sorted({block for _, block in times})
    return [statistics.fmean(times[base, b]) / statistics.fmean(times[mode, b]) for b in blocks]


def bounds(rows: Rows, mode: str) -> tuple[float, float]:
    """What vanilla's share f and the compression c of halo bytes allow: without overlap, and with all of it."""
    f, c = rows[0]["share"], halo_bytes(rows, "vanilla") / halo_bytes(rows, mode)
    return 1 / (1 - f + f / c), 1 / max(1 - f, f / c)


def halo_bytes(rows: Rows, mode: str) -> float:
    mine = [row["comm/forward_bytes"] + row["comm/backward_bytes"] for row in rows if row["mode"] == mode]
    return statistics.fmean(mine)


def mean(rows: Rows, mode: str, keys: Sequence[str]) -> float:
    return statistics.fmean(sum(row[f"time/{k}_seconds"] for k in keys) for row in rows if row["mode"] == mode)


def table(rows: Rows) -> None:
    """One operating point of one model."""
    first = rows[0]
    reached = ", ".join(f"{r:.3f}" for r in first["reached_gbps"])
    print(f"\n### {first['model']}, {first['ranks']} ranks, {first['rate_gbps']:.4f} Gbit/s set, {reached} reached")
    print(f"\n{first['nodes']} nodes, {first['edges']} edges, alpha {first['alpha']:.2f}; ", end="")
    print(f"vanilla spends {first['share']:.1%} of its epoch in communication; load {first['load']:.1f}")
    if first["oversubscribed"]:
        print("\n**more ranks than cores: bytes and accuracy stand, times do not**")
    of = {mode: [row for row in rows if row["mode"] == mode] for mode in {row["mode"] for row in rows}}
    seconds = {mode: statistics.fmean(row["time/epoch_seconds"] for row in mine) for mode, mine in of.items()}
    bits = {
        mode: [f"{r['assign/mean_bits']:.2f}" for r in mine if "assign/mean_bits" in r] for mode, mine in of.items()
    }
    cells = {
        "mode": str,
        "epochs/s": lambda mode: f"{1 / seconds[mode]:.2f}",
        "over vanilla (95 %)": lambda mode: reports.interval(geometric_mean(ratios(rows, "vanilla", mode))),
        "bound: none / full overlap": lambda mode: " / ".join(f"{bound:.2f}" for bound in bounds(rows, mode)),
        "over bf16": lambda mode: f"{geometric_mean(ratios(rows, 'bf16_overlap', mode)).value:.2f}",
        "over fp32 overlapped": lambda mode: f"{geometric_mean(ratios(rows, 'adaqp_p', mode)).value:.2f}",
        **{name: lambda mode, keys=keys: f"{1e3 * mean(rows, mode, keys):.0f} ms" for name, keys in PARTS.items()},
        "comm total": lambda mode: f"{1e3 * mean(rows, mode, ['comm_total']):.0f} ms",
        "encode share": lambda mode: f"{mean(rows, mode, ['encode']) / seconds[mode]:.0%}",
        "halo MB": lambda mode: f"{halo_bytes(rows, mode) / 1e6:.2f}",
        "bits": lambda mode: next(iter(bits[mode]), ""),
        "test": lambda mode: f"{100 * of[mode][0]['test']:.1f}",
    }
    print(f"\n{reports.columns(cells, sorted(of, key=list(COLORS).index))}")


def curve(rows: Rows, files: Files) -> None:
    """Speed-up over vanilla against vanilla's share, a line a mode, with the bounds of 2 bits and of full overlap."""
    points: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for (model, _), group in reports.by(rows, lambda row: (row["model"], row["rate_gbps"])).items():
        for mode in (mode for mode in COLORS if any(row["mode"] == mode for row in group)):
            value = geometric_mean(ratios(group, "vanilla", mode)).value
            points[model][mode].append((group[0]["share"], value))
    plt = reports.pyplot()
    figure, axes = plt.subplots(1, len(points), figsize=(8.5, 3.8), sharey=True, layout="constrained", squeeze=False)
    shares = [x / 100 for x in range(90)]
    for axis, (model, modes) in zip(axes[0], points.items(), strict=True):
        for style, c in (("--", 32 / 2.125), ("-", float("inf"))):
            label = "bound without overlap, 2 bits" if c < 1e9 else "bound with full overlap"
            bound = [1 / (1 - f + f / c) if c < 1e9 else 1 / (1 - f) for f in shares]
            axis.plot([100 * f for f in shares], bound, style, color="0.75", lw=1, label=label)
        for color, (mode, line) in zip(COLORS.values(), modes.items(), strict=False):
            x, y = zip(*sorted(line), strict=True)
            axis.plot([100 * f for f in x], y, "o-", color=color, ms=3, lw=1.2, label=mode)
        axis.axvspan(69, 75, color="0.93", zorder=0)
        axis.set(title=model, xlabel="vanilla's share of communication, %", ylim=(0.5, 5.5))
    axes[0, 0].set_ylabel("times faster than vanilla")
    axes[0, 0].legend(frameon=False, fontsize=6.5, loc="upper left")
    reports.save(figure, files.figure)


def report(files: Files) -> None:
    rows = files.read()
    last = max(row["session"] for row in rows)
    rows = [row for row in rows if row["session"] == last]
    print(f"session {last}: {rows[0]['processor']}, {rows[0]['cores']} cores, torch {rows[0]['torch']}, paced links")
    operating = [row for row in rows if row["kind"] == "operating"]
    for group in reports.by(operating, lambda row: (row["model"], row["ranks"])).values():
        table(group)
    curve(rows, files)
