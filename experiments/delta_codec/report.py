"""Tables of README.md from results.jsonl: `python experiments/delta_codec/report.py`."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import records
from run import CODECS, DROPOUT

from gnnpar.report.formatting import interval
from gnnpar.report.statistics import geometric_mean, mean

HEADINGS = ("codec", "sent, of exact", "gradient error", "over uniform 2", "over uniform 4", "test, points over exact")
Results = Mapping[str, Mapping[int, Any]]  # job -> seed -> result
BASES = ("uniform 2", "uniform 4")


def load() -> Results:
    found: dict[str, dict[int, Any]] = {}
    for row in records.read(HERE / "results.jsonl"):
        found.setdefault(row["job"], {})[row["result"]["seed"]] = row["result"]
    return found


def sent(result: Mapping[str, Any]) -> float:
    """Bytes of rows, without gradients of weights, which no codec touches."""
    return float(result["bytes_per_epoch"]["total"] - result["bytes_per_epoch"]["reduce"])


def error(result: Mapping[str, Any]) -> float:
    return float(result["fidelity"]["relative_error"]["mean"])


def points(result: Mapping[str, Any]) -> float:
    return 100 * float(result["metric"]["test_at_best_val"])


def by_seed(found: Results, job: str, base: str, of: Callable[[Any], float]) -> list[tuple[float, float]]:
    return [(of(found[job][seed]), of(found[base][seed])) for seed in sorted(found[job])]


def table(found: Results, dropout: float) -> list[str]:
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for name in CODECS:
        job, exact = f"{name}, dropout {dropout:g}", f"exact, dropout {dropout:g}"
        shares = [mine / whole for mine, whole in by_seed(found, job, exact, sent)]
        errors = mean([error(result) for result in found[job].values()]).value
        cells = [name, f"{mean(shares).value:.3f}", f"{errors:.4f}"]
        for base in BASES:
            pairs = by_seed(found, job, f"{base}, dropout {dropout:g}", error)
            ratio = None if name == "exact" else geometric_mean([mine / theirs for mine, theirs in pairs])
            cells.append("-" if ratio is None else f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
        over = mean([mine - whole for mine, whole in by_seed(found, job, exact, points)])
        cells.append("-" if name == "exact" else interval(over, signed=True))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    found = load()
    first = next(iter(found["exact, dropout 0"].values()))
    print(f"{first['hardware']}, torch {first['versions']['torch']}")
    for dropout in DROPOUT:
        print("", f"### dropout {dropout:g}", "", *table(found, dropout), sep="\n")


if __name__ == "__main__":
    main()
