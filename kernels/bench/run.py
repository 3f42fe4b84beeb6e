"""Race every kernel against what one would use instead: `python kernels/bench/run.py [--quick]`.

Contenders of a case take turns in one process, so that a ratio compares the same minutes of the same machine. Reported
are medians of wall and CPU seconds, and the peak of resident memory over what was there before.
"""

import argparse
import csv
import ctypes
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from registry import OURS, Case, Inputs, Run, Size, cases, graph  # pyright: ignore[reportMissingImports]


class Measurement(NamedTuple):
    """One contender in one case; times in milliseconds, memory in MiB (nan where it cannot be read)."""

    case: Case
    contender: str
    law: str
    threads: int
    wall: list[float]
    cpu: list[float]
    peak_mib: float


def _status_kib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return float(line.split()[1])
    return float("nan")


def peak_mib(run: Run, *, device: str) -> float:
    """Peak memory of one call beyond what is held before it."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    try:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_kib("VmRSS")
        run()
        return (_status_kib("VmHWM") - before) / 1024
    except OSError:
        return float("nan")


def measure(case: Case, data: Inputs, *, threads: int, repeats: int, device: str) -> list[Measurement]:
    """Every contender `repeats` times, in turns."""
    runs = case.contenders(data)
    peaks = {name: peak_mib(run, device=device) for name, run in runs.items()}
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started, busy = time.perf_counter(), time.process_time()
            run()
            if device != "cpu":
                torch.cuda.synchronize()
            wall[name].append((time.perf_counter() - started) * 1e3)
            cpu[name].append((time.process_time() - busy) * 1e3)
    return [Measurement(case, name, data.size.law, threads, wall[name], cpu[name], peaks[name]) for name in runs]


def hardware(device: str) -> str:
    """Name of the processor measured."""
    if device != "cpu":
        return torch.cuda.get_device_name()
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return f"{os.cpu_count()}-core {model}"


def commit() -> str:
    """Short hash of the repository's commit, with + where the kernels differ from it."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True).stdout
        dirty = subprocess.run(["git", "status", "--porcelain", ".."], cwd=here, capture_output=True, text=True).stdout
    except OSError:
        return "unknown"
    return head.strip() + ("+" if dirty else "") if head else "unknown"


def row(measured: Measurement, ours: Measurement, context: dict[str, Any]) -> dict[str, Any]:
    """One line of the CSV file; ratios say how many times the op is faster, and smaller, than this contender."""
    tenths = statistics.quantiles(measured.wall, n=10) if len(measured.wall) > 1 else [measured.wall[0]] * 9
    p50, cpu50 = statistics.median(measured.wall), statistics.median(measured.cpu)
    return {
        **context,
        "threads": measured.threads, "case": measured.case.name, "shape": measured.case.shape,
        "dtype": measured.case.dtype, "degrees": measured.law, "contender": measured.contender,
        "wall_p20_ms": round(tenths[1], 3), "wall_p50_ms": round(p50, 3), "wall_p80_ms": round(tenths[7], 3),
        "cpu_p50_ms": round(cpu50, 3), "peak_mib": round(measured.peak_mib, 1),
        "wall_ratio": round(p50 / statistics.median(ours.wall), 2),
        "cpu_ratio": round(cpu50 / max(statistics.median(ours.cpu), 1e-6), 2),
        "memory_ratio": round(measured.peak_mib / max(ours.peak_mib, 1.0), 2),
    }  # fmt: skip


COLUMNS = ("threads", "case", "shape", "dtype", "degrees", "contender", "wall_p50_ms", "cpu_p50_ms", "peak_mib",
           "wall_ratio", "cpu_ratio", "memory_ratio")  # fmt: skip
WIDTHS = (7, 22, 6, 9, 8, 26, 11, 11, 9, 10, 9, 12)


def line(values: Any) -> None:
    """One line of the table, printed at once."""
    cells = [
        f"{value!s:<{w}}" if isinstance(value, str) else f"{value:>{w}}"
        for value, w in zip(values, WIDTHS, strict=True)
    ]
    sys.stdout.write("  ".join(cells).rstrip() + "\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the graph, power-law degrees, main cases only")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", default="1,2", help="CPU threads, one run each (default 1,2)")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=0, help="turns of each contender (default 7, quick 5)")
    parser.add_argument("--csv", type=Path, default=Path("outputs/kernels_bench.csv"), help="file to append to")
    return parser.parse_args()


def main() -> None:
    """Measure, print a table, append to the CSV file."""
    given = arguments()
    context = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit(), "hardware": hardware(given.device),
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip
    nodes, edges = (10_000, 200_000) if given.quick else (50_000, 1_000_000)
    sys.stdout.write(f"{context['hardware']}, torch {torch.__version__}, {nodes} nodes, {edges} edges\n")
    line(COLUMNS)
    for threads in [int(t) for t in given.threads.split(",")]:
        torch.set_num_threads(threads)
        for law in ("power",) if given.quick else ("power", "uniform"):
            torch.manual_seed(0)
            data = graph(Size(nodes=nodes, edges=edges, law=law), device=given.device)
            for case in cases():
                if given.case not in case.name or (given.quick and not case.quick):
                    continue
                repeats = given.repeats or (5 if given.quick else 7)
                measured = measure(case, data, threads=threads, repeats=repeats, device=given.device)
                ours = next(m for m in measured if m.contender == OURS)
                rows = [row(one, ours, {**context, "nodes": nodes, "edges": edges}) for one in measured]
                for found in rows:
                    line([found[c] for c in COLUMNS])
                append(given.csv, rows)
    sys.stdout.write(f"appended to {given.csv}\n")


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to a CSV file, which gets its header when it is new: an interrupted run keeps what it measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
