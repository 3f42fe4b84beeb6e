"""The schedule of kills: every strategy, on 1, 2 and 4 ranks, is struck many times and must end as if undisturbed.

Ranks are started by gnnpar; in three cases by torchrun, in one of these on two hosts, which are network namespaces.

    python tests/kills.py --out FILE [--cases N]     what FILE does not hold yet is run; it is written after every case
    python tests/kills.py --out FILE --only NAME     one case, e.g. "sar 4 gnnpar"; as often as there are names
    python tests/kills.py --out FILE --page          write its table into docs/guide/reliability.md

A strike sends a signal to a rank, or to the parent of all ranks, at some time of an epoch, of a checkpoint or of the
start. A run that has ended is started again with resume=auto by the true command line; torchrun starts its ranks again
by itself. A case has survived where parameters, optimizer, engine state and metrics are in the end those of the same
run on one host, which nobody struck.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / each) for each in ("src", "kernels")]

from checkpoints import SMALL, hashes, result, rows, strategy_of
from composing import names, settings_of
from conftest import environment
from gnnpar import launch
from gnnpar.cli.train import run_training
from gnnpar.files import write_json_atomic
from saboteurs import FROM_THE_START, PARENT, Strike, made
from started import Hosts, two_hosts

KINDS = {  # what is sent
    "kill a rank": signal.SIGKILL,
    "kill a rank at its start": signal.SIGKILL,
    "stop a rank": signal.SIGSTOP,
    "kill the parent": signal.SIGKILL,
    "ask a rank to end": signal.SIGTERM,
}
FIFTEEN = dict(zip(KINDS, (7, 2, 2, 2, 2), strict=True))  # how often in a case
TEN = dict(zip(KINDS, (5, 1, 1, 2, 1), strict=True))
BY_TORCHRUN = dict(zip(KINDS, (6, 1, 1, 0, 2), strict=True))  # which leaves ranks behind when it is killed
Launcher = Literal["gnnpar", "torchrun", "two-hosts"]
JOINED: tuple[tuple[str, int, Launcher], ...] = (
    ("adaqp", 2, "torchrun"),
    ("gnnpipe", 4, "torchrun"),
    ("graph_parallel", 4, "two-hosts"),
)
PAGE = Path(__file__).parents[1] / "docs/guide/reliability.md"
BEGIN, END = "<!-- counts of tests/kills.py -->\n", "<!-- end of kills -->\n"
ON_ONE_RANK = frozenset({"single"})
OUTCOMES = ("survived", "refused", "lost", "hung")
_LAST_EPOCH = 45  # that is struck: what a delay moves must find the run at work
_EPOCHS = {1: 800}  # of one rank, which computes them in milliseconds: the last strike must find it at work
_ATTEMPT_SECONDS = 900.0


@dataclass(frozen=True)
class Case:
    """One run and what happens to it."""

    strategy: str
    ranks: int
    strikes: tuple[Strike, ...]
    epochs: int = 60
    launcher: Launcher = "gnnpar"

    @property
    def name(self) -> str:
        return f"{self.strategy} {self.ranks} {self.launcher}"


@dataclass
class Count:
    """What became of a case: strikes by kind, all in `outcome`; `detail` where it is not survived."""

    name: str
    tried: dict[str, int]
    outcome: str = "survived"
    detail: str = ""
    restarts: int = 0

    @property
    def number(self) -> int:
        return sum(self.tried.values())


def cases() -> list[Case]:
    """The full schedule: 15 strikes a case on 1 and 2 ranks, 10 on 4 and by torchrun."""
    found = [(name, ranks) for ranks in (2, 4) for name in names("strategy")]
    fits = [(name, 1 if name in ON_ONE_RANK else ranks) for name, ranks in found]
    own = [
        Case(name, ranks, strikes(f"{name} {ranks}", ranks, FIFTEEN if ranks < 4 else TEN), _EPOCHS.get(ranks, 60))
        for name, ranks in dict.fromkeys(fits)
    ]
    joined = [
        Case(name, ranks, strikes(f"{name} {ranks} {launcher}", ranks, BY_TORCHRUN), launcher=launcher)
        for name, ranks, launcher in JOINED
    ]
    return own + joined


def strikes(seed: str, ranks: int, counts: Mapping[str, int], *, below: int = _LAST_EPOCH) -> tuple[Strike, ...]:
    """In a random order, after random epochs, on random ranks."""
    draw = random.Random(seed)
    kind_of = [kind for kind, count in counts.items() for _ in range(count)]
    draw.shuffle(kind_of)
    epochs = sorted(draw.sample(range(below), len(kind_of)))
    found = []
    for kind, epoch in zip(kind_of, epochs, strict=True):
        early = kind.endswith("start")
        victim = PARENT if kind == "kill the parent" else draw.randrange(ranks)
        delay = draw.uniform(0.0, 0.5) if early else draw.choice([0.0, draw.uniform(0.0, 0.02)])
        found.append(Strike(kind, FROM_THE_START if early else epoch, victim, int(KINDS[kind]), delay))
    return tuple(found)


def undisturbed(folder: Path, struck: Path, *overrides: str) -> Path:
    """The same run, with what the other one measured, links and the machine's rates (in its cache): its ranks are
    processes, whose sums have one order."""
    profile = struck / "profile.json"
    replayed = (f"profile={profile}",) if profile.exists() else ()
    folder.mkdir()
    with launch.environment(GNNPAR_CACHE=environment()["GNNPAR_CACHE"]):
        settings = settings_of(*SMALL[1:], "checkpoint.every=2", *replayed, *overrides)
        assert run_training(settings, folder).exit_code == 0
    return folder


def run(case: Case, folder: Path) -> Count:
    """Strike a run in `folder` until no strike is left and it has ended."""
    (folder / "tracker").mkdir()
    file = folder / "strikes.json"
    file.write_text(json.dumps(case.strikes))
    (folder / "tracker" / "strikes.yaml").write_text(f"_target_: saboteurs.Strikes\nfile: {file}\n")
    layers = [f"model.num_layers={case.ranks}"] if case.strategy == "gnnpipe" else []  # one a stage at least
    job = [*SMALL[1:], *strategy_of(case.strategy), *layers, f"world_size={case.ranks}", f"epochs={case.epochs}"]
    how = ["tracker=strikes", "checkpoint.every=2", "comm.timeout_seconds=45", "resume=auto", "hydra.run.dir=run"]
    how.append("launch.max_restarts=99" if case.launcher == "gnnpar" else "comm.lost_seconds=20")
    count = Count(case.name, {})
    with started_by(case, folder) as attempt:
        for _ in range(len(case.strikes) + 2):
            before = made(file)
            line = attempt([*job, *how])
            if line is None:
                break
            ends = ("kill the parent", "ask a rank to end") if case.launcher == "gnnpar" else ()
            expected = [case.strikes[i].kind in ends for i in range(before, made(file))]
            if line == "hung":
                count.outcome = "hung"
            elif " is in use by " in line or " no good checkpoint left" in line or "has no rows" in line:
                count.outcome = "refused"
            elif not any(expected) or line not in ("", "gnnpar: interrupted by a signal"):
                count.outcome = "lost"
            if count.outcome != "survived":
                count.detail = line
                break
    count.tried = dict(Counter(strike.kind for strike in case.strikes[: made(file)]))
    if count.outcome == "survived":
        count.restarts = result(folder / "run")["restarts"]
        whole = undisturbed(folder / "whole", folder / "run", *job[len(SMALL) - 1 :])
        if made(file) != len(case.strikes):
            count.outcome, count.detail = "lost", f"the run ended after {made(file)} strikes"
        elif (hashes(folder / "run"), rows(folder / "run")) != (hashes(whole), rows(whole)):
            count.outcome, count.detail = "lost", "it ended with other numbers"
    return count


Attempt = Callable[[Sequence[str]], str | None]
"""Starts a run, or goes on with it: None where it has completed, else its last line."""


@contextmanager
def started_by(case: Case, folder: Path) -> Iterator[Attempt]:
    """How runs of a case are started, in `folder`."""
    env = environment()
    env["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    if case.launcher == "two-hosts":
        with two_hosts(folder) as hosts:
            yield lambda job: _on_both(hosts, job, env)
        return
    command = [sys.executable, "-m", "gnnpar", "train"]
    if case.launcher == "torchrun":
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
        command = [sys.executable, "-m", *torchrun, "--max-restarts", "99", "-m", "gnnpar", "train"]
        env["OMP_NUM_THREADS"] = "1"  # torchrun says so at length
    yield lambda job: _alone([*command, *job], folder, env)


def _alone(command: Sequence[str], folder: Path, env: dict[str, str]) -> str | None:
    with subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        return _line_of(process)


def _on_both(hosts: Hosts, job: Sequence[str], env: dict[str, str]) -> str | None:
    """Two ranks on each host; the line of the first whose torchrun has failed."""
    processes = [hosts.train(host, *job, env=env, elastic=99) for host in (0, 1)]
    with ExitStack() as after:
        for process in processes:
            after.enter_context(process)
        lines = [_line_of(process) for process in processes]
    return next((line for line in lines if line is not None), None)


def _line_of(process: subprocess.Popen[str]) -> str | None:
    try:
        _, err = process.communicate(timeout=_ATTEMPT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "hung"
    if process.returncode == 0:
        return None
    lines = err.strip().splitlines() or [""]
    ours = [line for line in lines if line.startswith("gnnpar: ")]  # Python may warn of more after it
    return (ours or lines)[-1]


def read(file: Path) -> list[Count]:
    """The counts in a file."""
    data = json.loads(file.read_text(encoding="utf-8"))["cases"] if file.exists() else []
    return [Count(**each) for each in data]


def total(counts: Sequence[Count]) -> dict[str, int]:
    """tried, and of it survived, refused, lost, hung."""
    by = {outcome: sum(each.number for each in counts if each.outcome == outcome) for outcome in OUTCOMES}
    return {"tried": sum(by.values()), **by}


def table(counts: Sequence[Count]) -> str:
    """Return Markdown: a row for each number of ranks and way to start them, and one of all."""
    head = ["ranks", "started by", "strategies", *KINDS, "tried", *OUTCOMES]
    lines = [head, ["---:", "---", *["---:"] * (len(head) - 2)]]
    by: dict[tuple[str, str], list[Count]] = {}
    for each in counts:
        _, ranks, launcher = each.name.split()
        by.setdefault((ranks, launcher), []).append(each)
    for name, cases in [*by.items(), (("all", ""), counts)]:
        kinds = [str(sum(each.tried.get(kind, 0) for each in cases)) for kind in KINDS]
        strategies = str(len({each.name.split()[0] for each in cases}))
        lines.append([*name, strategies, *kinds, *map(str, total(cases).values())])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(page: str, counts: Sequence[Count]) -> str:
    """The page with the table in its place."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(counts) + END + rest.split(END)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="The schedule of kills, with counts.")
    parser.add_argument("--out", type=Path, required=True, help="JSON with the counts; what it holds is not run again")
    parser.add_argument("--cases", type=int, help="how many more cases (all)")
    parser.add_argument("--only", action="append", help="the name of a case; several in this order (all cases)")
    parser.add_argument("--page", action="store_true", help=f"write the table into {PAGE.name} and run nothing")
    options = parser.parse_args()
    counts = read(options.out)
    if options.page:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), counts), encoding="utf-8")
        return 0
    done, every = {each.name for each in counts}, {case.name: case for case in cases()}
    chosen = [every[name] for name in options.only] if options.only else list(every.values())
    for case in [case for case in chosen if case.name not in done][: options.cases]:
        with tempfile.TemporaryDirectory(prefix="gnnpar-kills-") as folder:
            count = run(case, Path(folder))
        sys.stdout.write(f"{count.name}: {count.number} strikes, {count.outcome} {count.detail}\n")
        sys.stdout.flush()
        counts.append(count)
        write_json_atomic(options.out, {"cases": [asdict(each) for each in counts], "total": total(counts)})
    sys.stdout.write(table(counts))
    return 0 if all(each.outcome == "survived" for each in counts) else 1


if __name__ == "__main__":
    sys.exit(main())
