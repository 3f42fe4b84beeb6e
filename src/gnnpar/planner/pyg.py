"""Trace a PyG model into a ModelIR: run it once on a small random graph, and record its operations.

The user's code runs on real rows. Folds without a kernel are timed relative to softmax attention on the same edges, so
that the rates of any machine price them. The memory of their gradient is measured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from gnnpar.comm.clock import perf_counter
from gnnpar.comm.world import reason_of
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows, chosen
from gnnpar.folds.edge_data import EdgeData
from gnnpar.folds.generic import edges_at_once
from gnnpar.folds.softmax import Softmax
from gnnpar.graph import Moments, Reduction
from gnnpar.models.pyg.model import PyGNet
from gnnpar.models.pyg.probe_graph import ProbeGraph
from gnnpar.planner.extract import Recorder
from gnnpar.pricing.ir import Fold, ModelIR, Passing, Times
from gnnpar.training.meter import nbytes, peak_allocated_bytes

ROWS, EDGES = 2003, 20011  # primes that no width of a model equals
_KERNELS = frozenset({"Sum", "Max", "Softmax", "SoftmaxV2", "SoftmaxDot"})
_REPEATS, _MORE = 3, 7  # 7 times the edges fill two slices of `Generic`


class Recording(ProbeGraph):
    """A random graph on which folds, dropout, moments and totals are recorded as operations."""

    def __init__(self, recorder: Recorder, model: PyGNet, x: Tensor, *, weighted: bool) -> None:
        draw = torch.Generator().manual_seed(0)
        source, hop = (torch.randint(first, ROWS, (EDGES,), generator=draw) for first in (0, 1))
        destination, order = ((source + hop) % ROWS).sort()  # a hop is never 0: there are no self loops
        types = torch.randint(0, max(1, model.config.edge_types or 1), (EDGES,), generator=draw)
        width = model.config.edge_dim
        attr = torch.rand(EDGES, width, generator=draw, dtype=x.dtype) if width else None
        weight = x.new_ones(ROWS) if weighted else None
        super().__init__(x, weight, attr, ends=(source[order], destination, types), training=True)
        self._recorder, self.num_nodes = recorder, 2 * ROWS  # more than rows: sums over all nodes go through the view

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        self.last_tag = tag
        return x if p == 0 else self._recorder.record_result("dropout", (x,), self._unrecorded(x.clone))

    def moments(self, x: Tensor) -> Moments:
        both = self._unrecorded(lambda: torch.stack(torch.var_mean(x, 0, correction=0)))
        variance, mean = self._recorder.record_result("moments", (x,), both).unbind(0)
        return Moments(mean, variance, ROWS, probe=True)

    def total(self, part: Tensor, how: Reduction = "sum") -> Tensor:
        return self._recorder.record_result("total", (part,), self._unrecorded(part.clone))

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        x, cost = Operands(src, dst, edge, shared), ((1.0, 1.0), (0.0, 0))
        out = self._unrecorded(lambda: super(Recording, self).aggregate(agg, src, dst, edge, shared))
        if type(agg).__name__ not in _KERNELS:
            with self._recorder.paused():
                cost = _measured(agg, self._block, x)
        fold = Fold.of(agg, x, list(out.shape[1:]), *cost)
        return self._recorder.record_result("fold", (*src, *dst, *edge, *shared), out, fold)

    def _unrecorded(self, body: Callable[[], Tensor]) -> Tensor:
        """Return the result of `body` without recording its operations."""
        with self._recorder.paused():
            return body()


def record_pyg(model: PyGNet, in_dim: int, *, degree: float, weighted: bool, learned: int = 0) -> ModelIR:
    """Run a copy of the model once, in training. degree: edges per node of the planned graph. weighted: its edges have
    weights. learned: number of feature columns that are trained. ValueError for a model that cannot be copied or
    traced, with the name of the module."""
    if model.schema is not None:
        raise ValueError("model=pyg reads dictionaries by type, which the planner does not price; choose a strategy")
    try:
        twin = copy.deepcopy(model)
    except Exception as error:  # trace a copy, since forward may change the state of modules
        raise ValueError(
            f"model.target={model.config.target} cannot be copied, which the planner needs: {reason_of(error)}; choose "
            "a strategy"
        ) from error
    layers = {f"net.{name}": layer for layer, name in enumerate(twin.lowerings)}

    def layer_of(path: str) -> int | None:
        return next((layer for name, layer in layers.items() if path == name or path.startswith(f"{name}.")), None)

    parameter = next(iter(twin.parameters()), torch.zeros(0))
    recorder = Recorder(twin, layer_of)
    x = torch.rand(ROWS, in_dim, generator=torch.Generator().manual_seed(0), dtype=parameter.dtype)
    graph = Recording(recorder, twin, x, weighted=weighted)
    edges = {EDGES: degree, EDGES + ROWS: degree + 1}  # as given, and with a self loop each
    return recorder.ir(twin, graph, x, edges=edges, learned=learned, fix="Choose a strategy; gnnpar check tries it.")


def _measured(agg: Aggregator, few: Block, x: Operands) -> tuple[Times, Passing]:
    """Return the seconds of a fold and of its gradient relative to attention, as calibration measures it, with rows of
    the same width on the same edges, and the elements that its gradient holds at once. Time `_MORE` times the recorded
    edges, so that their rows exceed the cache."""
    edges = torch.arange(few.num_edges).repeat_interleave(_MORE)
    ids = torch.arange(len(edges))
    block = Block.from_edges(
        few.edge_dst[edges],
        (few.indices[edges] + 401 * ids) % few.num_src,
        num_dst=few.num_dst,
        num_src=few.num_src,
        src_ids=torch.arange(few.num_src),
        edges=EdgeData(ids=ids, weight=chosen(few.weights, edges), type=chosen(few.types, edges)),
    )
    x, width = x._replace(edge=tuple(rows[edges] for rows in x.edge)), sum(t[0].numel() for t in x.src)
    heads = 4 if width % 4 == 0 else 1
    far = torch.linspace(-1, 1, block.num_src * width).view(block.num_src, heads, width // heads)
    near = torch.linspace(-1, 1, block.num_src * heads).view(block.num_src, heads)
    attention = Operands((far, near), (near[: block.num_dst],))
    pairs = [(*_seconds(agg, block, x), *_seconds(Softmax(branch=True), block, attention)) for _ in range(_REPEATS)]
    forward, backward = ([pair[i] / pair[i + 2] for pair in pairs] for i in (0, 1))
    return (round(median(forward), 2), round(median(backward), 2)), _passing(agg, block, x)


def _passing(agg: Aggregator, block: Block, x: Operands) -> Passing:
    """Return (elements per edge that a fold's gradient holds in addition to its result, edges per slice on a CPU); (0,
    0) for a fold that torch differentiates, since its rows of edges are recorded."""
    if agg.whole_neighborhood:
        return 0.0, 0
    out, saved = agg.finish(agg.update(agg.init(block.num_dst, x), block, x))
    prepared, most = agg.prepare(saved, out), edges_at_once(x)
    grads = nbytes(t for rows in agg.grad(block, x, prepared, out) for t in rows)
    beside = max(0, peak_allocated_bytes(lambda: agg.grad(block, x, prepared, out)) - grads)
    return round(beside / x.src[0].element_size() / min(most, block.num_edges), 1), most


def _seconds(agg: Aggregator, block: Block, x: Operands) -> tuple[float, float]:
    """Return the seconds of a fold over the block, and of its gradient."""
    began = perf_counter()
    out, saved = agg.finish(agg.update(agg.init(block.num_dst, x), block, x))
    done = perf_counter()
    prepared = agg.prepare(saved, out)
    agg.grad(block, x, prepared, out)
    agg.grad_dst(prepared, out)
    return done - began, perf_counter() - done
