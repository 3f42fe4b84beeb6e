"""Successive halving by measurement: run the plans predicted best for a few epochs, and the better half for more.
Predictions choose the plans to measure, measurements choose the plan."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gnnpar.comm.world import num_cores
from gnnpar.config.inputs import as_value
from gnnpar.files import JsonDict
from gnnpar.placement import Plan
from gnnpar.planner.planner import Evaluated, Planned
from gnnpar.pricing.quantity import seconds_text
from gnnpar.pricing.topology import Machines
from gnnpar.settings import Settings
from gnnpar.training.result.result import WARMUP_EPOCHS

EPOCHS = 8
"""Timed epochs of the first round; each further round has twice as many."""
Run = Callable[[Plan, int], float]
Say = Callable[[str], None]


def check(settings: Settings, ranks: int, count: int) -> None:
    """Raise ValueError if runs on this machine would not measure the topology."""
    name = settings.names.get("topology", "")
    if isinstance(settings.topology, Machines):
        raise ValueError(
            f"--measure={count} runs plans on this machine, but topology={name} is another one: leave --measure out, "
            "or plan with topology=measured"
        )
    cores = num_cores() if settings.topology.cores == "auto" else settings.topology.cores
    threads = 1 if settings.threads_per_rank == "auto" else settings.threads_per_rank
    if ranks * threads > cores:
        raise ValueError(
            f"--measure={count}: {ranks} ranks of {threads} threads share {cores} cores, so their times say nothing: "
            f"set world_size={max(1, cores // threads)} or leave --measure out"
        )


def halved(
    planned: Planned, count: int, plan_of: Callable[[Evaluated], Plan], run: Run, say: Say
) -> tuple[Planned, dict[str, float]]:
    """Measure the `count` best candidates that may be chosen. Return the answer with the fastest of the last round
    first, and label -> measured seconds per epoch in the candidate's last round."""
    left = [p for p in planned.evaluated if not p.refused][:count]
    plans = {p.candidate.label: plan_of(p) for p in left}
    seconds: dict[str, float] = {}
    epochs = EPOCHS
    while True:
        for p in left:
            label = p.candidate.label
            seconds[label] = run(plans[label], epochs)
            predicted = seconds_text(p.price.seconds)
            say(f"{label}: measured {seconds_text(seconds[label])} in {epochs} epochs, predicted {predicted}")
        left.sort(key=lambda p: seconds[p.candidate.label])
        if len(left) <= 2:
            return replace(planned, evaluated=tuple(sorted(planned.evaluated, key=lambda p: p is not left[0]))), seconds
        left, epochs = left[: (len(left) + 1) // 2], 2 * epochs


def launcher(overrides: Sequence[str], ranks: int) -> Run:
    """Return a function that runs a plan through `gnnpar train` with the user's other settings."""

    def run(plan: Plan, epochs: int) -> float:
        total = WARMUP_EPOCHS + 1 + epochs  # one epoch records memory and is not timed
        with tempfile.TemporaryDirectory(prefix="gnnpar-") as folder:
            file = plan.save(Path(folder) / "plan")
            rest = [o for o in overrides if not o.startswith(("world_size=", "epochs=", "eval_every=", "topology"))]
            command = [
                sys.executable,
                "-m",
                "gnnpar",
                "train",
                *rest,
                f"plan={as_value(str(file))}",
                f"world_size={ranks}",
                f"epochs={total}",
                f"eval_every={total}",
                "checkpoint.keep=0",
                "tracker=jsonl",
                f"hydra.run.dir={folder}/run",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise ValueError(f"a plan could not be measured: {reason}")
            result: JsonDict = json.loads(Path(folder, "run", "result.json").read_text(encoding="utf-8"))
        return result["epoch_seconds"]["median"]

    return run
