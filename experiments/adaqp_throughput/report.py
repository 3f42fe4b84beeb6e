"""Tables and figure.svg from results.jsonl: `python experiments/adaqp_throughput/report.py [FILE]`.

Ratios form inside a block (mean epoch of vanilla over mean epoch of the mode, re-assignment included); geometric mean
and bootstrap interval over blocks.
"""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnnpar.results.statistics import geometric_mean

HERE = Path(__file__).parent
PARTS = {
    "compute": ("compute", "other", "bubble"),
    "encode": ("encode",),
    "exposed": ("exposed_wire", "exposed_skew"),
    "reduce": ("reduce",),
}
ORDER = (
    "vanilla", "bf16_overlap", "adaqp_p", "adaqp_q", "uniform_8", "uniform_4", "uniform_2", "adaptive",
    "adaptive_paper",
)  # fmt: skip
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
        "mode", "epochs/s", "over vanilla (95 %)", "bound: none / full overlap", "over bf16", "over fp32 overlapped",
        *PARTS, "comm total", "encode share", "halo MB", "bits", "test",
    ]  # fmt: skip
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
            mode, f"{1 / seconds:.2f}", f"{over.value:.2f} ({over.low:.2f} to {over.high:.2f})",
            f"{none:.2f} / {full:.2f}", *others, *(f"{1e3 * p:.0f} ms" for p in parts),
            f"{1e3 * mean(rows, mode, ['comm_total']):.0f} ms", f"{mean(rows, mode, ['encode']) / seconds:.0%}",
            f"{halo_bytes(rows, mode) / 1e6:.2f}", bits, f"{100 * mine[0]['test']:.1f}",
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |")


def curve(rows: Rows, out: Path) -> None:
    """Speed-up over vanilla against vanilla's share, a line a mode, with the bounds of 2 bits and of full overlap."""
    points: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for (model, _), group in by(rows, "model", "rate_gbps").items():
        for mode in sorted({row["mode"] for row in group}, key=ORDER.index):
            value = geometric_mean(ratios(group, "vanilla", mode)).value
            points[model][mode].append((group[0]["share"], value))
    width, height = 420, 340
    parts = []
    for i, (model, modes) in enumerate(points.items()):
        top = max(4.2, *(v for line in modes.values() for _, v in line)) * 1.05

        def at(f: float, v: float, i: int = i, top: float = top) -> str:
            return f"{i * width + 45 + 350 * f:.1f},{height - 40 - (height - 70) * v / top:.1f}"

        steps = [x / 100 for x in range(0, 100, 2)]
        for c, dash in ((32 / 2.125, "2 3"), (1e9, "6 3")):
            bound = [(f, 1 / (1 - f + f / c)) for f in steps]
            parts.append(polyline([at(f, min(v, top)) for f, v in bound], "#aaaaaa", dash))
        for color, (mode, line) in zip(COLORS, modes.items(), strict=False):
            parts.append(polyline([at(f, v) for f, v in sorted(line)], color, ""))
            x, y = at(*max(line)).split(",")
            parts.append(f'<text x="{x}" y="{y}" font-size="9" fill="{color}">{mode}</text>')
        for v in range(int(top) + 1):
            x, y = at(0, v).split(",")
            parts.append(f'<text x="{float(x) - 16}" y="{y}" font-size="10">{v}</text>')
        for f in (0.0, 0.25, 0.5, 0.72, 0.95):
            x, y = at(f, 0).split(",")
            parts.append(f'<text x="{x}" y="{float(y) + 14}" font-size="10">{f:.2f}</text>')
        title = f"{model}: speed-up over vanilla against its communication share; grey: no overlap at 2 bits, no bytes"
        parts.append(f'<text x="{i * width + 20}" y="16" font-size="10">{title}</text>')
    size = f'width="{len(points) * width}" height="{height}"'
    out.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">{"".join(parts)}</svg>\n')
    print(f"\n{out.name} written")


def polyline(points: list[str], color: str, dash: str) -> str:
    style = f'stroke-dasharray="{dash}" ' if dash else ""
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" {style}/>'


def by(rows: Rows, *keys: str) -> dict[tuple, Rows]:
    groups: dict[tuple, Rows] = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(row)
    return dict(groups)


def main(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    last = max(row["session"] for row in rows)
    rows = [row for row in rows if row["session"] == last]
    print(f"session {last}: {rows[0]['processor']}, {rows[0]['cores']} cores, torch {rows[0]['torch']}, paced links")
    for group in by([row for row in rows if row["kind"] == "operating"], "model", "ranks").values():
        table(group)
    curve(rows, path.with_name("figure.svg" if path.stem == "results" else f"{path.stem}.svg"))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results.jsonl")
