"""strategy=tag after the warm-up: compare predicted and measured times, and on request plan again if they differ.

The machine's rates are corrected by measured over predicted, phase by phase. A run switches to another plan, from a
checkpoint, if its predicted epoch is shorter than the measured one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median

from gnnpar.comm.world import World
from gnnpar.files import JsonObject
from gnnpar.parallel.strategy import Workload
from gnnpar.placement import Plan, Topology
from gnnpar.planner.machines import setting_of
from gnnpar.planner.strategy import TAG
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.quantity import seconds_text
from gnnpar.settings import Settings
from gnnpar.track.console import say
from gnnpar.training.loop import NewPlan, Run, since_of
from gnnpar.training.plans import PlanSource, with_strategy, workload_of
from gnnpar.training.result.result import WARMUP_EPOCHS

ABOVE = 0.2
"""Tolerated relative difference between an epoch and its prediction."""
EPOCHS = 8
"""Epochs to compare, after the warm-up and the epoch that records memory."""
_GAIN = 0.95  # another plan must be below this share of the measured epoch
_SHARE, _LIMIT = 0.1, 8.0  # correct no phase below this share of the epoch, and none by more than this factor
_MEASURED = {
    "compute": ("compute", "other"),
    "encode": ("encode",),
    "wire": ("exposed_wire", "exposed_skew"),
    "reduce": ("reduce",),
}
Row = JsonObject


@dataclass(frozen=True)
class MeasuredPlan(PlanSource):
    """The plan source of strategy=tag: plans for the measured machine, and again if epochs are slower than
    predicted."""

    def plan(self, settings: Settings, world: World, workload: Workload) -> Plan:
        def setting() -> Machine:
            return setting_of(settings, world.size, say)[0]

        return settings.strategy.plan(replace(workload, setting=setting), Topology(world.size))

    def replanner(self, run: Run) -> Callable[[int, Row], NewPlan | None] | None:
        """Return the comparison of a run, which plans again at most once."""
        since = since_of(run.predicted)
        return partial(replanned, run, Replanner(since)) if wanted(run.settings) and not since else None


@dataclass
class Replanner:
    """Rank 0's record of a plan's epochs. since: first epoch of the plan."""

    since: int
    rows: list[Row] = field(default_factory=list)

    @property
    def due(self) -> int:
        """The epoch after which predicted and measured are compared."""
        return self.since + WARMUP_EPOCHS + EPOCHS

    def add(self, row: Row) -> None:
        if row["epoch"] >= self.since + WARMUP_EPOCHS and row["time/timed"]:
            self.rows.append(row)

    @property
    def seconds(self) -> float:
        return median(row["time/epoch_seconds"] for row in self.rows)

    @property
    def phases(self) -> dict[str, float]:
        """Mean seconds per epoch by the planner's phases."""
        return {
            phase: fmean(sum(row[f"time/{name}_seconds"] for name in names) for row in self.rows)
            for phase, names in _MEASURED.items()
        }


def wanted(settings: Settings) -> bool:
    """Return True if a plan is compared and may be replaced."""
    return settings.plan is None and settings.strategy.capabilities.plans_again


def not_compared(world: World) -> str:
    """Return why times of this world cannot be compared with a prediction, else an empty string."""
    if world.how == "threads":
        return "ranks are threads of one process"
    if world.oversubscribed:
        return f"{world.jobs_at_once * world.local_size} ranks share {world.cores} cores"
    return ""


def deviation(predicted: JsonObject, seconds: float) -> float:
    return seconds / predicted["epoch_seconds"] - 1.0


def factors(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Return phase -> measured over predicted; 1 for a small phase."""
    ratios = {}
    totals = sum(predicted.values()), sum(measured.values())
    for phase, seconds in measured.items():
        shares = predicted[phase] / totals[0], seconds / totals[1]
        ratio = seconds / predicted[phase] if predicted[phase] > 0 and max(shares) >= _SHARE else 1.0
        ratios[phase] = min(_LIMIT, max(1 / _LIMIT, ratio))
    return ratios


def corrected(machine: Machine, by: Mapping[str, float]) -> Machine:
    """Return the machine with rates and links scaled to the measured seconds."""
    compute, encode, wire = by["compute"], by["encode"], by["wire"]
    moved = encode / compute  # encoding scales with computing
    rates = tuple(
        replace(
            r,
            scale=r.scale * compute,
            epoch=r.epoch * compute,
            gather=r.gather * moved,
            coded={bits: seconds * moved for bits, seconds in r.coded.items()},
            message=r.message * wire,
            reduce=(r.reduce[0] * by["reduce"], r.reduce[1] * by["reduce"]),
        )
        for r in machine.rates
    )
    links = tuple(replace(k, rate=k.rate / wire, latency=k.latency * wire) for k in machine.fabric.links)
    return Machine(replace(machine.fabric, links=links), rates)


def compared(predicted: JsonObject, measured: Replanner) -> tuple[str, dict[str, float]]:
    """Return a text on the phases that differ (empty if the prediction holds), and the factors."""
    off = deviation(predicted, measured.seconds)
    by = factors(predicted["phases"], measured.phases)
    if abs(off) <= ABOVE:
        return "", by
    phases = ", ".join(f"{phase} x{ratio:.2f}" for phase, ratio in by.items() if ratio != 1.0)
    expected = seconds_text(predicted["epoch_seconds"])
    return (
        f"measured {seconds_text(measured.seconds)} an epoch, predicted {expected} ({off:+.0%}; {phases or 'evenly'})",
        by,
    )


def better(plan: Plan, before: JsonObject, measured: Replanner, epoch: int, why: str) -> Plan | None:
    """Return the plan, with a record of the plan that it replaces, if it is another one and faster; else None."""
    predicted = plan.predicted
    assert predicted is not None
    if predicted["candidate"] == before["candidate"] or predicted["epoch_seconds"] > _GAIN * measured.seconds:
        return None
    change = {
        "epoch": epoch,
        "before": before["label"],
        "predicted_seconds": before["epoch_seconds"],
        "measured_seconds": measured.seconds,
        "why": why,
    }
    return replace(plan, predicted={**predicted, "replanned": change})


def replanned(run: Run, comparing: Replanner, epoch: int, row: Row) -> NewPlan | None:
    """Return a better plan after the compared epochs, if there is one, and print why. Collective. Ranks other than 0
    get an empty NewPlan."""
    if run.comm.rank == 0:
        comparing.add(row)
    if epoch != comparing.due:
        return None
    new = plan_again(run, epoch + 1, comparing) if run.comm.rank == 0 else None
    exists = run.comm.broadcast(new is not None)
    return new or NewPlan(None, None) if exists else None


def plan_again(run: Run, epoch: int, comparing: Replanner) -> NewPlan | None:
    """Return a better plan than the run's for the measured rates, if there is one, and print why. On rank 0."""
    settings, predicted = run.settings, run.predicted
    if predicted is None or not comparing.rows:
        return None
    assert isinstance(settings.strategy, TAG)
    if reason := not_compared(run.world):
        say(f"tag: {reason}: times are not compared with the prediction")
        return None
    why, by = compared(predicted, comparing)
    if not why:
        return None
    dataset = settings.load_dataset()
    machine = corrected(setting_of(settings, run.world.size, say)[0], by)
    workload = workload_of(settings, dataset, run.model, run.comm.device)
    workload = replace(workload, setting=lambda: machine, say=lambda _: None)  # one line is printed below
    plan = replace(settings.strategy, rates="measured").plan(workload, Topology(run.world.size))
    new = better(plan, predicted, comparing, epoch, why)
    if new is None:
        say(f"tag: {why}; planned again: {predicted['label']} stays the best")
        return None
    assert new.predicted is not None
    say(f"tag: {why}; goes on with {new.predicted['label']} from epoch {epoch}")
    return NewPlan(with_strategy(new, settings), dataset)
