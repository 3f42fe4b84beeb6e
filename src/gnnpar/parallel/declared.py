"""Price a strategy by the `Step` that it declares: as it is configured, and as a planner may configure it.

`gnnpar plan` and `gnnpar estimate` price strategies that implement `Priced`; a planner chooses from those with
`Enumerated`. Both are optional: a strategy without `cost` is listed as unpriced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

from gnnpar.codecs.codec import BFloat16, Identity
from gnnpar.files import JsonDict
from gnnpar.models.gnn import GNN
from gnnpar.parallel.row_bytes import SENDS_NOTHING, Halo, RowBytes
from gnnpar.parallel.strategy import CodedStrategy, FirstLayer, FlatStrategy, Workload
from gnnpar.placement import Quality
from gnnpar.pricing.candidate import Candidate, Knobs, Scope, Values, codec_fields, quality_of
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Phases, Price, Traffic, summed_nbytes
from gnnpar.pricing.steps import Step
from gnnpar.pricing.tasks import SimulatedTask
from gnnpar.pricing.work import Held, Work


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A run to price: the graph and the model on `ranks` ranks.

    `number`: bytes per element of a row, `summed`: of elements that ranks add up. `kept`: rows that layer 0 keeps over
    epochs if first_layer=cached, else 'no'. `threads`: per rank, for measurements on this machine. `work_of`: number of
    parts -> the work of a partition, nothing kept.
    """

    workload: Workload
    model: GNN
    ir: ModelIR
    ranks: int
    work_of: Callable[[int], Work]
    number: int = 4
    first_layer: FirstLayer = "live"
    kept: Held = "no"
    seed: int = 0
    threads: int = 1

    @property
    def summed(self) -> int:
        return summed_nbytes(self.number)

    @property
    def params(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def work(self, candidate: Candidate) -> Work:
        """Return the work of a candidate's parts, with the rows that its layer 0 keeps."""
        return replace(self.work_of(candidate.parts), held=candidate.keeps(self.kept))


@runtime_checkable
class Priced(Protocol):
    """A strategy that prices itself as it is configured."""

    def cost(self, problem: Problem, machine: Machine) -> Price:
        """Return time, bytes and memory of an epoch on the ranks of `machine`. Raises ValueError for a refused run."""
        ...


@runtime_checkable
class Enumerated(Priced, Protocol):
    """A strategy with configurations that a planner may choose from."""

    def candidates(self, scope: Scope, ranks: int) -> Iterable[Candidate]:
        """Return configurations on exactly `ranks` ranks, a typical one of each engine first, which calibration
        measures."""
        ...


def priced(
    candidate: Candidate, problem: Problem, machine: Machine, traffic: Traffic | None, notes: tuple[str, ...] = ()
) -> Price:
    """Return the candidate's price, with the traffic and notes of a configured strategy."""
    return replace(candidate.price(problem.work(candidate), machine), traffic=traffic, notes=notes)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """How a strategy is priced. `quantized`: its family below 16 bits. `words`: of its options, after the family in the
    label. `options`: fields that a plan sets, with their values. `coded`: the codec changes the predicted time. `halo`:
    strategy.halo; `linear`: a cover splits linear folds alone. `sent`: corrects the bytes of the step. `unpriced`:
    the reason, if there is no prediction."""

    family: str
    step: Step
    quantized: str = ""
    words: Sequence[str] = ()
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    notes: tuple[str, ...] = ()
    coded: bool = True
    halo: Halo = "rows"
    linear: bool = False
    sent: Callable[[Traffic, Work, RowBytes, Problem], Traffic] | None = None
    unpriced: str = ""


@dataclass(frozen=True, kw_only=True)
class DeclaredCandidate(Candidate):
    """A strategy with all layers on every rank and one part a rank. `bits`: of a number on the wire. `rows`: of the
    codec that a cover is made for, by default of these bits."""

    family: str = ""
    strategy: Declares
    bits: int = 32
    rows: RowBytes | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        declared = self.declared
        object.__setattr__(self, "family", (self.bits < 16 and declared.quantized) or declared.family)

    @cached_property
    def declared(self) -> Declaration:
        return self.strategy.declared()

    @property
    def label(self) -> str:
        declared = self.declared
        step, words = declared.step, [self.family, *declared.words]
        words += ["no overlap"] * (step.overlap == "none")
        words += [f"{self.bits} bit"] if self.bits != 32 else []
        ahead = step.kind in ("parts", "grid") and step.prefetch != 1
        words += [f"{step.prefetch} parts ahead"] if ahead else []
        return ", ".join(words + ["first layer held"] * self.held + ["cover"] * (declared.halo == "cover"))

    @property
    def quality(self) -> frozenset[Quality]:
        return quality_of(self.bits, stale=self.declared.step.stale)

    @property
    def engine(self) -> str:
        kind = self.declared.step.kind
        if kind == "halo":
            return "rounded" if self.bits == 16 else "adaqp" if self.bits < 16 else "graph_parallel"
        return "cagnet" if kind == "parts" else self.family

    @property
    def fields(self) -> JsonDict:
        codec = {"codec": codec_fields(self.bits)} if isinstance(self.strategy, CodedStrategy) else {}
        return codec | dict(self.declared.options)

    def as_json(self) -> JsonDict:
        shown = {name: vars(self)[name] for name in ("family", "parts", "stages", "held", "bits")}
        return shown | dict(self.declared.options)

    @property
    def may_hold(self) -> bool:
        return self.parts > 1 and self.declared.step.kind != "rounds"

    @property
    def ordered(self) -> bool:
        """Return True except for exchanges between all pairs at once."""
        return self.declared.step.kind in ("local", "rounds")

    @property
    def whole_halo(self) -> bool:
        return self.declared.step.kind not in ("parts", "grid", "rounds")

    def keeps(self, held: Held) -> Held:
        return held if held == "result" or self.declared.step.kind in ("local", "halo") else "no"

    def knobs(self, ir: ModelIR) -> Knobs:
        return self.strategy.knobs(ir)

    def with_knobs(self, knobs: Values) -> DeclaredCandidate:
        options = {name: value for name, value in knobs.items() if name != "bits"}
        return replace(self, bits=knobs.get("bits", self.bits), strategy=replace(self.strategy, **options))

    def _covered_work(self, work: Work) -> Work:
        """Return the work under the declared cover."""
        codec = BFloat16() if self.bits == 16 else Identity()
        rows = self.rows or RowBytes(codec, halo=self.declared.halo, linear=self.declared.linear)
        return rows.covered(work)

    def phases(self, work: Work, machine: Machine) -> Phases:
        return self.declared.step.epoch(self._covered_work(work), machine, self.engine, self.bits)

    def memory(self, work: Work) -> tuple[Memory, ...]:
        return self.declared.step.memory(self._covered_work(work))

    def tasks(self, work: Work, machine: Machine) -> list[SimulatedTask]:
        return self.declared.step.tasks(self._covered_work(work), machine, self.engine, self.bits)


class Declares(FlatStrategy):
    """A strategy that is priced by the step that it declares."""

    def declared(self) -> Declaration:
        """Return the messages and folds of a layer, and the words for them."""
        raise NotImplementedError(f"{type(self).__name__} declares no step")

    def knobs(self, ir: ModelIR) -> Knobs:
        """Return the fields that a search may change, and `bits` on the wire, with their values."""
        return {"bits": (32, 16)}

    def cost(self, problem: Problem, machine: Machine) -> Price:
        """Return the price of the strategy with its codec."""
        declared = self.declared()
        if declared.unpriced:
            return Price(traffic=Traffic(), unpriced=declared.unpriced)
        codec = self.codec if isinstance(self, CodedStrategy) else Identity()
        rows = RowBytes(codec, problem.number, declared.halo, linear=declared.linear)
        if not rows.known:
            return Price(unpriced=rows.unknown)
        live = DeclaredCandidate(strategy=self, parts=problem.ranks, rows=rows)
        live = replace(live, held=live.keeps(problem.kept) != "no")
        work = problem.work(live)
        sent = rows.traffic(declared.step, work, problem.params)
        sent = declared.sent(sent, work, rows, problem) if declared.sent else sent
        if not rows.sends:
            return Price(traffic=sent, unpriced=SENDS_NOTHING)
        bits, of_bits = rows.bits()
        bits = 32 if problem.ranks == 1 else bits  # nothing is sent: the engine runs without a codec
        if declared.coded:
            live = replace(live, bits=bits)
        elif bits != 32:
            of_bits = (f"time is that of rows as they are: the price of {live.family} knows no codec",)
        return priced(live, problem, machine, sent, of_bits + declared.notes)


class Proposes(Declares):
    """A strategy that a planner may choose."""

    def proposals(self, scope: Scope, ranks: int) -> Iterable[Values]:
        """Return values of fields and of `bits` of each candidate: rows as they are, and rounded."""
        return [{}, {"bits": 16}] if ranks > 1 else []

    def candidates(self, scope: Scope, ranks: int) -> Iterable[Candidate]:
        plain = DeclaredCandidate(parts=ranks, strategy=self)
        return [plain.with_knobs(each) for each in self.proposals(scope, ranks)]


def overlapped_folds(overlap: str) -> Literal["inner", "none"]:
    """Return the folds that overlap a halo exchange under strategy.overlap."""
    return "none" if overlap == "none" else "inner"
