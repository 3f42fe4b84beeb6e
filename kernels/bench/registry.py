"""What is measured: one case per kernel, its contenders the public op and what one would use instead."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gnnpar_kernels as kernels
from gnnpar_kernels import Csr, naive

Run = Callable[[], Any]
OURS = "gnnpar"
KEY = 0x0123456789ABCDEF


@dataclass(frozen=True, kw_only=True)
class Size:
    """A random graph: degrees of both ends follow the same law."""

    nodes: int
    edges: int
    law: str = "power"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Both orientations of a graph. Shapes: src, dst [E]; forward rows are destinations, reverse rows sources."""

    size: Size
    src: Tensor
    dst: Tensor
    forward: Csr
    reverse: Csr

    @property
    def adjacency(self) -> Tensor:
        """The same as a torch CSR matrix with int64 indices, as PyG makes it."""
        ones = torch.ones(self.size.edges, device=self.src.device)
        shape = (self.size.nodes, self.size.nodes)
        return torch.sparse_csr_tensor(self.forward.indptr.long(), self.forward.indices.long(), ones, shape)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison; `contenders` builds the callables, the op itself among them under the name OURS."""

    name: str
    shape: str
    dtype: str
    contenders: Callable[[Inputs], dict[str, Run]]
    quick: bool = True


def graph(size: Size, *, device: str) -> Inputs:
    """Edges drawn with weights 1 or of a power law, sorted by (destination, source)."""
    generator = torch.Generator().manual_seed(size.seed)
    weight = torch.rand(size.nodes, generator=generator)
    weight = weight.pow(-0.5).clamp(max=60) if size.law == "power" else torch.ones_like(weight)
    src, dst = (torch.multinomial(weight, size.edges, replacement=True, generator=generator) for _ in range(2))
    order = (dst * size.nodes + src).argsort()
    src, dst = src[order], dst[order]
    reverse = torch.sort(src, stable=True).indices
    ids = torch.arange(size.edges)

    def csr(row: Tensor, column: Tensor, edge_ids: Tensor) -> Csr:
        indptr = torch.zeros(size.nodes + 1, dtype=torch.int32)
        indptr[1:] = torch.bincount(row, minlength=size.nodes).cumsum(0)
        return Csr(indptr.to(device), column.int().to(device), None, edge_ids.to(device))

    return Inputs(
        size=size, src=src.to(device), dst=dst.to(device),
        forward=csr(dst, src, ids), reverse=csr(src, dst[reverse], reverse),
    )  # fmt: skip


def _spmm(width: int, dtype: torch.dtype) -> Callable[[Inputs], dict[str, Run]]:
    def contenders(data: Inputs) -> dict[str, Run]:
        nodes, device = data.size.nodes, data.src.device
        x = torch.randn(nodes, width, device=device).to(dtype)
        indptr, indices = data.forward.indptr, data.forward.indices
        runs: dict[str, Run] = {OURS: lambda: kernels.spmm(indptr, indices, x, num_rows=nodes)}
        if dtype != torch.bfloat16:
            adjacency = data.adjacency.to(dtype)
            runs["torch CSR product"] = lambda: adjacency @ x
        runs["index_add"] = lambda: torch.zeros_like(x).index_add_(0, data.dst, x[data.src])
        return runs

    return contenders


class _Attend(torch.autograd.Function):
    """The op under autograd, as `gnnpar.ops` wraps it, for a fair race with a layer."""

    @staticmethod
    def forward(ctx: Any, data: Inputs, x: Tensor, a_src: Tensor, a_dst: Tensor) -> Tensor:
        indptr, indices, _, _ = data.forward
        state = kernels.attend(indptr, indices, x, a_src, a_dst, slope=0.2, num_rows=a_dst.shape[0])
        out, lse = kernels.attend_finish(state)
        ctx.data = data
        ctx.save_for_backward(x, a_src, a_dst, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, a_src, a_dst, out, lse = ctx.saved_tensors
        graphs = (ctx.data.forward, ctx.data.reverse)
        grads = kernels.attend_grad(*graphs, x, a_src, a_dst, out, lse, grad_outputs[0], slope=0.2)
        return None, *grads


def _gat_layer(heads: int, width: int) -> Callable[[Inputs], dict[str, Run]]:
    def contenders(data: Inputs) -> dict[str, Run]:
        from torch_geometric.nn import GATConv

        layer = GATConv(heads * width, width, heads, add_self_loops=False).to(data.src.device)
        x = torch.randn(data.size.nodes, heads * width, device=data.src.device, requires_grad=True)
        grad_out = torch.randn(data.size.nodes, heads * width, device=data.src.device)
        edge_index, project = torch.stack([data.src, data.dst]), layer.lin
        assert project is not None

        def ours() -> None:
            z = project(x).view(-1, heads, width)
            out = _Attend.apply(data, z, (z * layer.att_src).sum(-1), (z * layer.att_dst).sum(-1))
            (out.view(-1, heads * width) + layer.bias).backward(grad_out)

        return {OURS: ours, "PyG GATConv": lambda: layer(x, edge_index).backward(grad_out)}

    return contenders


def _attend(heads: int, width: int, *, drop: float, backward: bool) -> Callable[[Inputs], dict[str, Run]]:
    def contenders(data: Inputs) -> dict[str, Run]:
        nodes, device = data.size.nodes, data.src.device
        x, grad_out = (torch.randn(nodes, heads, width, device=device) for _ in range(2))
        a_src, a_dst = (torch.randn(nodes, heads, device=device) for _ in range(2))
        dropping = (drop, KEY) if drop else None
        indptr, indices, _, ids = data.forward

        def forward(body: Any) -> tuple[Tensor, Tensor]:
            state = body.attend(
                indptr, indices, x, a_src, a_dst, slope=0.2, num_rows=nodes, drop=dropping, edge_ids=ids
            )  # fmt: skip
            return body.attend_finish(state)

        if not backward:
            return {OURS: lambda: forward(kernels), "specification": lambda: forward(naive)}
        tensors = (x, a_src, a_dst, *forward(kernels), grad_out)
        graphs = (data.forward, data.reverse)
        return {
            OURS: lambda: kernels.attend_grad(*graphs, *tensors, slope=0.2, drop=dropping),
            "specification": lambda: naive.attend_grad(*graphs, *tensors, slope=0.2, drop=dropping),
        }

    return contenders


def _extremum(width: int) -> Callable[[Inputs], dict[str, Run]]:
    def contenders(data: Inputs) -> dict[str, Run]:
        nodes = data.size.nodes
        x, ids = torch.randn(nodes, width, device=data.src.device), torch.arange(nodes, device=data.src.device)
        args = (data.forward.indptr, data.forward.indices, x, ids)
        where = data.dst[:, None].expand(-1, width)
        empty = torch.full_like(x, -torch.inf)
        return {
            OURS: lambda: kernels.extremum(*args, num_rows=nodes),
            "specification": lambda: naive.extremum(*args, num_rows=nodes),
            "scatter_reduce, no winner": lambda: empty.scatter_reduce(
                0, where, x[data.src], "amax", include_self=False
            ),
        }

    return contenders


def _dropout(*, per_edge: bool, width: int) -> Callable[[Inputs], dict[str, Run]]:
    def contenders(data: Inputs) -> dict[str, Run]:
        rows = data.size.edges if per_edge else data.size.nodes
        x, ids = torch.randn(rows, width, device=data.src.device), torch.arange(rows, device=data.src.device)
        return {
            OURS: lambda: kernels.dropout(x, ids, p=0.5, key=KEY),
            "F.dropout": lambda: torch.nn.functional.dropout(x, 0.5),
        }

    return contenders


def cases() -> list[Case]:
    """All cases; `quick` ones are those of `run.py --quick`."""
    found = [
        Case(name="spmm", shape=str(w), dtype=str(d)[6:], contenders=_spmm(w, d), quick=w == 128)
        for w, d in [(32, torch.float32), (128, torch.float32), (256, torch.float32), (128, torch.bfloat16)]
    ]
    found.append(Case(name="spmm", shape="128", dtype="float64", contenders=_spmm(128, torch.float64)))
    found.append(Case(name="gat layer fwd+bwd", shape="4x32", dtype="float32", contenders=_gat_layer(4, 32)))
    for drop in (0.0, 0.5):
        for backward in (False, True):
            name = f"attend {'grad' if backward else 'forward'}{' dropout' if drop else ''}"
            contenders = _attend(4, 32, drop=drop, backward=backward)
            found.append(Case(name=name, shape="4x32", dtype="float32", contenders=contenders, quick=not drop))
    found.append(Case(name="extremum", shape="128", dtype="float32", contenders=_extremum(128), quick=False))
    for per_edge, width in ((False, 128), (True, 4)):
        name = f"dropout per {'edge' if per_edge else 'node'}"
        contenders = _dropout(per_edge=per_edge, width=width)
        found.append(Case(name=name, shape=str(width), dtype="float32", contenders=contenders))
    return found
