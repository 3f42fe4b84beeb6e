"""Tables and figure of README.md from results.jsonl: `python experiments/bandwidth/report.py [--figure FILE]`."""

import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
import pictures
import records
import reports

from gnnpar.report.statistics import Estimate, geometric_mean

STYLES = {
    "vanilla": ("#7a8794", "s--"),
    "graph_parallel": ("#2b7bba", "o-"),
    "graph_parallel bf16": ("#2b7bba", "^:"),
    "sar": ("#1a9e77", "D-"),
    "adaqp": ("#e09f1f", "v-"),
}
Cells = Mapping[tuple[str, float], Estimate]  # (strategy, Gbit/s) -> over blocks


def load() -> tuple[Cells, Cells]:
    """Seconds an epoch, and how many times as fast as vanilla in the same block."""
    rows = records.read(HERE / "results.jsonl")
    seconds: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        rate, _, name = row["job"].partition(" ")
        seconds.setdefault((name, float(rate)), []).append(row["result"]["epoch_seconds"]["mean"])
    faster = {
        (name, rate): [1 / x for x in blocks.ratios(rows, f"{rate:g} {name}", f"{rate:g} vanilla")]
        for name, rate in seconds
        if name != "vanilla"
    }
    means = [{key: geometric_mean(values) for key, values in found.items()} for found in (seconds, faster)]
    return means[0], means[1]


def table(title: str, cells: Cells, digits: int) -> str:
    rates = sorted({rate for _, rate in cells})
    lines = [f"| {title} | " + " | ".join(f"{rate:g} Gbit/s" for rate in rates) + " |", "|---" * (len(rates) + 1) + "|"]
    for name in (name for name in STYLES if (name, rates[0]) in cells):
        shown = (
            f"{e.value:.{digits}f} ({e.low:.{digits}f} to {e.high:.{digits}f})" for e in (cells[name, r] for r in rates)
        )
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def draw(seconds: Cells, file: Path) -> None:
    plt = pictures.pyplot(10)
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    rates = sorted({rate for _, rate in seconds})
    for name, (colour, style) in STYLES.items():
        points = [seconds[name, rate] for rate in rates]
        spread = [[p.value - p.low for p in points], [p.high - p.value for p in points]]
        axis.errorbar(rates, [p.value for p in points], spread, fmt=style, color=colour, label=name, capsize=3)
    axis.set(xscale="log", yscale="log", xlabel="rate of a host's link, Gbit/s", ylabel="seconds an epoch")
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axis.legend(frameon=False)
    pictures.save(figure, file)


def main() -> None:
    seconds, faster = load()
    print(table("seconds an epoch", seconds, 3), table("times vanilla, inside blocks", faster, 2), sep="\n\n")
    draw(seconds, reports.asked(HERE).figure)


if __name__ == "__main__":
    main()
