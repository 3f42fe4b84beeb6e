"""Table and figure of README.md from results.jsonl: `python experiments/sar_memory/report.py [--figure FILE]`."""

import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import pictures
import records
import reports

RANKS = (1, 2, 4, 8)
TICKS = (12, 25, 50, 100)  # MiB
COLOURS = {
    "graph_parallel": "#d55e00",
    "sar, prefetch 0": "#0072b2",
    "sar, prefetch 1": "#56b4e9",
    "sar, prefetch 0, pull": "#009e73",
}
Rows = dict[tuple[str, str, str], dict[int, dict]]


def load() -> Rows:
    rows: Rows = {}
    for row in records.read(HERE / "results.jsonl"):
        rows.setdefault((row["model"], row["cut"], row["variant"]), {})[row["ranks"]] = row
    return rows


def own(row: dict) -> float:
    """MiB at the peak of the fullest rank, less parameters, optimizer and features."""
    memory = row["memory_bytes"]
    live = memory["live"]
    return (max(memory["peak"]) - live["parameters"] - live["optimizer"] - live["features"]) / 2**20


def table(rows: Rows) -> Iterable[str]:
    yield "| model | cut | variant | N = 1 | 2 | 4 | 8 | falls | of graph_parallel, N = 8 | sent an epoch, N = 8 |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for (model, cut, variant), by_ranks in rows.items():
        values = [own(by_ranks[n]) for n in RANKS]
        share = values[-1] / own(rows[model, cut, "graph_parallel"][8])
        sent = by_ranks[8]["bytes_per_epoch"]["total"] / 2**20
        cells = " | ".join(f"{v:.1f}" for v in values)
        falls = f"{values[0] / values[-1]:.1f}x"
        yield f"| {model} | {cut} | {variant} | {cells} | {falls} | {share:.2f} | {sent:.0f} MiB |"


def draw(rows: Rows, file: Path) -> None:
    plt = pictures.pyplot()
    panels = [(model, cut) for model in ("gat", "sage") for cut in ("metis", "random")]
    figure, axes = plt.subplots(2, 2, figsize=(7.5, 6), sharex=True, layout="constrained")
    for axis, (model, cut) in zip(axes.flat, panels, strict=True):
        whole = own(rows[model, cut, "graph_parallel"][1])
        for k, style in ((1, "-"), (2, "--"), (3, ":")):
            axis.plot([k, 8], [whole, k / 8 * whole], style, color="0.7", lw=1, label=f"{k}/N of N = 1")
        for variant, colour in COLOURS.items():
            if (model, cut, variant) in rows:
                values = [own(rows[model, cut, variant][n]) for n in RANKS]
                axis.plot(RANKS, values, "o-", color=colour, ms=4, label=variant)
        axis.set(xscale="log", yscale="log", title=f"{model}, {cut} cut")
        axis.set_xticks(RANKS, list(map(str, RANKS)))
        axis.set_yticks(TICKS, list(map(str, TICKS)))
        axis.minorticks_off()
    for axis in axes[1]:
        axis.set_xlabel("ranks N")
    for axis in axes[:, 0]:
        axis.set_ylabel("MiB of a rank at its peak")
    axes[0, 0].legend(frameon=False, fontsize=7)
    pictures.save(figure, file)


def main() -> None:
    rows = load()
    print("\n".join(table(rows)))
    draw(rows, reports.asked(HERE).figure)


if __name__ == "__main__":
    main()
