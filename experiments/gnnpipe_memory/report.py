"""Table and figure of README.md from results.jsonl: `python experiments/gnnpipe_memory/report.py [--figure FILE]`."""

import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import pictures
import records
import reports

DEPTHS = (8, 16, 32)
COLOURS = {"single": "#444444", "none": "#d95f02", "layer": "#7570b3", "chunk": "#1b9e77"}
Rows = dict[tuple[str, str], dict[int, dict]]


def load() -> Rows:
    rows: Rows = {}
    for row in records.read(HERE / "results.jsonl"):
        rows.setdefault((row["model"], row["remat"] or row["strategy"]), {})[row["layers"]] = row
    return rows


def own(row: dict) -> float:
    """MiB at the peak, less parameters, optimizer and features."""
    memory = row["memory_bytes"]
    live = memory["live"]
    return (max(memory["peak"]) - live["parameters"] - live["optimizer"] - live["features"]) / 2**20


def mib(row: dict, category: str) -> float:
    return row["memory_bytes"]["live"][category] / 2**20


def named(variant: str) -> str:
    return variant if variant == "single" else f"gnnpipe, remat={variant}"


def table(rows: Rows) -> Iterable[str]:
    yield "| model | strategy | 8 layers | 16 | 32 | kept for the backward | tables | of remat=none | last loss |"
    yield "|" + "---|" * 9
    for (model, variant), by_depth in rows.items():
        peaks = [own(by_depth[depth]) for depth in DEPTHS]
        deep = by_depth[DEPTHS[-1]]
        share = f"{peaks[-1] / own(rows[model, 'none'][DEPTHS[-1]]):.2f}"
        cells = " | ".join(f"{peak:.1f}" for peak in peaks)
        kept = f"{mib(deep, 'activations'):.1f} | {mib(deep, 'history'):.1f}"
        yield f"| {model} | {named(variant)} | {cells} | {kept} | {share} | {deep['loss']['last']!r} |"


def draw(rows: Rows, file: Path) -> None:
    plt = pictures.pyplot()
    models = list(dict.fromkeys(model for model, _ in rows))
    figure, axes = plt.subplots(1, len(models), figsize=(8.5, 3), layout="constrained")
    for axis, model in zip(axes, models, strict=True):
        for variant, colour in COLOURS.items():
            values = [own(rows[model, variant][depth]) for depth in DEPTHS]
            axis.plot(DEPTHS, values, "o-", color=colour, ms=4, label=named(variant))
        axis.set(title=model, xlabel="layers on the rank", ylim=(0, None))
        axis.set_xticks(DEPTHS, list(map(str, DEPTHS)))
    axes[0].set_ylabel("MiB at the peak")
    axes[0].legend(frameon=False, fontsize=7)
    pictures.save(figure, file)


def main() -> None:
    rows = load()
    print("\n".join(table(rows)))
    draw(rows, reports.asked(HERE).figure)


if __name__ == "__main__":
    main()
