"""Tables of README.md from results.jsonl: `python experiments/dilation/report.py`.

Everything is a quotient of the same method over the same link in the same block: dilated by D over D = 1.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records
import reports

from gnnpar.report.statistics import geometric_mean, mean

BASE = "gcn vanilla"
EXPOSED = ("exposed_wire", "exposed_skew", "reduce")
Rows = Sequence[Mapping[str, Any]]
Key = tuple[float, int, str]  # Gbit/s, D, method
Cells = Mapping[Key, Mapping[int, Any]]  # -> block -> result


def load() -> Cells:
    cells: dict[Key, dict[int, Any]] = {}
    for row in records.read(HERE / "results.jsonl"):
        rate, dilation, name = row["job"].split(" ", 2)
        cells.setdefault((float(rate), int(dilation), name), {})[row["block"]] = row["result"]
    return cells


def seconds(result: Mapping[str, Any]) -> float:
    return float(result["epoch_seconds"]["mean"])


def share(result: Mapping[str, Any]) -> float:
    """Of an epoch that passes in communication: what no work hides."""
    return sum(result["breakdown_seconds"][part] for part in EXPOSED) / seconds(result)


def times(cells: Cells, key: Key) -> list[float]:
    """Epochs at D over those at D = 1, one a block."""
    rate, _, name = key
    return quotients(cells[key], cells[rate, 1, name], lambda ours, theirs: seconds(ours) / seconds(theirs))


def speedups(cells: Cells, key: Key) -> list[float]:
    """Times vanilla at D, over times vanilla at D = 1, one a block."""
    rate, dilation, _ = key
    vanilla = times(cells, (rate, dilation, BASE))
    return [base / ours for base, ours in zip(vanilla, times(cells, key), strict=True)]


def shares(cells: Cells, key: Key) -> list[float]:
    """Points of the epoch by which the share differs, one a block."""
    rate, _, name = key
    return quotients(cells[key], cells[rate, 1, name], lambda ours, theirs: 100 * (share(ours) - share(theirs)))


def quotients(ours: Mapping[int, Any], theirs: Mapping[int, Any], of: Callable[[Any, Any], float]) -> list[float]:
    return [of(ours[block], theirs[block]) for block in sorted(ours)]


def table(cells: Cells) -> str:
    """A line a method and a link: the epoch at D = 1, and what dilation changes."""
    dilated = sorted({dilation for _, dilation, _ in cells} - {1})
    heads = [f"{what}, D = {d}" for what in ("epoch", "times vanilla", "share, points") for d in dilated]
    lines = []
    for rate, name in sorted({(rate, name) for rate, _, name in cells}):
        results, keys = cells[rate, 1, name].values(), [(rate, d, name) for d in dilated]
        line = [f"{rate:g}", name, f"{1000 * geometric_mean([seconds(r) for r in results]).value:.1f}"]
        line.append(f"{100 * mean([share(r) for r in results]).value:.0f}%")
        line += [reports.interval(geometric_mean(times(cells, key))) for key in keys]
        gains = [geometric_mean(speedups(cells, key)) for key in keys]
        line += ["-" if name == BASE else reports.interval(gain) for gain in gains]
        line += [reports.interval(mean(shares(cells, key), fewest=3), "+.1f") for key in keys]
        lines.append(line)
    return reports.table(["Gbit/s", "method", "ms an epoch, D = 1", "share", *heads], lines)


def summary(cells: Cells) -> str:
    """How many of the cells keep what was asked, and the largest deviation."""
    lines = []
    for dilation in sorted({dilation for _, dilation, _ in cells} - {1}):
        keys = sorted(key for key in cells if key[1] == dilation)
        off = [geometric_mean(times(cells, key)).value - 1 for key in keys]
        ratios = [geometric_mean(speedups(cells, key)).value - 1 for key in keys if key[2] != BASE]
        points = [mean(shares(cells, key)).value for key in keys]
        line = [str(dilation)]
        for values, limit, unit in ((off, 0.10, "%"), (ratios, 0.05, "%"), (points, 5, "")):
            kept = sum(abs(value) <= limit for value in values)
            worst = max(values, key=abs)
            line += [f"{kept} of {len(values)}", f"{100 * worst:+.0f}%" if unit else f"{worst:+.1f}"]
        lines.append(line)
    heads = ("epochs within 10%", "ratios within 5%", "shares within 5 points")
    return reports.table(["D", *(each for head in heads for each in (head, "largest"))], lines)


if __name__ == "__main__":
    found = load()
    print(summary(found), table(found), sep="\n\n")
