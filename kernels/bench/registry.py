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


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison. `floor`: bytes moved if no row is in a cache; `payload`: bytes of its rows in fp32."""

    name: str
    shape: str
    dtype: torch.dtype
    race: Callable[[Inputs], Race]
    floor: Callable[[Size], int] | None = None
    payload: Callable[[Size], int] | None = None
    quick: bool = True


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
        name="spmm transposed" if transposed else "spmm",
        shape=str(width),
        dtype=dtype,
        race=race,
        floor=lambda size: size.edges * (row_bytes + 4) + size.nodes * (row_bytes + 8),
    )


def _scored(data: Inputs, heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rows and the scores of both ends. Shapes: -> [N, H, D], [N, H], [N, H]; scores in fp32."""
    nodes, device = data.size.nodes, data.device
    x = torch.randn(nodes, heads, width, device=device).to(dtype)
    a_src, a_dst = (torch.randn(nodes, heads, device=device) for _ in range(2))
    return x, a_src, a_dst


def _attend(heads: int, width: int, dtype: torch.dtype, *, drop: float = 0.0) -> Case:
    def race(data: Inputs) -> Race:
        tensors, (indptr, indices, _, ids, *_) = _scored(data, heads, width, dtype), data.forward
        dropping = {"drop": (drop, KEY), "edge_ids": ids} if drop else {}

        def op(body: Body, *, branch: bool = False) -> tuple[Tensor, ...]:
            return body.attend_finish(
                body.attend(indptr, indices, *tensors, slope=0.2, num_rows=data.size.nodes, branch=branch, **dropping)
            )

        return Race(op=op, others={SAVED: lambda: partial(op, kernels, branch=True), **_specification(op)})

    edge, node = heads * (width * dtype.itemsize + 4) + 4, heads * (width * dtype.itemsize + 12) + 8
    return Case(
        name="attend forward" + " dropout" * bool(drop),
        shape=f"{heads}x{width}",
        dtype=dtype,
        race=race,
        floor=lambda size: size.edges * edge + size.nodes * node,
    )


def _attend_grad(heads: int, width: int, dtype: torch.dtype, *, drop: float = 0.0) -> Case:
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

    edge, node = heads * (width * dtype.itemsize + 12) + 4, heads * (4 * width * dtype.itemsize + 8) + 8
    return Case(
        name="attend backward" + " dropout" * bool(drop),
        shape=f"{heads}x{width}",
        dtype=dtype,
        race=race,
        floor=lambda size: size.edges * edge + size.nodes * node,
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


def _gat_layer(heads: int, width: int, dtype: torch.dtype) -> Case:
    def race(data: Inputs) -> Race:
        total = heads * width
        x, grad_out = (torch.randn(data.size.nodes, total, device=data.device).to(dtype) for _ in range(2))
        weight, att_src, att_dst, bias = (
            (0.1 * torch.randn(shape, device=data.device)).to(dtype).requires_grad_()
            for shape in ((total, total), (heads, width), (heads, width), (total,))
        )
        wanted = (x.requires_grad_(), weight, att_src, att_dst, bias)

        def op(body: Body) -> tuple[Tensor, ...]:
            def fold(x: Tensor, a_src: Tensor, a_dst: Tensor) -> Tensors:
                how = {"slope": 0.2, "num_rows": a_dst.shape[0], "branch": True}
                return body.attend_finish(body.attend(*data.forward[:2], x, a_src, a_dst, **how))

            def grad(grad_out: Tensor, out: Tensor, lse: Tensor, mass_pos: Tensor, pos: Tensor, *of: Tensor) -> Tensors:
                how = {"slope": 0.2, "delta": body.row_dots(out, grad_out, dtype=lse.dtype)}
                sources = body.attend_grad_src(*data.reverse[:2], *of, out, lse, grad_out, **how)
                return *sources, body.attend_grad_dst_of(grad_out, out, pos, mass_pos, **how).to(of[2].dtype)

            z = (x @ weight.t()).view(-1, heads, width)
            out = _Fold.apply(fold, grad, z, _head_scores(z, att_src), _head_scores(z, att_dst))
            return torch.autograd.grad(out.view(-1, total) + bias, wanted, grad_out)

        return Race(op=op, others=baselines.attention(PYG, Layer(data, x, grad_out, heads, width)))

    return Case(name="gat layer fwd+bwd", shape=f"{heads}x{width}", dtype=dtype, race=race)


def _gatv2_layer(heads: int, width: int, dtype: torch.dtype) -> Case:
    def race(data: Inputs) -> Race:
        total = heads * width
        x, grad_out = (torch.randn(data.size.nodes, total, device=data.device).to(dtype) for _ in range(2))
        left, right, attend, bias = (
            (0.1 * torch.randn(shape, device=data.device)).to(dtype).requires_grad_()
            for shape in ((total, total), (total, total), (heads, width), (total,))
        )
        wanted = (x.requires_grad_(), left, right, attend, bias)

        def op(body: Body) -> tuple[Tensor, ...]:
            def fold(*of: Tensor) -> Tensors:
                return body.attend_finish(body.attend_v2(*data.forward[:2], *of, slope=0.2, num_rows=of[1].shape[0]))

            def grad(grad_out: Tensor, out: Tensor, lse: Tensor, *of: Tensor) -> Tensors:
                delta, csrs = body.row_dots(out, grad_out, dtype=lse.dtype), (data.forward, data.reverse)
                return body.attend_v2_grad(*csrs, data.reverse.edge_ids, *of, lse, grad_out, delta, slope=0.2)

            rows = ((x @ weight.t()).view(-1, heads, width) for weight in (left, right))
            out = _Fold.apply(fold, grad, *rows, attend)
            return torch.autograd.grad(out.view(-1, total) + bias, wanted, grad_out)

        return Race(op=op, others=baselines.attention(PYG_V2, Layer(data, x, grad_out, heads, width)))

    return Case(name="gatv2 layer fwd+bwd", shape=f"{heads}x{width}", dtype=dtype, race=race)


def _transformer_layer(heads: int, width: int, dtype: torch.dtype, *, edge_dim: int = 0) -> Case:
    """`edge_dim`: attributes per edge, added to keys and values through a matrix."""

    def race(data: Inputs) -> Race:
        total, device = heads * width, data.device
        x, grad_out = (torch.randn(data.size.nodes, total, device=device).to(dtype) for _ in range(2))
        edge = torch.randn(data.size.edges, edge_dim, device=device).to(dtype) if edge_dim else None
        layer = Layer(data, x.requires_grad_(), grad_out, heads, width, edge)
        weights = baselines.weights_of(layer)
        wanted = (x, *weights)

        def op(body: Body) -> tuple[Tensor, ...]:
            def fold(*of: Tensor) -> Tensors:
                how = {"num_rows": of[2].shape[0], "edge": edge, "edge_query": of[3] if edge is not None else None}
                return body.attend_finish(body.attend_dot(*data.forward[:2], *of[:3], **how))

            def grad(grad_out: Tensor, out: Tensor, lse: Tensor, *of: Tensor) -> Tensors:
                ends = (lse, grad_out, body.row_dots(out, grad_out, dtype=lse.dtype))
                how = {"edge": edge, "edge_query": of[3] if edge is not None else None}
                csrs = (data.forward, data.reverse)
                return body.attend_dot_grad(*csrs, data.reverse.edge_ids, *of[:3], *ends, **how)

            query, key, value = ((x @ weight.t()).view(-1, heads, width) for weight in weights[:3])
            query = query * width**-0.5
            if edge is None:
                out = _Fold.apply(fold, grad, key, value, query)
            else:
                by_head = weights[3].view(heads, width, edge_dim)
                both = _Fold.apply(fold, grad, key, value, query, torch.einsum("nhd,hda->nha", query, by_head))
                out = both[..., :width] + torch.einsum("nha,hda->nhd", both[..., width:], by_head)
            return torch.autograd.grad(out.reshape(-1, total), wanted, grad_out)

        return Race(op=op, others=baselines.attention(PYG_DOT, layer))

    shape = f"{heads}x{width}" + f"e{edge_dim}" * bool(edge_dim)
    return Case(name="transformer layer fwd+bwd", shape=shape, dtype=dtype, race=race)


def _extremum(width: int) -> Case:
    def race(data: Inputs) -> Race:
        nodes = data.size.nodes
        x, ids = torch.randn(nodes, width, device=data.device), torch.arange(nodes, device=data.device)

        def op(body: Body) -> tuple[Tensor, ...]:
            return body.extremum(data.forward.indptr, data.forward.indices, x, ids, num_rows=nodes)

        return Race(op=op, others={**_specification(op), **baselines.extremum(data.dst, data.src, x)})

    return Case(
        name="extremum",
        shape=str(width),
        dtype=FP32,
        race=race,
        floor=lambda size: size.edges * (4 * width + 4) + size.nodes * (12 * width + 8),
    )


def _dropout(width: int, dtype: torch.dtype, *, per_edge: bool) -> Case:
    def race(data: Inputs) -> Race:
        rows = data.size.edges if per_edge else data.size.nodes
        x, ids = torch.randn(rows, width, device=data.device).to(dtype), torch.arange(rows, device=data.device)
        return Race(
            op=lambda body: body.dropout(x, ids, p=0.5, key=KEY),
            others={"F.dropout": lambda: partial(torch.nn.functional.dropout, x, 0.5)},
        )

    return Case(
        name=f"dropout per {'edge' if per_edge else 'node'}",
        shape=str(width),
        dtype=dtype,
        race=race,
        floor=lambda size: (size.edges if per_edge else size.nodes) * (2 * width * dtype.itemsize + 8),
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

    return Case(
        name="dense",
        shape=f"{inside}x{outside}",
        dtype=FP32,
        race=race,
        floor=lambda size: size.nodes * 4 * (inside + outside),
    )


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

    def floor(size: Size) -> int:
        once = width * dtype.itemsize + row_nbytes(width, bits)
        return size.nodes * {"quantize": once + 8, "dequantize": once, "quantize and back": 2 * once + 8}[ops]

    return Case(
        name=ops,
        shape=f"{width} {bits}b",
        dtype=dtype,
        race=race,
        floor=floor,
        payload=lambda size: size.nodes * width * 4,
    )


def copy(nbytes: int) -> Case:
    """Return a copy within the device's memory, the ceiling of all cases that move bytes."""

    def race(data: Inputs) -> Race:
        source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=data.device)
        target = torch.empty_like(source)
        return Race(op=lambda body: target.copy_(source))

    return Case(name="copy", shape=f"{nbytes >> 20} MiB", dtype=torch.uint8, race=race, floor=lambda size: 2 * nbytes)


def _quick(every: Iterator[Case], *shapes: str) -> list[Case]:
    """Return the cases with only these shapes marked as quick."""
    return [replace(case, quick=case.shape in shapes) for case in every]


def _of_gpu() -> Iterator[Case]:
    for dtype in (FP32, BF16):
        for width in (64, 128, 256):
            yield _spmm(width, dtype, transposed=False)
            yield _spmm(width, dtype, transposed=True)
        for heads, width in ((4, 64), (8, 32), (4, 128)):
            yield _attend(heads, width, dtype)
            yield _attend_grad(heads, width, dtype)
            yield _gat_layer(heads, width, dtype)
        yield _gatv2_layer(4, 64, dtype)
        yield _transformer_layer(4, 64, dtype)
        yield _transformer_layer(16, 32, dtype, edge_dim=3)
        yield _dropout(128, dtype, per_edge=False)
        for bits in (2, 4, 8):
            yield _quantize(128, bits, dtype, ops="quantize")
            yield _quantize(128, bits, dtype, ops="dequantize")
    yield _transformer_layer(16, 32, torch.float16, edge_dim=3)
    yield _extremum(128)
    yield _dropout(4, FP32, per_edge=True)


def _of_cpu() -> Iterator[Case]:
    for width in (32, 128, 256):
        yield _spmm(width, FP32, transposed=False)
    yield _spmm(128, FP32, transposed=True)
    yield _spmm(128, BF16, transposed=False)
    yield _spmm(128, torch.float64, transposed=False)
    for width in (8, 32, 64):
        yield _gat_layer(4, width, FP32)
    yield _gatv2_layer(4, 32, FP32)
    for edge_dim in (0, 3):
        yield _transformer_layer(4, 32, FP32, edge_dim=edge_dim)
    for drop in (0.0, 0.5):
        yield _attend(4, 32, FP32, drop=drop)
        yield _attend_grad(4, 32, FP32, drop=drop)
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
