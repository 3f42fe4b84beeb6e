"""Tables and figure of results.jsonl: `python experiments/gnnpipe_speed/report.py [FILE] [--figure FILE]`.

Ratios form inside a block (mean epoch of the base over that of the strategy); geometric means and 95 % intervals
over blocks, and over all cells, losses included.
"""

import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
import pictures
import records
import reports

from gnnpar.report.statistics import geometric_mean

BASE = "vanilla"
COLOURS = ("#444444", "#1b9e77", "#7570b3", "#d95f02", "#e7298a")
Rows = Sequence[dict[str, Any]]


def named(job: str) -> tuple[str, str, str]:
    """Links, model, strategy."""
    links, model, strategy = job.split("; ")
    return links, model, strategy


def results(rows: Rows, job: str) -> list[dict[str, Any]]:
    return [row["result"] for row in rows if row["job"] == job]


def mean_ms(found: Sequence[dict[str, Any]], *names: str) -> float:
    """Milliseconds of an epoch in some phases of the breakdown."""
    return 1e3 * statistics.fmean(sum(r["breakdown_seconds"][name] for name in names) for r in found)


def median_of(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The launch whose mean epoch is the median, the faster of two in the middle."""
    return sorted(found, key=lambda result: result["epoch_seconds"]["mean"])[(len(found) - 1) // 2]


def faster(rows: Rows, job: str) -> list[float]:
    """How many times faster than the base, one a block."""
    links, model, _ = named(job)
    return [1 / ratio for ratio in blocks.ratios(rows, job, f"{links}; {model}; {BASE}")]


def table(rows: Rows, links: str) -> Iterable[str]:
    """One line a cell; compute inflation is compute over the base's."""
    yield (
        "| links | model | strategy | ms an epoch | times faster than vanilla (95 %) | compute | inflation | exposed "
        "| bubble | reduce | MiB sent | test |"
    )
    yield "|" + "---|" * 12
    jobs = list(dict.fromkeys(row["job"] for row in sorted(rows, key=lambda row: row["job"])))
    for job in (job for job in jobs if named(job)[0] == links):
        _, model, strategy = named(job)
        mine = results(rows, job)
        compute = mean_ms(mine, "compute", "encode", "other")
        base = mean_ms(results(rows, f"{links}; {model}; {BASE}"), "compute", "encode", "other")
        cell = [
            f"{1e3 * geometric_mean([r['epoch_seconds']['mean'] for r in mine]).value:.0f}",
            speed(rows, job, mine),
            f"{compute:.0f}",
            f"{compute / base:.2f}",
            f"{mean_ms(mine, 'exposed_wire', 'exposed_skew'):.0f}",
            f"{mean_ms(mine, 'bubble'):.0f}",
            f"{mean_ms(mine, 'reduce'):.0f}",
            f"{mine[0]['bytes_per_epoch']['total'] / 2**20:.2f}",
            f"{100 * mine[0]['metric']['test']:.1f}",
        ]
        yield f"| {links} | {model} | {strategy} | " + " | ".join(cell) + " |"


def speed(rows: Rows, job: str, mine: Sequence[dict[str, Any]]) -> str:
    """Nothing where ranks share cores."""
    if any(r["oversubscribed"] for r in mine):
        return "ranks share cores"
    over = geometric_mean(faster(rows, job))
    return f"{over.value:.2f} ({over.low:.2f} to {over.high:.2f})" if over.low == over.low else f"{over.value:.2f}"


def summary(rows: Rows) -> Iterable[str]:
    """Geometric means over all models of a kind of link: the paper's 2.03 is such a mean."""
    yield "| links | strategy | cells | times faster than vanilla, geometric mean | worst | best |"
    yield "|---|---|---|---|---|---|"
    kinds = sorted({(named(row["job"])[0], named(row["job"])[2]) for row in rows})
    for links, strategy in kinds:
        jobs = sorted({row["job"] for row in rows if named(row["job"])[::2] == (links, strategy)})
        if strategy == BASE or any(r["oversubscribed"] for job in jobs for r in results(rows, job)):
            continue
        cells = [geometric_mean(faster(rows, job)).value for job in jobs]
        mean = geometric_mean(cells).value
        yield f"| {links} | {strategy} | {len(cells)} | {mean:.2f} | {min(cells):.2f} | {max(cells):.2f} |"


def draw(rows: Rows, file: Path) -> None:
    """Where an epoch goes over the shaped link, a bar a strategy: of the block whose epoch is the median, since one
    that was disturbed rules a mean."""
    plt = pictures.pyplot()
    jobs = sorted({row["job"] for row in rows if row["job"].startswith("paced")})
    models = list(dict.fromkeys(named(job)[1] for job in jobs))
    figure, axes = plt.subplots(1, len(models), figsize=(2.6 * len(models), 3.4), squeeze=False, layout="constrained")
    phases = {
        "compute": ("compute", "encode", "other"),
        "bubble": ("bubble",),
        "exposed": ("exposed_wire", "exposed_skew"),
        "reduce": ("reduce",),
    }
    for axis, model in zip(axes[0], models, strict=True):
        mine = [job for job in jobs if named(job)[1] == model]
        below = [0.0] * len(mine)
        for (phase, names), colour in zip(phases.items(), COLOURS, strict=False):
            values = [mean_ms([median_of(results(rows, job))], *names) for job in mine]
            axis.bar(range(len(mine)), values, bottom=below, color=colour, label=phase)
            below = [a + b for a, b in zip(below, values, strict=True)]
        axis.set_xticks(range(len(mine)), [named(job)[2] for job in mine], rotation=60, ha="right", fontsize=7)
        axis.set_title(f"{model}, {results(rows, mine[0])[0]['paced']['rates']['host_gbps']:.2f} Gbit/s")
    axes[0, 0].set_ylabel("ms an epoch, median block")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(phases), frameon=False)
    pictures.save(figure, file)


def main() -> None:
    options = reports.asked(HERE, file="results.jsonl")
    rows = records.read(options.file)
    shares = {}
    for job in sorted({row["job"] for row in rows if row["job"].endswith(f"; {BASE}")}):
        mine = results(rows, job)
        exposed, total = mean_ms(mine, "exposed_wire", "exposed_skew"), 1e3 * mine[0]["epoch_seconds"]["mean"]
        shares[job] = f"{exposed / total:.0%}"
    print(
        "vanilla's share of communication: "
        + ", ".join(f"{job.removesuffix(f'; {BASE}')} {s}" for job, s in shares.items())
    )
    print()
    print("\n".join(summary(rows)))
    for links in sorted({named(row["job"])[0] for row in rows}):
        print()
        print("\n".join(table(rows, links)))
    draw(rows, options.figure)


if __name__ == "__main__":
    main()
