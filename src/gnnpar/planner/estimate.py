"""Estimate a run of `gnnpar train` without running it: its strategy's price, and whether it fits the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gnnpar.files import JsonDict
from gnnpar.parallel.declared import Priced
from gnnpar.parallel.needs import refuse_edge_data
from gnnpar.parallel.strategy import Strategy
from gnnpar.planner.machines import setting_of, threads_of
from gnnpar.planner.planned import workload_of
from gnnpar.planner.planner import Request, lacking
from gnnpar.precision import TYPES
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Bound, Price
from gnnpar.pricing.quantity import bytes_text, seconds_text
from gnnpar.pricing.topology import Machines
from gnnpar.settings import Settings
from gnnpar.training.checks import check_strategy


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of one run. refused: why it cannot run. lacks: missing memory, empty if none or unknown."""

    name: str
    exactness: tuple[str, ...] = ()
    ranks: int = 0
    price: Price = Price()
    refused: str = ""
    lacks: str = ""

    @property
    def known(self) -> bool:
        """Whether time and memory are predicted."""
        return bool(self.price.phases)

    @property
    def fits(self) -> str:
        """'yes', or why the run does not fit; empty if unknown."""
        return (self.lacks or "yes") if self.known else ""

    def as_json(self) -> JsonDict:
        price = self.price
        return {
            "name": self.name,
            "exactness": list(self.exactness),
            "ranks": self.ranks,
            "refused": self.refused,
            "unpriced": price.unpriced,
            "notes": list(price.notes),
            "bytes_per_epoch": price.traffic and price.traffic.as_json(),
            "predicted": price.as_predicted() if self.known else None,
            "fits": not self.lacks if self.known else None,
        }


@dataclass
class Estimator:
    """Estimator of runs that differ only in strategy and codec. ranks=None: one per device of the topology."""

    settings: Settings
    ranks: int | None = None
    say: Callable[[str], None] = lambda _: None
    measuring: bool = True  # measure this machine if it is not cached
    _requests: dict[int, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        topology = self.settings.topology
        if self.ranks is None:
            self.ranks = topology.fabric.size if isinstance(topology, Machines) else self.settings.world_size
        self.count = self.ranks
        if isinstance(topology, Machines):
            topology.fabric.first(self.count)  # raises if there are too few
        self.workload = workload_of(self.settings, self.say)

    def estimate(self, settings: Settings, name: str) -> Estimate:
        """Estimate one run from its settings."""
        strategy: Strategy = settings.strategy
        ranks = min(self.count, strategy.capabilities.max_ranks or self.count)
        estimate = Estimate(name=name, exactness=tuple(sorted(strategy.exactness)), ranks=ranks)
        try:
            check_strategy(settings, ranks)
            data = self.workload.dataset
            refuse_edge_data(strategy, settings.model, data.edges.kinds, data.in_weight, data.name, settings.names)
            price = self._price(strategy, settings, ranks)
        except ValueError as error:
            return replace(estimate, refused=" ".join(str(error).split()))
        return replace(estimate, price=price, lacks=lacking(price.memory, self.request(ranks)))

    def _price(self, strategy: Strategy, settings: Settings, ranks: int) -> Price:
        """Return the price: time in fp32, memory in the precision of the settings."""
        if not isinstance(strategy, Priced):
            return Price(unpriced=f"{type(strategy).__name__} has no cost(problem, machine)")
        number = TYPES[settings.precision].rows.itemsize
        request = self.request(ranks)
        assert request.problem is not None
        problem = replace(request.problem, number=number, threads=threads_of(settings, ranks))
        price = strategy.cost(problem, request.machine)
        if number == 4 or not price.phases:
            return price
        memory = tuple(m.with_numbers_of(number) for m in price.memory)
        return replace(price, memory=memory, notes=(*price.notes, "time is that of fp32"))

    def request(self, ranks: int) -> Request:
        """Return the request for `ranks` ranks."""
        if ranks not in self._requests:
            machine, count = setting_of(self.settings, ranks, self.say, measuring=self.measuring)
            self._requests[ranks] = Request.of(self.workload, machine, count, seed=self.settings.seed)
        return self._requests[ranks]


COLUMNS = ("strategy", "ranks", "exactness", "predicted epoch", "sent/epoch", "peak memory", "fits")
_BOUNDS: dict[Bound, str] = {"exact": "", "mean": "~ ", "most": "<= "}


def row_of(e: Estimate) -> tuple[str, ...]:
    """Return a row of the table."""
    quality = ", ".join(e.exactness)
    if e.refused:
        return (e.name, str(e.ranks), quality, "-", "-", "-", "does not run")
    seconds = seconds_text(e.price.seconds) if e.known else "-"
    peak = bytes_text(e.price.peak_bytes) if e.known else "-"
    fits = f"no: {e.lacks}" if e.lacks else e.fits or "not known"
    return (e.name, str(e.ranks), quality, seconds, sent(e), peak, fits)


def sent(e: Estimate) -> str:
    traffic = e.price.traffic
    return "-" if traffic is None else _BOUNDS[traffic.bound] + bytes_text(traffic.total)


def details(e: Estimate) -> list[str]:
    """Return lines on time, bytes and memory of one run."""
    lines, price = [], e.price
    if e.known:
        phases = ", ".join(f"{k} {seconds_text(v)}" for k, v in price.phases.items() if v)
        fullest = max(price.memory, key=lambda m: m.total)
        memory = ", ".join(f"{k} {bytes_text(v)}" for k, v in vars(fullest).items() if v)
        lines += [f"priced as {price.label}", f"epoch: {phases}", f"memory of the fullest rank: {memory}"]
    if price.traffic is not None and price.traffic.total:
        by_phase = {k: round(v) for k, v in price.traffic.by_phase.items() if round(v)}
        lines.append("bytes an epoch: " + ", ".join(f"{k} {v}" for k, v in by_phase.items()))
    return lines


def why(estimates: list[Estimate], machine: Machine, *, on_gpu: bool) -> list[str]:
    """Return the sentences below the table."""
    rates = machine.rates[0]
    notes = [(e.name, note) for e in estimates for note in (e.refused, e.price.unpriced, *e.price.notes) if note]
    lines = [f"{name}: {note}" for name, note in notes]
    if on_gpu:
        lines.append("times are those of this machine's CPU: a topology with devices (topology=) says what GPUs do")
    return [
        *lines,
        f"times and memory are predicted from {rates.described}, nothing was run{rates.doubt}",
        "bytes are formulas of the partition: where no sign stands before them, exact for every epoch after the first",
    ]
