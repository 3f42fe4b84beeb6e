"""Tables of README.md: `python experiments/typed_debian/report.py`.

Differences are paired by seed with exact training; "late gain": the points by which the last fifth of the epochs raises
the best validation.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records
import reports
from jobs import CUTS, EXACT
from paired import Row, Runs, average, differences, gap, late_gain, test, verdict

MIB = 2**20
MARGIN = 1.0  # points


def main() -> None:
    reports.show("losses: fp64, dropout on", losses_table(records.read(HERE / "losses.jsonl")))
    cuts = studies_of(records.read(HERE / "accuracy.jsonl"))
    exact = cuts["metis"][EXACT]
    for cut, variants in cuts.items():
        reports.show(f"strategies, {cut} cut", accuracy_table(variants, exact))


def losses_table(rows: Sequence[Row]) -> str:
    """Every epoch's loss beside that of the single device."""
    single = next(row["losses"] for row in rows if row["strategy"] == "single")
    lines = []
    for row in rows:
        cells = [f"refused: {row.get('refused')}", "", ""]
        if "refused" not in row:
            error = max(abs(a - b) / b for a, b in zip(row["losses"], single, strict=True))
            cells = [f"{row['losses'][-1]:.15f}", f"{error:.0e}", f"{sent(row):.2f}"]
        lines.append([row["strategy"], row["ranks"], *cells])
    heads = ("strategy", "ranks", "last loss", "largest relative difference", "MiB an epoch")
    return reports.table(heads, lines)


def sent(row: Row) -> float:
    """MiB an epoch, all ranks, without the sum of parameters' gradients."""
    found = row["result"]["bytes_per_epoch"]
    return (found["total"] - found["reduce"]) / MIB


def studies_of(rows: Iterable[Row]) -> dict[str, Mapping[str, Runs]]:
    found: dict[tuple[str, str], dict[int, Row]] = defaultdict(dict)
    for row in rows:
        if "refused" not in row:
            found[row["cut"], row["variant"]][row["seed"]] = row
    return {
        cut: {name: found[cut, name] for name in names if (cut, name) in found}
        for cut, names in CUTS.items()
        if any((cut, name) in found for name in names)
    }


def accuracy_table(variants: Mapping[str, Runs], exact: Runs) -> str:
    rows = {name: statistics.fmean(map(sent, runs.values())) for name, runs in variants.items()}
    base = statistics.fmean(map(sent, exact.values()))
    gains = {name: late_gain(runs) for name, runs in variants.items()}
    gaps = {name: differences(runs, exact) for name, runs in variants.items()}
    of = {
        "variant": str,
        "test": lambda name: f"{test(variants[name]):.1f}",
        "over exact, points": lambda name: gap(gaps[name]),
        "verdict": lambda name: verdict(gaps[name], gains[name], MARGIN) if name != EXACT else "",
        "gradient error": lambda name: f"{average(variants[name], 'fidelity', 'relative_error', 'mean'):.3f}",
        "cosine": lambda name: f"{average(variants[name], 'fidelity', 'cosine', 'mean'):.3f}",
        "MiB an epoch": lambda name: f"{rows[name]:.2f}",
        "of METIS exact": lambda name: f"{rows[name] / base:.3f}",
        "last loss": lambda name: f"{average(variants[name], 'loss', 'last'):.3f}",
        "late gain": lambda name: f"{gains[name]:+.1f}",
        "seeds": lambda name: len(variants[name]),
    }
    return reports.columns(of, variants)


if __name__ == "__main__":
    main()
