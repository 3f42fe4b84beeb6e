"""Race every kernel against what one would use instead: `python kernels/bench/run.py [--quick] [--device cuda]`.

Before a case is timed, its op is compared with the specification. Contenders of a case take turns in one process, so
that ratios compare the same minutes of the same machine. The report has percentiles of wall time, on a CPU also CPU
time, the least bytes to move over that time, and the peak memory above the level before the call.
"""

import argparse
import gc
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench import baselines, report
from bench.graphs import GRAPHS, Inputs, draw
from bench.measuring import Clock, ceiling, clock_of, measure, percentiles, release
from bench.registry import cases, copy

DEFAULT_GRAPHS = {"cpu": "power,uniform", "cuda": "arxiv,reddit,products"}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line, with defaults that depend on the device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--quick", action="store_true", help="first graph, a fifth of it on a CPU; main cases only")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--graph", default="", help=f"comma list of {', '.join(GRAPHS)}; default by device")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the nodes and edges of each graph")
    parser.add_argument("--cases", choices=("cpu", "cuda"), help="cases of a device type; default: the device's")
    parser.add_argument("--threads", default="", help="CPU threads, one run each (default 1,2; on a GPU torch's own)")
    parser.add_argument("--repeats", type=int, default=0, help="turns of each contender (default 7, quick 5, GPU 20)")
    parser.add_argument("--seconds", type=float, default=30.0, help="after these and 3 turns a case ends (default 30)")
    parser.add_argument("--without", default="", help="leave out contenders whose name contains this, e.g. compiled")
    parser.add_argument("--anemoi", type=Path, help="checkout of anemoi-core: its Triton kernel of attention runs too")
    parser.add_argument("--csv", type=Path, default=Path("outputs/kernels_bench.csv"), help="file to append to")
    given = parser.parse_args(argv)
    device = torch.device(given.device).type
    given.cases = given.cases or device
    given.repeats = given.repeats or (20 if device == "cuda" else 5 if given.quick else 7)
    given.threads = [int(t) for t in given.threads.split(",") if t] or ([] if device == "cuda" else [1, 2])
    given.threads = given.threads or [torch.get_num_threads()]
    names = [name for name in (given.graph or DEFAULT_GRAPHS[given.cases]).split(",") if name]
    if unknown := sorted(set(names) - set(GRAPHS)):
        parser.error(f"--graph {','.join(unknown)}: choose from {', '.join(GRAPHS)}")
    given.graphs = names[:1] if given.quick and not given.graph else names
    if given.quick and device == "cpu":
        given.scale *= 0.2
    return given


def unusable(given: argparse.Namespace) -> str:
    """Return why nothing can be measured or written, else an empty string."""
    if torch.device(given.device).type == "cuda" and not torch.cuda.is_available():
        return f"--device {given.device}: torch {torch.__version__} finds no GPU here"
    return report.misfit(given.csv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, append to the CSV file. Return 1 if an op was wrong or did not run."""
    given = arguments(argv)
    baselines.anemoi_core = given.anemoi
    if problem := unusable(given):
        report.say(problem)
        return 2
    context, failures, rows = report.context(given.device), [], []
    print(f"{context['hardware']}, torch {context['torch']}, Triton {context['triton']}, CUDA {context['cuda'] or '-'}")
    if absent := baselines.missing():
        print(f"not installed, left out: {', '.join(absent)}")
    report.print_row()
    for name in given.graphs:
        size = GRAPHS[name].scaled(given.scale)
        data = draw(size, device=given.device)
        for threads in given.threads:
            torch.set_num_threads(threads)
            where = {**context, "threads": threads, "graph": name, "nodes": size.nodes, "edges": size.edges}
            measured, wrong = run_cases(data, given, where)
            rows += measured
            failures += wrong
        del data
        release(given.device)
    gc.unfreeze()
    print()
    for line in report.summary(rows, kind=given.cases, device=given.device):
        print(line)
    print(f"appended to {given.csv}")
    for failure in failures:
        report.say(f"FAILED {failure}")
    return 1 if failures else 0


def run_cases(data: Inputs, given: argparse.Namespace, where: report.Row) -> tuple[list[report.Row], list[str]]:
    """Run the chosen cases on one graph. Return their rows, and one line per failed case."""
    clock, failures = clock_of(given.device), []
    rows, rate = copy_rate(data, clock, given, where)
    chosen = [case for case in cases(given.cases) if given.case in case.name and (case.quick or not given.quick)]
    for number, case in enumerate(chosen, 1):
        label = f"{case.name} {case.shape} {str(case.dtype)[6:]} on {where['graph']}, {where['threads']} threads"
        report.say(f"[{number}/{len(chosen)}] {label}")
        torch.manual_seed(0)
        try:
            how = {"repeats": given.repeats, "seconds": given.seconds, "without": given.without}
            measured, failure = measure(case, data, clock, device=given.device, **how)
        except Exception as error:  # an error of a kernel or its compiler ends only its case
            measured, failure = [], f"{type(error).__name__}: {str(error).strip()[:200]}"
        if failure:
            failures.append(f"{label}: {failure}")
            report.say(failures[-1])
        else:
            case_rows = report.rows_of(case, data.size, measured, copy_rate=rate, context=where)
            for row in case_rows:
                report.print_row(row)
            report.append(given.csv, case_rows)
            rows += case_rows
        del measured
        release(given.device)
        gc.freeze()  # survivors, mostly modules, need no search after every case
    return rows, failures


def copy_rate(
    data: Inputs, clock: Clock, given: argparse.Namespace, where: report.Row
) -> tuple[list[report.Row], float]:
    """Return a copy's row, and its GB/s, read and written bytes together."""
    full = 1 << (30 if data.device.type == "cuda" else 26)
    case = copy(max(1 << 20, int(full * min(given.scale, 1.0))))
    measured = ceiling(case, data, clock)
    rate = case.floor(data.size) / percentiles(measured.wall)[1] / 1e6
    rows = report.rows_of(case, data.size, [measured], copy_rate=rate, context=where)
    report.print_row(rows[0])
    report.append(given.csv, rows)
    return rows, rate


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tempfile.tempdir:  # PyG's layers write modules there and import them
        sys.exit(main())
