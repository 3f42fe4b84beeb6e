"""What a run would take, without running it: time and memory by the planner's model, bytes by their formulas.

The run is the one that `gnnpar train` makes of the same settings: its grid, chunks, codec and overlap become a
candidate (`runner.shapes`), which is priced as `gnnpar plan` prices its own. Of `minibatch` some batches are drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gnnpar.planner.candidate import QUALITIES
from gnnpar.planner.configured import Job, Shape, shape_of
from gnnpar.planner.machines import setting_of
from gnnpar.planner.memory import Memory
from gnnpar.planner.planned import Inputs
from gnnpar.planner.planner import Priced, Request, lacking, price
from gnnpar.planner.sampled import SampledEpoch
from gnnpar.planner.traffic import Bound, Traffic
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.quantity import bytes_text, seconds_text
from gnnpar.pricing.topology import Machines
from gnnpar.pricing.work import Work
from gnnpar.settings import Settings
from gnnpar.training.result.facts import check_strategy
from gnnpar.training.result.trained import DTYPES


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """`refused`: why there is no such run; `unpriced`: why the model says no time and memory of it."""

    name: str
    exactness: tuple[str, ...] = ()
    ranks: int = 0
    traffic: Traffic | None = None
    priced: Priced | SampledEpoch | None = None
    refused: str = ""
    unpriced: str = ""
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> str:
        """'yes', or why not; empty where nothing is known of it."""
        return "" if self.priced is None else self.priced.refused or "yes"

    def as_json(self) -> dict[str, Any]:
        priced = self.priced
        return {
            "name": self.name,
            "exactness": list(self.exactness),
            "ranks": self.ranks,
            "refused": self.refused,
            "unpriced": self.unpriced,
            "notes": list(self.notes),
            "bytes_per_epoch": self.traffic and self.traffic.as_json(),
            "predicted": priced and priced.as_predicted(),
            "fits": None if priced is None else not priced.refused,
        }


@dataclass
class Estimator:
    """Of runs that differ in strategy and codec alone. `ranks` None: as many as the topology has devices."""

    settings: Settings
    ranks: int | None = None
    say: Callable[[str], None] = lambda _: None
    _requests: dict[int, Request] = field(default_factory=dict)
    _works: dict[tuple[int, int], Work] = field(default_factory=dict)

    def __post_init__(self) -> None:
        topology = self.settings.topology
        if self.ranks is None:
            self.ranks = topology.fabric.size if isinstance(topology, Machines) else self.settings.world_size
        self.count = self.ranks
        if isinstance(topology, Machines):
            topology.fabric.first(self.count)  # are there so many?
        self.inputs = Inputs.of(self.settings, self.say)

    def setting(self, ranks: int) -> Machine:
        return self._request(ranks).setting

    def estimate(self, settings: Settings, name: str) -> Estimate:
        """Of one run, by its settings."""
        strategy: Any = settings.strategy
        ranks = min(self.count, strategy.capabilities.max_ranks or self.count)
        known = Estimate(name=name, exactness=tuple(sorted(strategy.exactness)), ranks=ranks)
        number = DTYPES[settings.precision].itemsize
        try:
            check_strategy(settings, ranks)
            shape = shape_of(
                Job(
                    settings,
                    self.inputs,
                    ranks,
                    number,
                    lambda parts: self._work(ranks, parts),
                    lambda: self.setting(ranks),
                )
            )
        except ValueError as error:
            return replace(known, refused=" ".join(str(error).split()))
        priced = self._priced(shape, ranks, number)
        return replace(
            known,
            traffic=shape.traffic,
            priced=priced,
            unpriced=shape.unpriced,
            notes=shape.notes + (("time is that of fp32",) if number != 4 and priced else ()),
        )

    def _priced(self, shape: Shape, ranks: int, number: int) -> Priced | SampledEpoch | None:
        """Time of numbers of four bytes, memory of these, and whether it fits: all qualities are allowed here."""
        found: Priced | SampledEpoch | None = shape.sampled
        request = self._request(ranks)
        if shape.candidate is not None and shape.work is not None:
            found = price(shape.candidate, shape.work, request)
        if found is None:
            return None
        memory = found.memory if number == 4 else tuple(_wider(m, number / 4) for m in found.memory)
        return replace(found, memory=memory, refused=lacking(memory, request))

    def _request(self, ranks: int) -> Request:
        if ranks not in self._requests:
            setting, count = setting_of(self.settings, ranks, self.say)
            request = self.inputs.request(setting, count, self.settings)
            self._requests[ranks] = replace(request, allowed=frozenset(QUALITIES))
        return self._requests[ranks]

    def _work(self, ranks: int, parts: int) -> Work:
        if (ranks, parts) not in self._works:
            request = self._request(ranks)
            live = replace(request, kept="no")
            self._works[ranks, parts] = live.work(request.partition(parts), request.setting.rates)
        return self._works[ranks, parts]


def _wider(memory: Memory, factor: float) -> Memory:
    """With numbers of so many times four bytes; indices stay."""
    return Memory(**{k: v if k == "structure" else factor * v for k, v in vars(memory).items()})


COLUMNS = ("strategy", "ranks", "exactness", "predicted epoch", "sent/epoch", "peak memory", "fits")
_BOUNDS: dict[Bound, str] = {"exact": "", "mean": "~ ", "most": "<= "}


def row_of(e: Estimate) -> tuple[str, ...]:
    """A line of the table."""
    quality = ", ".join(e.exactness)
    if e.refused:
        return (e.name, str(e.ranks), quality, "-", "-", "-", "does not run")
    seconds = seconds_text(e.priced.phases.seconds) if e.priced else "-"
    peak = bytes_text(e.priced.peak_bytes) if e.priced else "-"
    said = e.fits if e.fits in ("yes", "") else f"no: {e.fits}"
    return (e.name, str(e.ranks), quality, seconds, sent(e), peak, said or "not known")


def sent(e: Estimate) -> str:
    return "-" if e.traffic is None else _BOUNDS[e.traffic.bound] + bytes_text(e.traffic.total)


def details(e: Estimate) -> list[str]:
    """Where time, bytes and memory of one run go."""
    lines = []
    if e.priced is not None:
        phases = ", ".join(f"{k} {seconds_text(v)}" for k, v in vars(e.priced.phases).items() if v)
        fullest = max(e.priced.memory, key=lambda m: m.total)
        memory = ", ".join(f"{k} {bytes_text(v)}" for k, v in vars(fullest).items() if v)
        lines += [f"priced as {e.priced.label}", f"epoch: {phases}", f"memory of the fullest rank: {memory}"]
    if e.traffic is not None and e.traffic.total:
        figures = {k: v for k, v in e.traffic.as_json().items() if isinstance(v, int) and v and k != "total"}
        lines.append("bytes an epoch: " + ", ".join(f"{k} {v}" for k, v in figures.items()))
    return lines


def why(estimates: list[Estimate], setting: Machine, *, on_gpu: bool) -> list[str]:
    """The sentences below the table."""
    rates = setting.rates[0]
    worst = max(rates.residuals.values(), default=None)
    doubt = f"; the fit of kernels is off by {worst:.0%} at worst (median of a kind)" if worst is not None else ""
    lines = [f"{e.name}: {said}" for e in estimates for said in (e.refused, e.unpriced, *e.notes) if said]
    if on_gpu:
        lines.append("times are those of this machine's CPU: a topology with devices (topology=) says what GPUs do")
    return [
        *lines,
        f"times and memory are predicted from {rates.source} rates, nothing was run{doubt}",
        "bytes are formulas of the partition: where no sign stands before them, exact for every epoch after the first",
    ]
