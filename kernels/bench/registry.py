"""Measured cases: one per kernel, shape and type, with contenders and the least bytes to move."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import gnnpar_kernels as kernels
from bench import baselines
from bench.baselines import PYG, PYG_DOT, PYG_V2, Build, Layer
from bench.graphs import Inputs, Size
from gnnpar_kernels.dispatch import functions_of
from gnnpar_kernels.wire import row_nbytes

OURS = "gnnpar"
SAVED = "gnnpar, saved branch"
KEY = 0x0123456789ABCDEF
FP32, BF16 = torch.float32, torch.bfloat16

Tensors = tuple[Tensor, ...]
Body = ModuleType | SimpleNamespace  # the ops: gnnpar_kernels, or one body of each


@dataclass(frozen=True, kw_only=True)
class Race:
    """The op on given inputs by any body, and its alternatives."""

    op: Callable[[Body], object]
    others: dict[str, Build] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One comparison.

    Bytes moved if no row is in a cache: `edge_bytes`, `node_bytes` of each, and `fixed_bytes`; all 0: unknown.
    `payload_bytes`: of a node's row in fp32.
    """

    name: str
    shape: str
    dtype: torch.dtype
    race: Callable[[Inputs], Race]
    edge_bytes: int = 0
    node_bytes: int = 0
    fixed_bytes: int = 0
    payload_bytes: int = 0
    quick: bool = True

    def floor(self, size: Size) -> int:
        """Return the bytes to move on a graph of this size."""
        return size.edges * self.edge_bytes + size.nodes * self.node_bytes + self.fixed_bytes


def _specification(op: Callable[[Body], object]) -> dict[str, Build]:
    return {"specification": lambda: partial(op, functions_of("naive"))}


def _spmm(width: int, dtype: torch.dtype, *, transposed: bool) -> Case:
    def race(data: Inputs) -> Race:
        csr = data.reverse if transposed else data.forward
        row, column = (data.src, data.dst) if transposed else (data.dst, data.src)
        nodes = data.size.nodes
        x = torch.randn(nodes, width, device=data.device).to(dtype)

        def op(body: Body) -> Tensor:
            return body.spmm(csr.indptr, csr.indices, x, num_rows=nodes)

        if transposed:  # its edges are sorted by source
            row, column = row[csr.edge_ids], column[csr.edge_ids]
        return Race(op=op, others=baselines.spmm(csr, row, column, x))

    row_bytes = width * dtype.itemsize
    return Case(
        "spmm transposed" if transposed else "spmm",
        str(width),
        dtype,
        race,
        edge_bytes=row_bytes + 4,
        node_bytes=row_bytes + 8,
    )


def _scored(data: Inputs, heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rows and the scores of both ends. Shapes: -> [N, H, D], [N, H], [N, H]; scores in fp32."""
    nodes, device = data.size.nodes, data.device
    x = torch.randn(nodes, heads, width, device=device).to(dtype)
    a_src, a_dst = (torch.randn(nodes, heads, device=device) for _ in range(2))
    return x, a_src, a_dst


def attend(heads: int, width: int, dtype: torch.dtype, *, drop: float = 0.0) -> Case:
    def race(data: Inputs) -> Race:
        tensors, (indptr, indices, _, ids, *_) = _scored(data, heads, width, dtype), data.forward
        dropping = {"drop": (drop, KEY), "edge_ids": ids} if drop else {}

        def op(body: Body, *, branch: bool = False) -> tuple[Tensor, ...]:
            return body.attend_finish(
                body.attend(indptr, indices, *tensors, slope=0.2, num_rows=data.size.nodes, branch=branch, **dropping)
            )

        return Race(op=op, others={SAVED: lambda: partial(op, kernels, branch=True), **_specification(op)})

    return Case(
        "attend forward" + " dropout" * bool(drop),
        f"{heads}x{width}",
        dtype,
        race,
        edge_bytes=heads * (width * dtype.itemsize + 4) + 4,
        node_bytes=heads * (width * dtype.itemsize + 12) + 8,
    )


def attend_grad(heads: int, width: int, dtype: torch.dtype, *, drop: float = 0.0) -> Case:
    def race(data: Inputs) -> Race:
        tensors, dropping = _scored(data, heads, width, dtype), (drop, KEY) if drop else None
        grad_out = torch.randn(data.size.nodes, heads, width, device=data.device).to(dtype)
        indptr, indices, _, ids, *_ = data.forward
        out, lse, mass_pos, pos = kernels.attend_finish(
            kernels.attend(
                indptr, indices, *tensors, slope=0.2, num_rows=data.size.nodes, drop=dropping, edge_ids=ids, branch=True
            )
        )
        given = (*tensors, out, lse, grad_out)

        def op(body: Body) -> tuple[Tensor, ...]:
            return body.attend_grad(data.forward, data.reverse, *given, slope=0.2, drop=dropping)

        def saved() -> tuple[Tensor, ...]:
            back, how = data.reverse, {"slope": 0.2, "drop": dropping, "edge_ids": data.reverse.edge_ids}
            of_src = kernels.attend_grad_src(back.indptr, back.indices, *given, **how)
            return *of_src, kernels.attend_grad_dst_of(grad_out, out, pos, mass_pos, slope=0.2)

        return Race(op=op, others={SAVED: lambda: saved, **_specification(op)})

    return Case(
        "attend backward" + " dropout" * bool(drop),
        f"{heads}x{width}",
        dtype,
        race,
        edge_bytes=heads * (width * dtype.itemsize + 12) + 4,
        node_bytes=heads * (4 * width * dtype.itemsize + 8) + 8,
    )


class _Fold(torch.autograd.Function):
    """A fold under autograd, as in `gnnpar.folds`, for a fair race with a layer.

    fold(*inputs) -> (output, *kept); grad(grad_out, output, *kept, *inputs) -> gradients of the inputs.
    """

    @staticmethod
    def forward(ctx: Any, fold: Callable[..., Tensors], grad: Callable[..., Tensors], *inputs: Tensor) -> Tensor:
        out, *kept = fold(*inputs)
        ctx.grad = grad
        ctx.save_for_backward(out, *kept, *inputs)
        return out.to(inputs[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.grad(grad_outputs[0], *ctx.saved_tensors)


def _head_scores(x: Tensor, attend: Tensor) -> Tensor:
    """Return <attend_h, x_h> of every head as one product. Shapes: x [N, H, D], attend [H, D] -> [N, H]."""
    return x.flatten(1) @ torch.block_diag(*attend[:, :, None])


def _gat(body: Body, layer: Layer, weight: Tensor, att_src: Tensor, att_dst: Tensor, bias: Tensor) -> Tensor:
    data = layer.data

    def fold(x: Tensor, a_src: Tensor, a_dst: Tensor) -> Tensors:
        how = {"slope": 0.2, "num_rows": a_dst.shape[0], "branch": True}
        return body.attend_finish(body.attend(*data.forward[:2], x, a_src, a_dst, **how))

    def grad(grad_out: Tensor, out: Tensor, lse: Tensor, mass_pos: Tensor, pos: Tensor, *of: Tensor) -> Tensors:
        how = {"slope": 0.2, "delta": body.row_dots(out, grad_out, dtype=lse.dtype)}
        sources = body.attend_grad_src(*data.reverse[:2], *of, out, lse, grad_out, **how)
        return *sources, body.attend_grad_dst_of(grad_out, out, pos, mass_pos, **how).to(of[2].dtype)

    z = layer.by_head(weight)
    return _Fold.apply(fold, grad, z, _head_scores(z, att_src), _head_scores(z, att_dst)).flatten(1) + bias


def _gatv2(body: Body, layer: Layer, left: Tensor, right: Tensor, attend: Tensor, bias: Tensor) -> Tensor:
    data = layer.data

    def fold(*of: Tensor) -> Tensors:
        return body.attend_finish(body.attend_v2(*data.forward[:2], *of, slope=0.2, num_rows=of[1].shape[0]))

    def grad(grad_out: Tensor, out: Tensor, lse: Tensor, *of: Tensor) -> Tensors:
        delta, csrs = body.row_dots(out, grad_out, dtype=lse.dtype), (data.forward, data.reverse)
        return body.attend_v2_grad(*csrs, data.reverse.edge_ids, *of, lse, grad_out, delta, slope=0.2)

    return _Fold.apply(fold, grad, layer.by_head(left), layer.by_head(right), attend).flatten(1) + bias


def _transformer(body: Body, layer: Layer, *weights: Tensor) -> Tensor:
    data, edge = layer.data, layer.edge

    def fold(*of: Tensor) -> Tensors:
        how = {"num_rows": of[2].shape[0], "edge": edge, "edge_query": of[3] if edge is not None else None}
        return body.attend_finish(body.attend_dot(*data.forward[:2], *of[:3], **how))

    def grad(grad_out: Tensor, out: Tensor, lse: Tensor, *of: Tensor) -> Tensors:
        ends = (lse, grad_out, body.row_dots(out, grad_out, dtype=lse.dtype))
        how = {"edge": edge, "edge_query": of[3] if edge is not None else None}
        return body.attend_dot_grad(data.forward, data.reverse, data.reverse.edge_ids, *of[:3], *ends, **how)

    query, key, value = map(layer.by_head, weights[:3])
    query = query * layer.width**-0.5
    if edge is None:
        return _Fold.apply(fold, grad, key, value, query).flatten(1)
    by_head = weights[3].view(layer.heads, layer.width, -1)
    both = _Fold.apply(fold, grad, key, value, query, torch.einsum("nhd,hda->nha", query, by_head))
    out = both[..., : layer.width] + torch.einsum("nha,hda->nhd", both[..., layer.width :], by_head)
    return out.flatten(1)


def layer(kind: str, heads: int, width: int, dtype: torch.dtype, *, edge_dim: int = 0) -> Case:
    """Return a case of a whole layer, forward and backward. `edge_dim`: attributes per edge of "transformer", added to
    keys and values through a matrix."""
    square, head = (heads * width, heads * width), (heads, width)
    run, rival, shapes = {
        "gat": (_gat, PYG, (square, head, head, square[:1])),
        "gatv2": (_gatv2, PYG_V2, (square, square, head, square[:1])),
        "transformer": (_transformer, PYG_DOT, ()),
    }[kind]

    def race(data: Inputs) -> Race:
        x, grad_out = (torch.randn(data.size.nodes, square[0], device=data.device).to(dtype) for _ in range(2))
        edge = torch.randn(data.size.edges, edge_dim, device=data.device).to(dtype) if edge_dim else None
        given = Layer(data, x.requires_grad_(), grad_out, heads, width, edge)
        weights = given.drawn(*shapes) if shapes else baselines.weights_of(given)
        return Race(
            op=lambda body: torch.autograd.grad(run(body, given, *weights), (x, *weights), grad_out),
            others=baselines.attention(rival, given),
        )

    shape = f"{heads}x{width}" + f"e{edge_dim}" * bool(edge_dim)
    return Case(f"{kind} layer fwd+bwd", shape, dtype, race)


def _extremum(width: int) -> Case:
    def race(data: Inputs) -> Race:
        nodes = data.size.nodes
        x, ids = torch.randn(nodes, width, device=data.device), torch.arange(nodes, device=data.device)

        def op(body: Body) -> tuple[Tensor, ...]:
            return body.extremum(data.forward.indptr, data.forward.indices, x, ids, num_rows=nodes)

        return Race(op=op, others={**_specification(op), **baselines.extremum(data.dst, data.src, x)})

    return Case("extremum", str(width), FP32, race, edge_bytes=4 * width + 4, node_bytes=12 * width + 8)


def _dropout(width: int, dtype: torch.dtype, *, per_edge: bool) -> Case:
    def race(data: Inputs) -> Race:
        rows = data.size.edges if per_edge else data.size.nodes
        x, ids = torch.randn(rows, width, device=data.device).to(dtype), torch.arange(rows, device=data.device)
        return Race(
            op=lambda body: body.dropout(x, ids, p=0.5, key=KEY),
            others={"F.dropout": lambda: partial(torch.nn.functional.dropout, x, 0.5)},
        )

    return Case(
        f"dropout per {'edge' if per_edge else 'node'}",
        str(width),
        dtype,
        race,
        edge_bytes=(2 * width * dtype.itemsize + 8) * per_edge,
        node_bytes=(2 * width * dtype.itemsize + 8) * (not per_edge),
    )


def _dense(inside: int, outside: int) -> Case:
    def race(data: Inputs) -> Race:
        x = torch.randn(data.size.nodes, inside, device=data.device)
        weight, bias = torch.randn(outside, inside, device=data.device), torch.randn(outside, device=data.device)
        linear = torch.nn.functional.linear
        return Race(
            op=lambda body: body.dense(x, weight, bias=bias),
            others={"F.linear": lambda: partial(linear, x, weight, bias)},
        )

    return Case("dense", f"{inside}x{outside}", FP32, race, node_bytes=4 * (inside + outside))


def _quantize(width: int, bits: int, dtype: torch.dtype, *, ops: str) -> Case:
    """`ops`: "quantize", "dequantize", or "quantize and back"."""

    def race(data: Inputs) -> Race:
        nodes = data.size.nodes
        x, ids = torch.randn(nodes, width, device=data.device).to(dtype), torch.arange(nodes, device=data.device)

        def there(body: Body) -> Tensor:
            return body.quantize_rows(x, None, bits, ids=ids, key=KEY)

        def back(body: Body, buffer: Tensor) -> Tensor:
            return body.dequantize_rows(buffer, bits, width=width, dtype=dtype)

        if ops == "quantize":
            return Race(op=there)
        if ops == "quantize and back":
            return Race(op=lambda body: back(body, there(body)))
        buffer = there(kernels)
        return Race(op=lambda body: back(body, buffer))

    once = width * dtype.itemsize + row_nbytes(width, bits)
    return Case(
        ops,
        f"{width} {bits}b",
        dtype,
        race,
        node_bytes={"quantize": once + 8, "dequantize": once, "quantize and back": 2 * once + 8}[ops],
        payload_bytes=4 * width,
    )


def copy(nbytes: int) -> Case:
    """Return a copy within the device's memory, the ceiling of all cases that move bytes."""

    def race(data: Inputs) -> Race:
        source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=data.device)
        target = torch.empty_like(source)
        return Race(op=lambda body: target.copy_(source))

    return Case("copy", f"{nbytes >> 20} MiB", torch.uint8, race, fixed_bytes=2 * nbytes)


def _quick(every: Iterator[Case], *shapes: str) -> list[Case]:
    """Return the cases with only these shapes marked as quick."""
    return [replace(case, quick=case.shape in shapes) for case in every]


def _of_gpu() -> Iterator[Case]:
    for dtype in (FP32, BF16):
        for width in (64, 128, 256):
            yield _spmm(width, dtype, transposed=False)
            yield _spmm(width, dtype, transposed=True)
        for heads, width in ((4, 64), (8, 32), (4, 128)):
            yield attend(heads, width, dtype)
            yield attend_grad(heads, width, dtype)
            yield layer("gat", heads, width, dtype)
        yield layer("gatv2", 4, 64, dtype)
        yield layer("transformer", 4, 64, dtype)
        yield layer("transformer", 16, 32, dtype, edge_dim=3)
        yield _dropout(128, dtype, per_edge=False)
        for bits in (2, 4, 8):
            yield _quantize(128, bits, dtype, ops="quantize")
            yield _quantize(128, bits, dtype, ops="dequantize")
    yield layer("transformer", 16, 32, torch.float16, edge_dim=3)
    yield _extremum(128)
    yield _dropout(4, FP32, per_edge=True)


def _of_cpu() -> Iterator[Case]:
    for width in (32, 128, 256):
        yield _spmm(width, FP32, transposed=False)
    yield _spmm(128, FP32, transposed=True)
    yield _spmm(128, BF16, transposed=False)
    yield _spmm(128, torch.float64, transposed=False)
    for width in (8, 32, 64):
        yield layer("gat", 4, width, FP32)
    yield layer("gatv2", 4, 32, FP32)
    for edge_dim in (0, 3):
        yield layer("transformer", 4, 32, FP32, edge_dim=edge_dim)
    for drop in (0.0, 0.5):
        yield attend(4, 32, FP32, drop=drop)
        yield attend_grad(4, 32, FP32, drop=drop)
    yield _extremum(128)
    yield _dense(128, 128)
    yield _dense(128, 8)
    yield _dropout(128, FP32, per_edge=False)
    yield _dropout(4, FP32, per_edge=True)
    for bits in (2, 8):
        for ops in ("quantize", "dequantize", "quantize and back"):
            yield _quantize(128, bits, FP32, ops=ops)


def cases(kind: str) -> list[Case]:
    """Return all cases of a "cuda" or "cpu" run; `run.py --quick` runs the `quick` ones."""
    if kind == "cuda":
        return _quick(_of_gpu(), "128", "4x64", "128 8b")
    slow = ("extremum", "attend forward dropout", "attend backward dropout")
    quick = _quick(_of_cpu(), "128", "4x32", "4", "128 8b")
    return [replace(case, quick=case.quick and case.name not in slow) for case in quick]
