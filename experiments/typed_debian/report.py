"""Tables of README.md: `python experiments/typed_debian/report.py`.

Differences are paired by seed with exact training; "late gain": the points by which the last fifth of the epochs raises
the best validation.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any  # of JSON

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records
from jobs import CUTS, EXACT

from gnnpar.report.statistics import FEWEST_SEEDS, mean, non_inferiority

MIB = 2**20
MARGIN = 1.0  # points
LAST = 0.8  # of a run: what validation gains after it
Row = Mapping[str, Any]
Runs = dict[int, Row]  # by seed


def main() -> None:
    show("losses: fp64, dropout on", losses_table(records.read(HERE / "losses.jsonl")))
    cuts = studies_of(records.read(HERE / "accuracy.jsonl"))
    exact = cuts["metis"][EXACT]
    for cut, variants in cuts.items():
        show(f"strategies, {cut} cut", accuracy_table(variants, exact))


def show(title: str, lines: Iterable[str]) -> None:
    print("\n".join(["", f"### {title}", "", *lines]))


def losses_table(rows: Iterable[Row]) -> Iterator[str]:
    """Every epoch's loss beside that of the single device."""
    rows = list(rows)
    single = next(row["losses"] for row in rows if row["strategy"] == "single")
    yield "| strategy | ranks | last loss | largest relative difference | MiB an epoch |"
    yield "|" + "---|" * 5
    for row in rows:
        if "refused" in row:
            yield f"| {row['strategy']} | {row['ranks']} | refused: {row['refused']} |  |  |"
            continue
        error = max(abs(a - b) / b for a, b in zip(row["losses"], single, strict=True))
        yield f"| {row['strategy']} | {row['ranks']} | {row['losses'][-1]:.15f} | {error:.0e} | {sent(row):.2f} |"


def sent(row: Row) -> float:
    """MiB an epoch, all ranks, without the sum of parameters' gradients."""
    found = row["result"]["bytes_per_epoch"]
    return (found["total"] - found["reduce"]) / MIB


def studies_of(rows: Iterable[Row]) -> dict[str, dict[str, Runs]]:
    found: dict[tuple[str, str], Runs] = defaultdict(dict)
    for row in rows:
        if "refused" not in row:
            found[row["cut"], row["variant"]][row["seed"]] = row
    return {
        cut: {name: found[cut, name] for name in names if (cut, name) in found}
        for cut, names in CUTS.items()
        if any((cut, name) in found for name in names)
    }


def points(run: Row) -> float:
    """Test accuracy at the best validation, in percent."""
    return 100 * run["result"]["metric"]["test_at_best_val"]


def late_gain(run: Row) -> float:
    end = LAST * run["result"]["epochs"]
    before = max(value for epoch, value in run["validation"] if epoch < end)
    return 100 * (max(value for _, value in run["validation"]) - before)


def average(runs: Runs, *path: str) -> float:
    """Of a number of result.json."""
    values = []
    for run in runs.values():
        value: Any = run["result"]
        for key in path:
            value = value[key]
        values.append(value)
    return statistics.fmean(values)


def accuracy_table(variants: Mapping[str, Runs], exact: Runs) -> Iterator[str]:
    base = statistics.fmean(sent(run) for run in exact.values())
    yield (
        "| variant | test | over exact, points | verdict | gradient error | cosine | MiB an epoch "
        "| of METIS exact | last loss | late gain | seeds |"
    )
    yield "|" + "---|" * 11
    for name, runs in variants.items():
        differences = [points(runs[seed]) - points(exact[seed]) for seed in sorted(runs.keys() & exact.keys())]
        error = average(runs, "fidelity", "relative_error", "mean")
        cosine = average(runs, "fidelity", "cosine", "mean")
        rows = statistics.fmean(sent(run) for run in runs.values())
        gain = statistics.fmean(late_gain(run) for run in runs.values())
        tests = statistics.fmean(points(run) for run in runs.values())
        yield (
            f"| {name} | {tests:.1f} | {gap_of(differences)} | {verdict(name, differences, gain)} | {error:.3f} "
            f"| {cosine:.3f} | {rows:.2f} | {rows / base:.3f} | {average(runs, 'loss', 'last'):.3f} | {gain:+.1f} "
            f"| {len(runs)} |"
        )


def gap_of(differences: list[float]) -> str:
    """With the interval where there are seeds enough for one, else with the smallest and the largest."""
    if len(differences) >= FEWEST_SEEDS:
        gap = mean(differences)
        return f"{gap.value:+.2f} ({gap.low:+.2f} to {gap.high:+.2f})"
    return f"{statistics.fmean(differences):+.2f} ({', '.join(f'{each:+.2f}' for each in differences)})"


def verdict(name: str, differences: list[float], gain: float) -> str:
    if name == EXACT:
        return ""
    return "not converged" if gain > MARGIN else non_inferiority(differences, MARGIN)


if __name__ == "__main__":
    main()
