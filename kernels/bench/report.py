"""Output of a run: a table while it runs, a CSV file with one row per measurement, and a summary of targets."""

import csv
import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.baselines import ANEMOI, PYG, PYG_DOT, PYG_V2, csr_name
from bench.graphs import Size
from bench.measuring import Measurement, percentiles
from bench.registry import OURS, SAVED, Case

Row = dict[str, Any]  # of the CSV file: text, numbers, and "" for unknown numbers
CONTEXT = ("date", "commit", "hardware", "python", "torch", "triton", "cuda", "threads", "graph", "nodes", "edges")
MEASURED: tuple[str, ...] = (
    "case", "shape", "dtype", "contender", "wall_p20_ms", "wall_p50_ms", "wall_p80_ms", "cpu_p50_ms", "gb_per_s",
    "floor_percent", "payload_gb_per_s", "peak_mib", "wall_ratio", "cpu_ratio", "memory_ratio", "note",
)  # fmt: skip
TABLE = {
    "graph": 8, "case": 25, "shape": 7, "dtype": 8, "contender": 29, "wall_p50_ms": 11, "cpu_p50_ms": 10,
    "gb_per_s": 8, "floor_percent": 13, "peak_mib": 9, "wall_ratio": 10, "cpu_ratio": 9, "memory_ratio": 12, "note": 0,
}  # fmt: skip


def hardware(device: str) -> str:
    """Return the name of the measured processor."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
    return f"{os.cpu_count()}-core {model}"


def commit() -> str:
    """Return the short hash of the commit, with + if the kernels differ from it; GNNPAR_COMMIT in a copy without
    history."""
    if told := os.environ.get("GNNPAR_COMMIT"):
        return told
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True).stdout
        dirty = subprocess.run(["git", "status", "--porcelain", ".."], cwd=here, capture_output=True, text=True).stdout
    except OSError:
        return "unknown"
    return head.strip() + ("+" if dirty else "") if head else "unknown"


def context(device: str) -> Row:
    """Return the fields that are equal in all rows of a run."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "hardware": hardware(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda or "",
    }


def _round(value: float, digits: int) -> float | str:
    return "" if math.isnan(value) else round(value, digits)


def rows_of(case: Case, size: Size, measured: list[Measurement], *, copy_rate: float, context: Row) -> list[Row]:
    """Return the rows of one case. Ratios divide a contender's time and memory by the op's, listed first.

    GB/s are the case's floor bytes over time, for every contender; floor_percent is their share of `copy_rate`.
    """
    ours = measured[0]
    (_, p50_ours, _), cpu_ours = percentiles(ours.wall), percentiles(ours.cpu)[1]
    moved, payload = case.floor(size) or math.nan, case.payload_bytes * size.nodes or math.nan
    rows = []
    for one in measured:
        (p20, p50, p80), cpu50 = percentiles(one.wall), percentiles(one.cpu)[1]
        rate = moved / p50 / 1e6
        rows.append(
            {
                **context,
                "case": case.name,
                "shape": case.shape,
                "dtype": str(case.dtype)[6:],
                "contender": one.contender,
                "wall_p20_ms": _round(p20, 4),
                "wall_p50_ms": _round(p50, 4),
                "wall_p80_ms": _round(p80, 4),
                "cpu_p50_ms": _round(cpu50, 4),
                "gb_per_s": _round(rate, 2),
                "floor_percent": _round(100 * rate / copy_rate, 1),
                "payload_gb_per_s": _round(payload / p50 / 1e6, 3),
                "peak_mib": _round(one.peak_mib, 1),
                "wall_ratio": _round(p50 / p50_ours, 3),
                "cpu_ratio": _round(cpu50 / max(cpu_ours, 1e-6), 3),
                "memory_ratio": _round(max(one.peak_mib, 1.0) / max(ours.peak_mib, 1.0), 2),
                "note": one.note,
            }
        )
    return rows


def print_row(row: Row | None = None) -> None:
    """Print a line of the table; without a row, its header."""
    values = {name: name for name in TABLE} if row is None else row
    cells = [
        f"{values[name]:<{width}}" if isinstance(values[name], str) else f"{values[name]:>{width}}"
        for name, width in TABLE.items()
    ]
    print("  ".join(cells).rstrip(), flush=True)


def misfit(path: Path) -> str:
    """Return why rows cannot be appended to this file, else an empty string."""
    if path.exists() and path.read_text().splitlines()[:1] != [",".join((*CONTEXT, *MEASURED))]:
        return f"{path} has other columns: move it away, or name another file with --csv"
    return ""


def append(path: Path, rows: list[Row]) -> None:
    """Append rows to the CSV file, with a header if it is new. An interrupted run keeps its measurements."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, (*CONTEXT, *MEASURED))
        if new:
            writer.writeheader()
        writer.writerows(rows)


def _per_race(rows: list[Row], case: str, column: str, contenders: tuple[str, ...]) -> list[float]:
    """Return the least value of these contenders in each race of a case."""
    least: dict[tuple, float] = {}
    for row in rows:
        if row["case"] == case and row["contender"] in contenders and row[column] != "":
            race = tuple(row[name] for name in ("graph", "threads", "shape", "dtype"))
            least[race] = min(row[column], least.get(race, math.inf))
    return list(least.values())


def _targets(kind: str, csr: str) -> Iterator[tuple[str, str, str, tuple[str, ...], str, str]]:
    """Yield targets of a "cuda" or "cpu" run: label, case, column, contenders (the least value counts), unit, goal."""
    gpu = kind == "cuda"
    ratio, sums = ("wall_ratio", "1.20x, never below 0.95x") if gpu else ("cpu_ratio", "1.00x")
    for case in ("spmm", "spmm transposed"):
        yield f"{case} against {csr}", case, ratio, (csr, f"{csr}, cached"), "x", sums
    for case in ("attend forward", "attend backward") if gpu else ():
        yield f"{case} of its floor", case, "floor_percent", (OURS,), " %", "60 %"
        yield f"{case}, saved branch of its floor", case, "floor_percent", (SAVED,), " %", "60 %"
    rivals = [
        ("gat", f"PyG{'' if gpu else ', CPU seconds'}", PYG, ratio, "5x" if gpu else "6x"),
        ("gat", "PyG, memory", PYG, "memory_ratio", "5x" if gpu else "10x"),
        ("gatv2", "PyG", PYG_V2, ratio, "3x"),
        ("gatv2", "PyG, memory", PYG_V2, "memory_ratio", "3x"),
        ("transformer", "PyG", PYG_DOT, ratio, "3x"),
        ("transformer", "PyG, memory", PYG_DOT, "memory_ratio", "3x"),
        ("gat", f"{PYG}, compiled", f"{PYG}, compiled", ratio, "1.5x"),
        ("transformer", f"{PYG_DOT}, compiled", f"{PYG_DOT}, compiled", ratio, "1.5x"),
        ("transformer", ANEMOI, ANEMOI, ratio, "1x"),
    ]
    for layer, label, rival, column, goal in rivals:
        yield f"{layer} layer against {label}", f"{layer} layer fwd+bwd", column, (rival,), "x", goal
    for case in ("quantize", "dequantize") if gpu else ():
        yield f"{case} of copy bandwidth", case, "floor_percent", (OURS,), " %", "70 %"


def summary(rows: list[Row], *, kind: str, device: str) -> list[str]:
    """Return lines with the geometric means and targets of a "cuda" or "cpu" run."""
    found = [
        (label, _per_race(rows, case, column, contenders), unit, goal)
        for label, case, column, contenders, unit, goal in _targets(kind, csr_name(torch.device(device)))
    ]
    if kind == "cpu":
        speeds = [
            row["payload_gb_per_s"] * row["wall_p50_ms"] / row["cpu_p50_ms"]
            for row in rows
            if row["case"] == "quantize and back" and row["shape"].endswith(" 8b") and row["contender"] == OURS
        ]
        found.append(("quantize and back, fp32 input per core", speeds, " GB/s", "1 GB/s"))
    return [
        f"{label:<44} {statistics.geometric_mean([max(value, 1e-9) for value in values]):8.2f}{unit}"
        f"  lowest {min(values):8.2f}{unit}  of {len(values):>2}   target: {goal}"
        for label, values, unit, goal in found
        if values
    ]


def say(message: str) -> None:
    """Print a line on progress or on an error."""
    print(message, file=sys.stderr, flush=True)
