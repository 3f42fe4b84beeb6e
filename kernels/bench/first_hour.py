"""The first hour on a GPU, as checks that only measure: `python kernels/bench/first_hour.py STAGE ... --out DIR`.

Stages: smoke, prove, tune, bench, e2e, profile; default: all, in this order. `attention` runs only if named: layers of
attention and sums compared with compiled PyG, cuSPARSE and, with `--anemoi PATH` (a checkout), anemoi-core's kernel.
Every check is a separate process, killed with all its children at its own or its stage's time limit; then the next one
starts. When it ends, its line is printed, and DIR/STAGE/CHECK.json and DIR/summary.txt are written. A check that passed
is not repeated without `--again`, so an interrupted stage continues.

`--rehearse` runs the same checks on a CPU, with small inputs and Triton's interpreter. `--hang STAGE` puts a check that
never ends in front of a stage, to test the limits. `--jobs N`: N checks at a time, in stages that time nothing.
Requirements beyond torch: requirements-gpu.lock.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = sorted(path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml") if path.stem != "tag")
TAIL = 4000  # last characters of a check's output to keep in its record
ANEMOI = "GNNPAR_ANEMOI"  # the checkout of `--anemoi`, for the checks
State = Literal["passed", "FAILED", "TIMED OUT", "not run"]


@dataclass(frozen=True)
class Check:
    """A command, run from the repository's root. `{out}` is replaced by the folder of its stage.

    `seconds`: time limit. `tool`: required program. `rehearsal`: the command on a CPU; empty: none. `env`: added to the
    environment.
    """

    name: str
    command: str
    seconds: float
    rehearsal: str = ""
    tool: str = ""
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """Checks that share a time limit in seconds. `timed`: they measure times, so run one at a time. `named`: run only
    if named."""

    name: str
    seconds: float
    checks: tuple[Check, ...]
    timed: bool = False
    named: bool = False


@dataclass(frozen=True)
class Record:
    """The result of a check. `detail`: its last line of output, or why it did not run."""

    stage: str
    check: str
    state: State
    seconds: float
    detail: str
    command: str
    output: str = ""

    @property
    def line(self) -> str:
        return f"{self.state:9} {self.seconds:6.1f} s  {self.stage}/{self.check}: {self.detail}"


RACE = "kernels/bench/run.py --csv {out}/kernels.csv"
SMALL = {  # the last value of a repeated option is used
    graph: f"--graph {graph} --scale {scale} --repeats 1 --seconds 1 --without compiled"
    for graph, scale in {"arxiv": 0.002, "products": 0.0002, "reddit": 0.0002, "mesh": 0.01, "grid": 0.001}.items()
}
COUNTERS = (
    "gpu__time_duration.sum",
    "dram__bytes.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sector_hit_rate.pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
TOOLS = {
    "compute-sanitizer": "compute-sanitizer --error-exitcode 9",
    "ncu": f"ncu --csv --page raw --metrics {','.join(COUNTERS)} -c 1000 "
    "-k 'regex:^_?(fold|pull|low|piece|combine|gather|scatter|quantize|dequantize|dropout)'",
}
UNTUNED, SHARED = {"GNNPAR_TUNE": "0"}, {"GNNPAR_SHARE_GPU": "1"}
PYTEST = "-m pytest -q -p no:cacheprovider"
INTERPRETED = f"{PYTEST} tests/kernels/test_dropout.py tests/kernels/test_gather.py -k triton -m 'not slow'"
KERNEL_TESTS = f"{PYTEST} tests/kernels -m gpu"


def _race(name: str, graph: str, options: str, seconds: float) -> Check:
    """Return a check of run.py. graph: empty: all. A rehearsal uses a small graph of the same kind."""
    command = f"{RACE} --device cuda{f' --graph {graph}' if graph else ''} {options}"
    return Check(name, command, seconds, f"{RACE} --cases cuda --threads 1 {options} {SMALL[graph or 'arxiv']}")


def _on_either(name: str, command: str, seconds: float, *, env: dict[str, str] | None = None) -> Check:
    """Return a check whose command has `{device}` (cuda, in a rehearsal cpu) and `{comm}` (nccl, gloo)."""
    on_gpu, on_cpu = (
        command.replace("{device}", device).replace("{comm}", comm)
        for device, comm in (("cuda", "nccl"), ("cpu", "gloo"))
    )
    return Check(name, on_gpu, seconds, on_cpu, env=env or {})


def _train(name: str, options: str, seconds: float, *, env: dict[str, str] | None = None) -> Check:
    command = f"-m gnnpar train dataset=sbm epochs=3 tracker=jsonl hydra.run.dir={{out}}/{name} device={{device}}"
    return _on_either(name, f"{command} {options}", seconds, env=env)


def _proof(name: str, arguments: str, seconds: float, *, env: dict[str, str] | None = None) -> Check:
    return _on_either(name, f"kernels/bench/proofs.py {arguments}", seconds, env=env)


def _check(name: str, seconds: float, strategy: str, models: str = "gcn,gat,gatv2,sage_max") -> Check:
    command = f"-m gnnpar check strategy={strategy} model={models} device={{device}} --worlds 1,2,4"
    return _on_either(name, command, seconds)


SANITIZED = f"{KERNEL_TESTS} -x -k 'rows_of_every_length or cut_rows or mixed_codes'"
TILES = "kernels/bench/tune.py {how} --csv {out}/tiles.csv"
ON_GPU, ON_CPU = (TILES.replace("{how}", how) for how in ("--jobs 12 --again", "--device cpu --scale 0.0001"))
CHECKS = {
    "smoke": (
        _proof("versions", "versions {device}", 60),
        _train("one-rank", "strategy=single model=gat", 90),
        _train("two-ranks", "strategy=graph_parallel model=gcn world_size=2 comm=gloo", 90),
        _race("kernels", "arxiv", "--scale 0.01 --repeats 1 --seconds 1 --quick", 120),
    ),
    "prove": (
        Check("kernels", f"{KERNEL_TESTS} -n 8", 240, INTERPRETED, env=UNTUNED),
        *(_proof(f"golden-{s}", f"golden {{device}} {s}", 120) for s in STRATEGIES),
        Check(
            "sanitizer",
            SANITIZED,
            150,
            tool="compute-sanitizer",
            env=UNTUNED | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        ),
    ),
    "tune": (Check("tiles", ON_GPU, 180, ON_CPU), _proof("table", "table {out}", 30)),
    "bench": (
        _race("quick", "", "--quick --seconds 5", 150),
        _race("spmm-products", "products", "--case spmm --seconds 5", 100),
        _race("spmm-reddit", "reddit", "--case spmm --seconds 5", 100),
        _race("attend-products", "products", "--case attend --quick --seconds 5", 100),
        _race("layer-arxiv", "arxiv", "--case gat --seconds 5", 60),
        *(_proof(f"captured-{m}", f"captured {{device}} single {m}", 60) for m in ("gcn", "gat")),
        Check("ncu", f"{RACE} --device cuda --graph arxiv --quick --repeats 1 --seconds 1", 90, tool="ncu"),
    ),
    "e2e": (
        *(
            _proof(f"gloo-{s}-{m}", f"pair {{device}} {s} {m}", 120)
            for s, m in product(("graph_parallel", "adaqp_p", "sar", "gnnpipe"), ("gcn", "gat"))
        ),
        _train("out-of-core", "strategy=sar strategy.logical_parts=4 model=gcn world_size=1", 60),
        _proof("nccl-one-gpu", "nccl {device}", 60),
        _proof("captured-nccl", "captured {device} graph_parallel gcn", 60, env=SHARED),
        _train("nccl-train", "strategy=gnnpipe model=gcn world_size=2 comm={comm}", 60, env=SHARED),
        *(_check(f"check-{s}", 60, s) for s in STRATEGIES),
        _check("check-edges", 60, "graph_parallel", "rgcn,rgat,gine,transformer"),
    ),
    "profile": tuple(_proof(f"waits-{s}", f"waits {{device}} {s}", 45) for s in STRATEGIES),
    "attention": (
        _race("transformer-mesh", "mesh", "--case transformer --seconds 5{anemoi}", 130),
        _race("transformer-grid", "grid", "--case transformer --seconds 5{anemoi}", 130),
        _race("layers-arxiv", "arxiv", "--case layer --quick --seconds 5", 110),
        _race("sums-products", "products", "--case spmm --seconds 5 --without index_add", 110),
    ),
}
SECONDS = {"smoke": 150, "prove": 330, "tune": 240, "bench": 420, "e2e": 420, "profile": 240, "attention": 480}
STAGES = tuple(
    Stage(name, SECONDS[name], checks, timed=name in ("tune", "bench", "attention"), named=name == "attention")
    for name, checks in CHECKS.items()
)


def _command(check: Check, stage: Stage, out: Path, *, rehearse: bool) -> str:
    """Return the command line for the shell; empty if the check has no rehearsal."""
    told = check.rehearsal if rehearse else check.command
    told = told.replace("{anemoi}", f" --anemoi {shlex.quote(anemoi)}" if (anemoi := os.environ.get(ANEMOI)) else "")
    if not told:
        return ""
    line = f"{shlex.quote(sys.executable)} {told.replace('{out}', shlex.quote(str(out / stage.name)))}"
    return f"{TOOLS[check.tool]} {line}" if check.tool and not rehearse else line


def run_check(check: Check, stage: Stage, out: Path, *, rehearse: bool, left: float) -> Record:
    """Run one check until it ends, or until its limit or the `left` seconds of its stage."""
    line = _command(check, stage, out, rehearse=rehearse)
    if not line:
        return Record(stage.name, check.name, "not run", 0.0, "needs a GPU", check.command)
    if check.tool and not rehearse and shutil.which(check.tool) is None:
        return Record(stage.name, check.name, "not run", 0.0, f"{check.tool} is not installed", line)
    if left <= 0:
        detail = f"the stage's {stage.seconds:.0f} s are spent: call it again to go on"
        return Record(stage.name, check.name, "not run", 0.0, detail, line)
    limit, log = min(check.seconds, left), out / stage.name / f"{check.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    there = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = os.pathsep.join([*(str(ROOT / name) for name in ("src", "kernels", "tests")), *filter(None, there)])
    env = os.environ | {"PYTHONPATH": paths, "WANDB_MODE": "disabled", "COLUMNS": "200"} | check.env
    if rehearse:
        env |= {"TRITON_INTERPRET": "1"}
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", line], cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        _running.add(process)
        try:
            code: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_all(process)
            _running.discard(process)
    seconds, output = time.monotonic() - began, log.read_text(errors="replace")
    told = [line.strip() for line in output.splitlines() if line.strip() and not _LEAKS.match(line)]
    last = told[-1][:160] if told else ""
    if code is None:
        state, detail = "TIMED OUT", f"ended after {limit:.0f} s; last line: {last}"
    else:
        state, detail = ("passed", last) if code == 0 else ("FAILED", f"exit code {code}; {last}")
    return Record(stage.name, check.name, state, seconds, detail, line, output[-TAIL:])


def _end_all(process: subprocess.Popen) -> None:
    """Kill the check's process and its children, a group that this program started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


_running: set[subprocess.Popen[bytes]] = set()


def _end_those_that_run() -> None:
    for process in list(_running):
        _end_all(process)


def run_stage(stage: Stage, out: Path, *, rehearse: bool, again: bool = False, jobs: int = 1) -> list[Record]:
    """Run all checks of a stage in order, `jobs` at a time; write each record when its check ends."""
    began = time.monotonic()

    def run(check: Check) -> Record:
        before = read_record(out, stage, check)
        if before is not None and before.state == "passed" and not again:
            print(f"{before.line}   (before)", flush=True)
            return before
        left = stage.seconds - (time.monotonic() - began)
        record = run_check(check, stage, out, rehearse=rehearse, left=left)
        path = out / stage.name / f"{check.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(record), indent=1) + "\n")
        print(record.line, flush=True)
        return record

    if jobs == 1 or stage.timed:
        return [run(check) for check in stage.checks]
    with ThreadPoolExecutor(jobs) as pool:
        try:
            return list(pool.map(run, stage.checks))
        except BaseException:  # Ctrl-C: end running checks, start no others
            pool.shutdown(wait=False, cancel_futures=True)
            _end_those_that_run()
            raise


def read_record(out: Path, stage: Stage, check: Check) -> Record | None:
    """Return the record of a check from an earlier call, or None."""
    path = out / stage.name / f"{check.name}.json"
    return Record(**json.loads(path.read_text())) if path.exists() else None


def write_summary(out: Path, stages: Sequence[Stage]) -> None:
    """Write one line per check of all stages that ran."""
    found = [record for stage in stages for check in stage.checks if (record := read_record(out, stage, check))]
    counts = {state: sum(r.state == state for r in found) for state in ("passed", "FAILED", "TIMED OUT", "not run")}
    total = ", ".join(f"{number} {state}" for state, number in counts.items() if number)
    (out / "summary.txt").write_text("\n".join([*(record.line for record in found), total]) + "\n")
    print(total)


_LEAKS = re.compile(r"nanobind: |See https://nanobind| - (leaked|\.\.\.)")  # printed by Triton's bindings at exit
HANG = Check("hangs", '-c "import time; time.sleep(3600)"', 5, '-c "import time; time.sleep(3600)"')


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every check that ran passed."""
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--stage", action="append", default=[], metavar="STAGE", help="the same as an option")
    parser.add_argument("--anemoi", type=Path, help="checkout of anemoi-core, a contender of the stage attention")
    parser.add_argument("--out", type=Path, default=Path("outputs/first_hour"))
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, small")
    parser.add_argument("--again", action="store_true", help="also what passed before")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="limit of each stage, if below its own")
    parser.add_argument("--jobs", type=int, default=1, help="checks at a time where nothing is timed (default 1)")
    parser.add_argument("--hang", choices=names, help="put a check that never ends in front of this stage")
    given = parser.parse_args(argv)
    if given.jobs < 1:
        parser.error(f"--jobs {given.jobs}: one or more")
    asked = {*given.stages, *given.stage}
    if given.anemoi:
        os.environ[ANEMOI] = str(given.anemoi.resolve())
    if unknown := asked - set(names):
        parser.error(f"no stage {', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    wanted = [stage for stage in STAGES if (stage.name in asked if asked else not stage.named)]
    chosen = [replace(stage, seconds=min(stage.seconds, given.seconds)) for stage in wanted]
    if given.hang:
        chosen = [replace(s, checks=(HANG, *s.checks)) if s.name == given.hang else s for s in chosen]
    out, how = given.out.resolve(), {"rehearse": given.rehearse, "again": given.again, "jobs": given.jobs}
    records = [record for stage in chosen for record in run_stage(stage, out, **how)]
    write_summary(out, chosen if given.hang else STAGES)
    return 0 if all(record.state in ("passed", "not run") for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
