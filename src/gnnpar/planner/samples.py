"""Short measurements of one rank's kernels and links, for `calibrate` to fit.

All ranks measure at once, each sample after a barrier, so that contention for memory, cores and links is included.
Torch runs with the number of threads of a rank.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnpar.comm import Communicator, MessageTag
from gnnpar.comm.clock import perf_counter
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.folds.edge_data import EdgeData
from gnnpar.folds.max import Max
from gnnpar.folds.softmax import Softmax, SoftmaxDot, SoftmaxV2
from gnnpar.folds.sum import Sum
from gnnpar.parallel.pipeline.chunks import Chunks, EpochOrder
from gnnpar.pricing.rates import doublings_beyond, numbers_beyond
from gnnpar_kernels import (
    apply_mask,
    dequantize_rows,
    dropout,
    gather_rows,
    keep_mask,
    quantize_rows,
    scatter_add_rows_,
)

_REPEATS, _WARMUP = 8, 2
_REPEATS_LATE, _WARMUP_LATE = 2, 1
_GEMMS = (
    (500, 64, 64),
    (4000, 64, 64),
    (16000, 64, 64),
    (4000, 256, 64),
    (8000, 128, 128),
    (8000, 64, 8),
    (8000, 16, 16),
)
_FOLDS = (
    (400, 3000, 64),
    (2000, 8000, 64),
    (4000, 60000, 64),
    (4000, 60000, 16),
    (8000, 120000, 128),
    (8000, 30000, 64),
    (2500, 150000, 32),
    (1200, 12000, 128),
    (20000, 200000, 64),
)
_MOST_EDGES = {"SoftmaxV2": 60_000, "SoftmaxDot": 60_000}  # an edge takes up to four times as long as in Softmax
_NUMBERS = (2_000, 60_000, 600_000, 2_000_000)
_BURST = 9  # messages posted at once, to measure the ranks' own work per message
SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)


@dataclass
class Samples:
    """Measurements. kernels: kind ('gemm', 'elementwise', 'Sum.forward', ...) -> ((coefficient of each of its costs),
    s), as `pricing.rates` has them. links: peer -> (bytes, s). reduce: (bytes, s). trials: see `overhead`."""

    kernels: dict[str, list[tuple[tuple[float, ...], float]]] = field(default_factory=lambda: defaultdict(list))
    per_number: dict[str, float] = field(default_factory=dict)
    links: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    reduce: list[tuple[float, float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    trials: dict[str, dict[str, float]] = field(default_factory=dict)


def measure(comm: Communicator, until: float = math.inf) -> Samples:
    """Measure everything on this rank. Collective. until: time.monotonic() after which samples repeat less."""
    samples = Samples()
    watch = _Watch(comm, until)
    _products(watch, samples)
    _elementwise(watch, samples)
    for agg in (Sum(), Max(), Softmax(branch=True), SoftmaxV2(), SoftmaxDot()):
        _folds(watch, samples, agg)
    _rows(watch, samples)
    _order(watch, samples)
    _step(watch, samples)
    if comm.size > 1:
        _messages(watch, samples)
    return samples


@dataclass(frozen=True)
class _Watch:
    comm: Communicator
    until: float

    def __call__(self, body: Callable[[], object]) -> float:
        """Return seconds with all ranks at once: the second smallest of several, to exclude other load."""
        late = self.comm.broadcast(time.monotonic() > self.until)  # rank 0 decides
        warmup, repeats = (_WARMUP_LATE, _REPEATS_LATE) if late else (_WARMUP, _REPEATS)
        times = []
        self.comm.barrier()
        for _ in range(warmup + repeats):
            began = perf_counter()
            body()
            if self.comm.device.type == "cuda":
                torch.cuda.synchronize(self.comm.device)
            times.append(perf_counter() - began)
        return sorted(times[warmup:])[1]

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self.comm.device)


def _products(watch: _Watch, samples: Samples) -> None:
    """Measure a product and the gradient of its weight; the gradient of its input has the same size as the product."""
    for n, a, b in _GEMMS:
        x, weight, grad = watch.rand(n, a), watch.rand(b, a), watch.rand(n, b)
        cost = (1.0, 2.0 * n * a * b, n * (a + b) + a * b)
        samples.kernels["gemm"] += [
            (cost, watch(lambda x=x, w=weight: torch.nn.functional.linear(x, w))),
            (cost, watch(lambda x=x, g=grad: g.t() @ x)),
        ]


def _elementwise(watch: _Watch, samples: Samples) -> None:
    """Measure relu under autograd, forward and backward; the constant covers a kernel launch and an autograd node."""
    for numbers in _NUMBERS:
        x = watch.rand(numbers // 64 + 1, 64).requires_grad_()
        seed = torch.ones_like(x)

        def both(x: Tensor = x, seed: Tensor = seed) -> None:
            torch.autograd.grad(torch.relu(torch.relu(torch.relu(x))), x, seed)

        numbers = 2.0 * x.numel()
        samples.kernels["elementwise"].append(((1.0, numbers, numbers_beyond(numbers)), watch(both) / 6))


def _folds(watch: _Watch, samples: Samples, agg: Aggregator) -> None:
    kind = type(agg).__name__
    generator = torch.Generator().manual_seed(0)
    for n, e, width in _FOLDS:
        if e > _MOST_EDGES.get(kind, e):
            continue
        block = _block(n, e, generator).to(watch.comm.device)
        x, numbers = _operands(watch, kind, n, width)
        state = agg.update(agg.init(n, x), block, x)
        out, saved = agg.finish(tuple(t.clone() for t in state))
        grad = torch.rand_like(out)

        def forward(x: Operands = x, block: Block = block, n: int = n) -> None:
            agg.finish(agg.update(agg.init(n, x), block, x))

        def backward(x: Operands = x, block: Block = block, saved: Rows = saved, grad: Tensor = grad) -> None:
            prepared = agg.prepare(saved, grad)
            agg.grad(block, x, prepared, grad)
            agg.grad_dst(prepared, grad)

        costs = (1.0, e, e * numbers, n * numbers, e * numbers * doublings_beyond(n * numbers))
        samples.kernels[f"{kind}.forward"].append((costs, watch(forward)))
        samples.kernels[f"{kind}.backward"].append((costs, watch(backward)))


def _block(n: int, e: int, generator: torch.Generator) -> Block:
    """Return random in-edges, sorted by destination and source."""
    pairs = torch.randint(0, n * n, (e,), generator=generator).sort().values
    return Block.from_edges(pairs // n, pairs % n, num_dst=n, num_src=n, src_ids=torch.arange(n))


def _operands(watch: _Watch, kind: str, n: int, width: int) -> tuple[Operands, int]:
    """Return (operands, elements per source row)."""
    if kind not in ("Softmax", "SoftmaxV2", "SoftmaxDot"):
        return Operands((watch.rand(n, width),)), width
    heads = 4
    if kind == "SoftmaxDot":
        key, value, query = (watch.rand(n, heads, width // heads) for _ in range(3))
        return Operands((key, value), (query,)), 2 * width
    if kind == "SoftmaxV2":
        rows = [watch.rand(n, heads, width // heads) for _ in range(2)]
        return Operands((rows[0],), (rows[1],), (), (watch.rand(heads, width // heads),)), width
    return Operands(
        (watch.rand(n, heads, width // heads), watch.rand(n, heads)), (watch.rand(n, heads),)
    ), width + heads


def _rows(watch: _Watch, samples: Samples) -> None:
    """Measure gather, scatter-add, dropout masks and quantization, per element."""
    n, width = 6000, 64
    x = watch.rand(n, width)
    index = torch.randperm(n)[: n // 2].sort().values.to(x.device)
    ids, numbers = index.clone(), index.numel() * width
    packed = watch(lambda: gather_rows(x, index))
    half = gather_rows(x, index)
    added = watch(lambda: scatter_add_rows_(x, index, half))
    samples.per_number["gather"] = (packed + added) / 2 / numbers
    samples.per_number["dropout"] = watch(lambda: dropout(half, ids, p=0.5, key=7)) / numbers
    kept = keep_mask(ids, width, p=0.5, key=7)
    samples.per_number["undrop"] = watch(lambda: apply_mask(half, kept, p=0.5)) / numbers
    for bits in (2, 4, 8):
        buffer = quantize_rows(x, index, bits, ids=ids, key=7)
        there = watch(lambda bits=bits: quantize_rows(x, index, bits, ids=ids, key=7))
        back = watch(lambda bits=bits, b=buffer: dequantize_rows(b, bits, width=width))
        samples.per_number[f"code{bits}"] = (there + back) / 2 / numbers
    cast = watch(lambda: gather_rows(x, index).to(torch.bfloat16).to(torch.float32))
    samples.per_number["code16"] = cast / 2 / numbers


def _order(watch: _Watch, samples: Samples) -> None:
    """Measure the preparation of an epoch's chunk order: columns of each chunk, and readers of both tables."""
    n, e, num = 6000, 90000, 8
    generator = torch.Generator().manual_seed(0)
    rows, device = torch.arange(n), watch.comm.device
    src, dst = torch.randint(0, n, (2, e), generator=generator)
    chunks = Chunks(
        num=num,
        part=0,
        order=rows.to(device),
        in_degree=rows.to(device),
        chunk_of=(rows * num // n).to(device),
        ids=rows.to(device),
        bounds={0: [n * k // num for k in range(num + 1)]},
        sent={},
        halo_rows={},
        dst=dst.sort().values.to(device),
        src=src.to(device),
        held=EdgeData(),
    )

    def order() -> None:
        epoch_order = EpochOrder(chunks, range(num), fresh=0, stale=n)
        for k in range(num):
            epoch_order.blocks(k)
            epoch_order.readers("now", chunks.own(k))
            epoch_order.readers("before", chunks.own(k))

    samples.seconds["order"] = watch(order) / e


def _step(watch: _Watch, samples: Samples) -> None:
    """Measure an optimizer's step of a small and a larger model."""
    for name, width in (("small", 16), ("large", 512)):
        weights = [torch.nn.Parameter(watch.rand(width, width)) for _ in range(6)]
        optimizer = torch.optim.Adam(weights, foreach=True)
        for w in weights:
            w.grad = torch.ones_like(w)
        samples.seconds[f"step_{name}"] = watch(optimizer.step)
        samples.seconds[f"numbers_{name}"] = 6.0 * width * width


def _messages(watch: _Watch, samples: Samples) -> None:
    """Measure rings over every distance, all_reduce, a burst of messages, and compute that overlaps a message."""
    comm = watch.comm
    for hop in range(1, comm.size):
        rows = [(float(size), watch(lambda size=size, hop=hop: _ring(comm, hop, size))) for size in SIZES]
        samples.links[(comm.rank - hop) % comm.size] = rows
    for size in (1 << 10, 1 << 16, 1 << 19):
        vector = torch.zeros(size // 4, device=comm.device)
        samples.reduce.append((float(size), watch(lambda vector=vector: comm.all_reduce(vector))))
    many, one = (watch(lambda count=count: _burst(comm, count)) for count in (_BURST, 1))
    samples.seconds["message"] = max(0.0, many - one) / (_BURST - 1) / 2
    x = watch.rand(1500, 1500)
    size, alone = 1 << 21, watch(lambda: _ring(comm, 1, 1 << 21))
    compute = watch(lambda: x @ x)
    repeats = max(1, round(alone / compute))

    def busy() -> None:
        for _ in range(repeats):
            torch.mm(x, x)

    computing, both = watch(busy), watch(lambda: _ring(comm, 1, size, meanwhile=busy))
    lost = (both - max(alone, computing)) / max(1e-9, min(alone, computing))
    samples.seconds["interference"] = min(1.0, max(0.0, lost))
    samples.seconds["beside"] = size / alone


def _ring(comm: Communicator, hop: int, nbytes: int, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Send from every rank to the rank `hop` ahead."""
    target, source = (comm.rank + hop) % comm.size, (comm.rank - hop) % comm.size
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=comm.device)
    pending = comm.exchange({target: buffer}, {source: nbytes}, MessageTag(0, -1, 0, "setup"))
    meanwhile()
    pending[source].wait()
    comm.flush(keep=0)


def _burst(comm: Communicator, count: int) -> None:
    """Send several small messages at once, both ways."""
    target, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    buffer = torch.zeros(64, dtype=torch.uint8, device=comm.device)
    posted = [comm.exchange({target: buffer}, {source: 64}, MessageTag(0, -1, 0, "setup")) for _ in range(count)]
    for pending in posted:
        pending[source].wait()
    comm.flush(keep=0)
