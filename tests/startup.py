"""CPU seconds until a command shows something: the table of docs/guide/train.md.

    python tests/startup.py [--runs 5] [--source CHECKOUT]     of another version, unpacked there

Medians. Until a program ends, prints its first line, or the line of its first epoch: of all its processes, ended or
not. Of a graph of 3,000 nodes (`dataset=sbm`), in an empty folder.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parents[1]
COMMANDS = ("partition", "plan", "estimate", "compare", "ablate", "status", "dashboard", "doctor", "check", "new")
COMMANDS += ("cite", "data", "export", "predict")
TRAIN = ("train", "dataset=sbm", "model=gcn", "epochs=3", "tracker.every=1", "hydra.run.dir=run")
TWO = ("strategy=graph_parallel", "world_size=2", "threads_per_rank=1")


class Start(NamedTuple):
    """A command, what its last line of interest begins with ("": any; None: it ends by itself), and its limit."""

    arguments: tuple[str, ...]
    until: str | None
    limit: str
    name: str


STARTS = (
    Start(("--help",), None, "0.1", "`gnnpar --help`"),
    *(Start((command, "--help"), None, "1", f"`gnnpar {command} --help`") for command in COMMANDS),
    Start(("train", "--help"), None, "1.5", "`gnnpar train --help`"),
    Start((*TRAIN, "strategy=single"), "", "2", "`gnnpar train`, first line"),
    Start((*TRAIN, "strategy=single"), "epoch 1/", "4", "`gnnpar train strategy=single`, first epoch"),
    Start((*TRAIN, *TWO), "epoch 1/", "4", "`gnnpar train strategy=graph_parallel world_size=2`, first epoch"),
    Start(("estimate", "dataset=sbm", "world_size=4"), "", "at once", "`gnnpar estimate`, first line"),
)


def cpu_seconds(arguments: Sequence[str], until: str | None, source: Path) -> float:
    """Of one start of `gnnpar`."""
    return cpu_seconds_of([sys.executable, "-m", "gnnpar", *arguments], until, source)


def cpu_seconds_of(command: Sequence[str], until: str | None, source: Path) -> float:
    """Of one start of any command, with the gnnpar of `source`."""
    paths = [str(source / each) for each in ("src", "kernels")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder:
        environment["GNNPAR_CACHE"] = f"{folder}/cache"  # what was measured or cut before is not there
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        if until is None:
            process.stdout.read()
            _, code, used = os.wait4(process.pid, 0)
            process.returncode = code
            if code:
                raise RuntimeError(f"{' '.join(command)}: exit code {os.waitstatus_to_exitcode(code)}")
            return used.ru_utime + used.ru_stime
        try:
            if not any(line.startswith(until) for line in process.stdout):
                raise RuntimeError(f"{' '.join(command)}: no line begins with {until!r}")
            return _of_all(psutil.Process(process.pid))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _of_all(process: psutil.Process) -> float:
    """A process, those that it has started, and those that have ended."""
    return sum(sum(each.cpu_times()[:4]) for each in (process, *process.children(recursive=True)))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--source", type=Path, default=ROOT)
    parser.add_argument("--only", default="", help="part of a row's name")
    asked = parser.parse_args(argv)
    sys.stdout.write("| command | at most | CPU seconds | least and most |\n|---|---|---|---|\n")
    for start in STARTS:
        if asked.only in start.name:
            found = [cpu_seconds(start.arguments, start.until, asked.source) for _ in range(asked.runs)]
            median = statistics.median(found)
            row = f"| {start.name} | {start.limit} | {median:.2f} | {min(found):.2f} to {max(found):.2f} |"
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
