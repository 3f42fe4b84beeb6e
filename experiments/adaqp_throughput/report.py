"""Tables and figure.svg from results.jsonl: `python experiments/adaqp_throughput/report.py [FILE] [--figure FILE]`.

Ratios form inside a block (mean epoch of vanilla over mean epoch of the mode, re-assignment included); geometric mean
and 95 % interval over blocks.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnnpar.report.statistics import geometric_mean

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import pictures
import records
import reports

PARTS = {
    "compute": ("compute", "other", "bubble"),
    "encode": ("encode",),
    "exposed": ("exposed_wire", "exposed_skew"),
    "reduce": ("reduce",),
}
ORDER = (
    "vanilla",
    "bf16_overlap",
    "adaqp_p",
    "adaqp_q",
    "uniform_8",
    "uniform_4",
    "uniform_2",
    "adaptive",
    "adaptive_paper",
)
COLORS = ("#444444", "#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d", "#1f78b4")
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
    columns = [
        "mode",
        "epochs/s",
        "over vanilla (95 %)",
        "bound: none / full overlap",
        "over bf16",
        "over fp32 overlapped",
        *PARTS,
        "comm total",
        "encode share",
        "halo MB",
        "bits",
        "test",
    ]
    print("\n| " + " | ".join(columns) + " |")
    print("|" + "---|" * 15)
    for mode in sorted({row["mode"] for row in rows}, key=ORDER.index):
        mine = [row for row in rows if row["mode"] == mode]
        over = geometric_mean(ratios(rows, "vanilla", mode))
        none, full = bounds(rows, mode)
        seconds = statistics.fmean(row["time/epoch_seconds"] for row in mine)
        others = [f"{geometric_mean(ratios(rows, base, mode)).value:.2f}" for base in ("bf16_overlap", "adaqp_p")]
        parts = [mean(rows, mode, keys) for keys in PARTS.values()]
        bits = next((f"{row['assign/mean_bits']:.2f}" for row in mine if "assign/mean_bits" in row), "")
        cells = [
            mode,
            f"{1 / seconds:.2f}",
            f"{over.value:.2f} ({over.low:.2f} to {over.high:.2f})",
            f"{none:.2f} / {full:.2f}",
            *others,
            *(f"{1e3 * p:.0f} ms" for p in parts),
            f"{1e3 * mean(rows, mode, ['comm_total']):.0f} ms",
            f"{mean(rows, mode, ['encode']) / seconds:.0%}",
            f"{halo_bytes(rows, mode) / 1e6:.2f}",
            bits,
            f"{100 * mine[0]['test']:.1f}",
        ]
        print("| " + " | ".join(cells) + " |")


def curve(rows: Rows, out: Path) -> None:
    """Speed-up over vanilla against vanilla's share, a line a mode, with the bounds of 2 bits and of full overlap."""
    points: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for (model, _), group in by(rows, "model", "rate_gbps").items():
        for mode in sorted({row["mode"] for row in group}, key=ORDER.index):
            value = geometric_mean(ratios(group, "vanilla", mode)).value
            points[model][mode].append((group[0]["share"], value))
    plt = pictures.pyplot()
    figure, axes = plt.subplots(1, len(points), figsize=(8.5, 3.8), sharey=True, layout="constrained", squeeze=False)
    shares = [x / 100 for x in range(90)]
    for axis, (model, modes) in zip(axes[0], points.items(), strict=True):
        for style, c in (("--", 32 / 2.125), ("-", float("inf"))):
            label = "bound without overlap, 2 bits" if c < 1e9 else "bound with full overlap"
            bound = [1 / (1 - f + f / c) if c < 1e9 else 1 / (1 - f) for f in shares]
            axis.plot([100 * f for f in shares], bound, style, color="0.75", lw=1, label=label)
        for color, (mode, line) in zip(COLORS, modes.items(), strict=False):
            x, y = zip(*sorted(line), strict=True)
            axis.plot([100 * f for f in x], y, "o-", color=color, ms=3, lw=1.2, label=mode)
        axis.axvspan(69, 75, color="0.93", zorder=0)
        axis.set(title=model, xlabel="vanilla's share of communication, %", ylim=(0.5, 5.5))
    axes[0, 0].set_ylabel("times faster than vanilla")
    axes[0, 0].legend(frameon=False, fontsize=6.5, loc="upper left")
    pictures.save(figure, out)


def by(rows: Rows, *keys: str) -> dict[tuple, Rows]:
    groups: dict[tuple, Rows] = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(row)
    return dict(groups)


def main() -> None:
    options = reports.asked(HERE, file="results.jsonl")
    rows = records.read(options.file)
    last = max(row["session"] for row in rows)
    rows = [row for row in rows if row["session"] == last]
    print(f"session {last}: {rows[0]['processor']}, {rows[0]['cores']} cores, torch {rows[0]['torch']}, paced links")
    for group in by([row for row in rows if row["kind"] == "operating"], "model", "ranks").values():
        table(group)
    curve(rows, options.figure)


if __name__ == "__main__":
    main()
