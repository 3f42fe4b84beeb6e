"""Build a ModelIR from recorded operations: op groups with costs, parameters, saved and live tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import nn

from gnnpar.pricing.ir import Fold, Gemm, Group, ModelIR, Phase

_GEMMS = {"mm", "addmm", "matmul", "linear", "bmm"}
_VIEWS = {"view", "_unsafe_view", "reshape", "flatten", "unsqueeze", "squeeze", "expand", "as_strided"}
_VIEWS |= {"t", "permute", "transpose", "select", "slice", "split_with_sizes", "unbind"}
_VIEWS |= {"detach", "alias", "lift_fresh_copy", "clone", "_to_copy"}
_SAVES_OUTPUT = {"relu", "elu", "sigmoid", "tanh", "exp", "softmax", "_softmax", "leaky_relu"}
_SAVES_INPUT = {"native_layer_norm", "layer_norm", "gelu", "silu", "log"}


class Seen(NamedTuple):
    """A tensor: its name in the stream, and its shape. 'x' are the features, 'p:...' parameters, 'static' degrees."""

    key: str
    shape: tuple[int, ...]


class Event(NamedTuple):
    """An operation. layer: of the module that ran it, None outside layers. fold: for an aggregation, without gradient
    flags."""

    name: str
    inputs: tuple[Seen, ...]
    outputs: tuple[Seen, ...]
    layer: int | None
    fold: Fold | None = None


@dataclass
class _Draft:
    """An op group under construction. saved: tensor -> elements per row."""

    gemms: list[Gemm] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)
    kernels: int = 0
    numbers: int = 0
    dropout: int = 0
    moments: int = 0
    totals: list[int] = field(default_factory=list)
    saved: dict[str, int] = field(default_factory=dict)
    params: set[str] = field(default_factory=set)


@dataclass
class _State:
    rows: int
    edges: Mapping[int, float]
    learned: set[str] = field(default_factory=set)
    base: dict[str, str] = field(default_factory=dict)  # view -> base tensor
    widths: dict[str, int] = field(default_factory=dict)  # row tensors -> elements per row
    static: set[str] = field(default_factory=lambda: {"static"})
    saved: set[str] = field(default_factory=set)  # saved for backward by some group already

    def of(self, seen: Seen) -> str:
        return self.base.get(seen.key, seen.key)

    def width(self, seen: Seen) -> int | None:
        """Return elements per row, or None for other tensors. Tensors of edges count by edges per row. Batched products
        have rows in their second or third dimension."""
        count = next((size for size in seen.shape if size in (self.rows, *self.edges)), None)
        return None if count is None else round(math.prod(seen.shape) / count * self.edges.get(count, 1.0))

    def save(self, draft: _Draft, key: str, width: int) -> None:
        """Save a tensor once, in the first group that reads it. Features are stored in any case."""
        if key != "x" and key not in self.saved:
            self.saved.add(key)
            draft.saved[key] = width

    def is_learned(self, seen: Seen) -> bool:
        return self.of(seen).startswith("p:") or self.of(seen) in self.learned


def assemble(
    events: Sequence[Event],
    model: nn.Module,
    *,
    in_dim: int,
    out: str,
    rows: int,
    edges: Mapping[int, float],
    learned: int = 0,
) -> ModelIR:
    """Build the IR in one pass over the events. rows: first dimension of row tensors. edges: first dimension of edge
    tensors -> edges per row. learned: number of feature columns that are trained."""
    placed = _placed(events)
    num_layers = max((layer for _, layer, _ in placed), default=0) + 1
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    state = _State(rows, edges, {"x"} if learned else set(), widths={"x": in_dim})
    drafts: dict[tuple[int, Phase], _Draft] = {}
    made, used = {"x": -1}, {}
    for event, layer, phase in placed:
        draft = drafts.setdefault((layer, phase), _Draft())
        _account(event, draft, state)
        for seen in event.inputs:
            used[state.of(seen)] = layer
        for seen in event.outputs:
            made.setdefault(state.of(seen), layer)
    last = state.base.get(out, out)
    cuts = tuple(_live(made, used, state, i) for i in range(num_layers - 1))
    order = sorted(drafts, key=lambda key: (key[0], _ORDER.index(key[1])))
    assigned: set[str] = set()
    groups = []
    for key in order:
        draft = drafts[key]
        params = sum(sizes.get(name, 0) for name in draft.params - assigned)
        assigned |= draft.params
        groups.append(
            Group(
                *key,
                tuple(sorted(draft.gemms)),
                tuple(draft.folds),
                (draft.kernels, draft.numbers),
                draft.dropout,
                sum(draft.saved.values()),
                params,
                draft.moments,
                tuple(draft.totals),
            )
        )
    kept = tuple(g for g in groups if g.kernels or g.dropout)
    return ModelIR(num_layers, in_dim, state.widths.get(last, 0), kept, cuts, learned)


_ORDER: tuple[Phase, ...] = ("begin", "transform", "aggregate", "post", "end")


def _placed(events: Sequence[Event]) -> list[tuple[Event, int, Phase]]:
    """Return (event, layer, phase): begin before the first layer, end after the last, else by the layer's folds."""
    layers = [e.layer for e in events if e.layer is not None]
    current = layers[0] if layers else 0
    folds = {e.layer: i for i, e in enumerate(events) if e.name == "fold"}  # layer -> its last fold
    positions = [i for i, e in enumerate(events) if e.layer is not None]
    start, stop = (positions[0], positions[-1]) if positions else (0, -1)
    placed: list[tuple[Event, int, Phase]] = []
    for i, event in enumerate(events):
        current = current if event.layer is None else event.layer
        if event.layer is None:
            placed.append((event, current, "begin" if i < start else "end" if i > stop else "post"))
        elif event.name == "fold":
            placed.append((event, event.layer, "aggregate"))
        else:
            placed.append((event, event.layer, "transform" if i < folds.get(event.layer, -1) else "post"))
    return placed


def _account(event: Event, draft: _Draft, state: _State) -> None:
    learned = any(state.is_learned(seen) for seen in event.inputs)
    if event.name in _VIEWS:
        if event.inputs:
            for seen in event.outputs:
                state.base[seen.key] = state.of(event.inputs[0])
        return
    draft.params |= {key[2:] for seen in event.inputs if (key := state.of(seen)).startswith("p:")}
    widths = [(seen, width) for seen in event.outputs[:1] if (width := state.width(seen)) is not None]
    for seen in event.outputs:
        if learned:
            state.learned.add(seen.key)
    if event.name == "moments":
        _account_moments(event, draft, state)
    if event.name == "total":
        draft.totals.append(math.prod(event.outputs[0].shape))
    rows = [(seen, width) for seen in event.inputs if (width := state.width(seen)) is not None]
    batches = event.outputs[0].shape[0] if event.name == "bmm" else 1
    if not widths:
        if event.name in _GEMMS and len(rows) == 2:  # a product A^T B; other operations read weights alone
            trained = any(state.is_learned(seen) for seen, _ in rows)
            draft.gemms.append(Gemm(rows[0][1], rows[1][1] // batches, trained))
            for seen, width in rows:
                state.save(draft, state.of(seen), width)
        return
    out, out_width = widths[0]
    if state.rows in out.shape:
        state.widths[out.key] = out_width
    if rows and all(state.of(seen) in state.static for seen, _ in rows) and not learned:
        state.static.add(out.key)  # reads degrees only: constant over epochs
    if event.name == "fold":
        _account_fold(event, draft, state, out_width)
    elif event.name == "dropout":
        draft.dropout += out_width
    elif event.name in _GEMMS and rows:
        given = event.inputs[event.name == "addmm"]  # the row matrix of a product, unless it is a weight
        seen, width = next((each for each in rows if each[0] == given), rows[0])
        draft.gemms.append(Gemm(width, out_width // batches, state.is_learned(seen)))
        state.save(draft, state.of(seen), width)
    else:
        draft.kernels += 1
        draft.numbers += out_width + sum(width for _, width in rows)
        _save(event, draft, state, rows, (out, out_width))


def _save(event: Event, draft: _Draft, state: _State, rows: list[tuple[Seen, int]], out: tuple[Seen, int]) -> None:
    """Record tensors that autograd saves: outputs of activations, inputs of norms, both factors of trained products."""
    if not any(state.is_learned(seen) for seen in event.inputs):
        return
    if event.name in _SAVES_OUTPUT:
        state.save(draft, out[0].key, out[1])
    elif event.name in _SAVES_INPUT:
        for seen, width in rows:
            state.save(draft, state.of(seen), width)
    elif event.name == "mul":
        learned = [state.is_learned(seen) for seen in event.inputs]
        for i, seen in enumerate(event.inputs):
            if any(learned[:i] + learned[i + 1 :]) and (width := state.width(seen)) is not None:
                state.save(draft, state.of(seen), width)


def _account_fold(event: Event, draft: _Draft, state: _State, out_width: int) -> None:
    fold = event.fold
    assert fold is not None
    learned = any(map(state.is_learned, event.inputs[: len(fold.src)]))
    split = (*fold.split, int(any(map(state.is_learned, event.inputs)))) if fold.split else ()
    draft.folds.append(replace(fold, out=out_width, learned=learned, split=split))
    if fold.needs_src:
        for seen, width in zip(event.inputs, (*fold.src, *fold.dst), strict=False):
            state.save(draft, state.of(seen), width)
        beside = out_width + 2 * sum(fold.dst) if fold.pushed else 0  # sums over one branch of scores, and log-sums
        state.save(draft, event.outputs[0].key, out_width + beside)


def _account_moments(event: Event, draft: _Draft, state: _State) -> None:
    """Account rows read for the sums and for the squares, and saved for the gradient."""
    (seen,) = event.inputs
    width = state.width(seen) or 0
    draft.kernels += 2
    draft.numbers += 2 * width
    draft.moments += width
    if state.is_learned(seen):
        state.save(draft, state.of(seen), width)


def _live(made: dict[str, int], used: dict[str, int], state: _State, layer: int) -> tuple[int, ...]:
    """Return widths of row tensors made up to this layer and read after it, widest first."""
    crossing = [
        key
        for key, at in made.items()
        if at <= layer < used.get(key, -1) and key in state.widths and key not in state.static
    ]
    return tuple(sorted((state.widths[key] for key in crossing), reverse=True))
