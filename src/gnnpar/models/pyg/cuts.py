"""Cut a PyG model's recorded forward into layers, between each two convolutions.

A layer is one convolution and the row-wise steps around it. The cut between two convolutions is the first place where
the tensors read later have the fewest columns. All of these tensors are sent: the input of a residual, inputs of
jumping knowledge, the initial rows of GCNII. Values that depend on no row (a softmax of a parameter) are recomputed in
the layer that reads them.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from gnnpar.folds.block import Rows
from gnnpar.models.pyg.dropout import LAST_TAG
from gnnpar.models.pyg.nested import python_state
from gnnpar.models.pyg.probe_graph import ProbeGraph
from gnnpar.models.pyg.tape import FEATURES, RankValue, Step, Tape, merged, recording

_ROWS = (11, 13)  # numbers of rows in the two recordings


@dataclass(frozen=True, eq=False)
class Segment:
    """The steps of a layer, or of the part before the first or after the last layer.

    reads, gives: names of inputs and outputs. tails: their row shapes. copied: inputs that steps write into. dropped:
    per step, values not read after it. after: tag of the last dropout before the segment.
    """

    steps: tuple[Step, ...]
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    tails: Mapping[str, tuple[int, ...]]
    copied: tuple[str, ...]
    dropped: tuple[tuple[str, ...], ...]
    after: int

    def run(self, net: nn.Module, activations: Rows) -> Rows:
        """Run the steps. Shapes: activations [N, columns] for each of `reads` -> [N, columns] for each of `gives`."""
        first = activations[0]
        own = {RankValue.ROWS: len(first), RankValue.DTYPE: first.dtype, RankValue.DEVICE: first.device}
        values = {name: t.view(len(t), *self.tails[name]) for name, t in zip(self.reads, activations, strict=True)}
        values |= {name: values[name].clone() for name in self.copied}
        for step, dropped in zip(self.steps, self.dropped, strict=True):
            step.run(net, values, own)
            for name in dropped:
                values.pop(name, None)
        return tuple(values[name].reshape(len(first), self.columns(name)) for name in self.gives)

    def columns(self, name: str) -> int:
        return math.prod(self.tails[name])


Program = tuple[Segment, ...]
"""The part before the first layer, the layers, the part after the last."""


@dataclass(frozen=True, eq=False)
class Cuts:
    """A model cut into layers. programs: by (training, weighted). widths: of the activations before each layer in
    training. titles: the modules that made them. layer_of: layer of each parameter read in a layer."""

    programs: Mapping[tuple[bool, bool], Program]
    widths: tuple[tuple[int, ...], ...]
    titles: tuple[tuple[str, ...], ...]
    layer_of: Mapping[str, int]

    def __deepcopy__(self, memo: object) -> Cuts:
        return self


def cut(model: nn.Module, convs: Sequence[str], in_dim: int, *, weighted: Iterable[bool]) -> Cuts:
    """Cut a model with the user's module as submodule `net`. ValueError if it cannot run layer by layer. convs: names
    of the convolutions in `net`, in order of execution."""
    programs: dict[tuple[bool, bool], Program] = {}
    titles: tuple[tuple[str, ...], ...] = ()
    dtype = next(model.parameters(), torch.zeros(0)).dtype
    other = torch.float32 if dtype == torch.float64 else torch.float64
    twins = [copy.deepcopy(model).to(each) for each in (dtype, other)]
    nets = [twin.get_submodule("net") for twin in twins]
    for weights in weighted:
        for training in (False, True):
            kept = python_state(nets[0])
            recordings = [
                recording(twin, net, *example(twin, rows, in_dim, training, weights))
                for twin, net, rows in zip(twins, nets, _ROWS, strict=True)
            ]
            if changed := [name for name, value in python_state(nets[0]).items() if kept.get(name) != value]:
                raise ValueError(f"its forward changes {changed[0]}, which a recording would leave as it is")
            tape = merged(*recordings)
            programs[training, weights] = segments = _segments(tape, convs)
            makers = {name: step.title for step in reversed(tape.steps) for name in step.results} | {FEATURES: FEATURES}
            titles = tuple(tuple(makers[name] for name in segment.reads) for segment in segments[1:-1])
    widths = [tuple(tuple(map(layer.columns, layer.reads)) for layer in program[1:-1]) for program in programs.values()]
    if len({each[1:] for each in widths}) > 1:
        raise ValueError("its forward keeps other rows between convolutions in training than in evaluation")
    net = model.get_submodule("net")
    return Cuts(programs, widths[-1], titles, _layers_of_parameters(programs.values(), net))


def example(model: nn.Module, rows: int, in_dim: int, training: bool, weighted: bool) -> tuple[ProbeGraph, Tensor]:
    """Return a graph of `rows` nodes, and features [rows, in_dim]."""
    like = next(model.parameters(), torch.zeros(0))
    x = torch.randn(rows, in_dim, generator=torch.Generator().manual_seed(rows)).to(like)
    return ProbeGraph(x, torch.ones(rows).to(like) if weighted else None, training=training), x


def _layers_of_parameters(programs: Iterable[Program], net: nn.Module) -> dict[str, int]:
    """Return the layer of each parameter. ValueError if two layers, possibly on two ranks, read the same one."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    found: dict[str, int] = {}
    for program in programs:
        for i, segment in enumerate(program):
            layer = min(max(i - 1, 0), len(program) - 3)
            for name in (names[id(each)] for step in segment.steps for each in step.parameters(net)):
                if found.setdefault(name, layer) != layer:
                    raise ValueError(f"{name} is read in two layers, {found[name]} and {layer}")
    return found


class _Flow:
    """Values that depend on rows, with their lifetimes. A cut at c lies before step c."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.made, self.last = {FEATURES: -1}, {FEATURES: -1}
        self.of_rows = {FEATURES}
        for i, step in enumerate(tape.steps):
            read = step.values
            self.last.update(dict.fromkeys(read, i))
            for name in step.results:
                self.made.setdefault(name, i)
            if not self.of_rows.isdisjoint(read):
                self.of_rows.update(step.results, step.written)
        if tape.out not in self.of_rows:
            raise ValueError("its modules and torch's functions do not compute its output from the features")
        self.last[tape.out] = len(tape.steps)

    def alive(self, at: int) -> tuple[str, ...]:
        """Return the values alive across a cut, in order of creation."""
        return tuple(
            name for name, made in self.made.items() if name in self.of_rows and made < at <= self.last.get(name, -1)
        )

    def columns(self, at: int) -> float:
        """Return the columns of the values alive across a cut; infinity if one does not have one row per node."""
        return sum(math.prod(self.tape.tails.get(name, (math.inf,))) for name in self.alive(at))

    def narrowest_cut(self, first: int, second: int, names: str) -> int:
        """Return the cut with the fewest columns after step `first` and before step `second`."""
        best = min(range(first + 1, second + 1), key=self.columns)
        if math.isinf(self.columns(best)):
            kept = next(name for name in self.alive(best) if name not in self.tape.tails)
            made = self.tape.steps[self.made[kept]].title
            raise ValueError(f"the output of {made} is read {names}, and does not have one row per node")
        return best


def _segments(tape: Tape, convs: Sequence[str]) -> Program:
    flow, end, wanted = _Flow(tape), len(tape.steps), set(convs)
    called = [(i, step.called) for i, step in enumerate(tape.steps) if step.called in wanted]
    times = Counter(name for _, name in called)
    if twice := [name for name in convs if times[name] > 1]:
        raise ValueError(f"its forward calls {twice[0]} more than once")
    if inside := [name for name in convs if not times[name]]:
        raise ValueError(f"{inside[0]} runs inside of another convolution")
    places = [i for i, _ in called]
    inner = [flow.narrowest_cut(first, second, f"between {a} and {b}") for (first, a), (second, b) in pairwise(called)]
    begin = next(at for at in range(places[0], -1, -1) if math.isfinite(flow.columns(at)))
    behind = next(at for at in range(places[-1] + 1, end + 1) if math.isfinite(flow.columns(at)))
    cuts = [0, begin, *inner, behind, end]
    return tuple(_segment(flow, *ends) for ends in pairwise(cuts))


def _segment(flow: _Flow, first: int, last: int) -> Segment:
    tape, reads = flow.tape, flow.alive(first)
    gives = (tape.out,) if last == len(tape.steps) else flow.alive(last)
    chosen: list[Step] = []
    needed = set[str]()
    for i in range(last - 1, -1, -1):  # backwards: compute values that depend on no row where they are read
        step = tape.steps[i]
        of_rows = not flow.of_rows.isdisjoint((*step.values, *step.results))
        if (of_rows and i >= first) or (not of_rows and not needed.isdisjoint(step.results)):
            chosen.append(step)
            needed.update(name for name in step.values if name not in flow.of_rows)
    steps = tuple(reversed(chosen))
    final = {name: i for i, step in enumerate(steps) for name in (*step.results, *step.values)}
    return Segment(
        steps,
        reads,
        gives,
        {name: tape.tails[name] for name in (*reads, *gives)},
        tuple(name for name in reads if any(name in step.written for step in steps)),
        tuple(tuple(name for name, at in final.items() if at == i and name not in gives) for i in range(len(steps))),
        tape.steps[first - 1].last_tag if first else LAST_TAG,
    )
