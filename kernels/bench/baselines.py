"""What one would use instead of an op. Every builder returns the call to be timed; all it can prepare, it prepares."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from gnnpar_kernels import Csr

Run = Callable[[], object]
Build = Callable[[], Run]  # called just before the contender runs: may lack memory or a package

PYG, PYG_V2 = "PyG GATConv", "PyG GATv2Conv"
OPTIONAL = ("torch_geometric", "torch_sparse", "turbo_gnn")


def missing() -> list[str]:
    """Return optional packages that are not installed; their contenders are left out."""
    return [name for name in OPTIONAL if find_spec(name) is None]


def csr_name(device: torch.device) -> str:
    """Whose product of a CSR and a dense matrix torch takes on this device."""
    return "cuSPARSE" if device.type == "cuda" else "torch CSR product"


def spmm(csr: Csr, row: Tensor, column: Tensor, x: Tensor) -> dict[str, Build]:
    """Return the sum over neighbours by others. Shapes: row, column [E] int64, the edges of csr; x [N, F] -> [N, F]."""
    name = csr_name(x.device)
    contenders: dict[str, Build] = {
        name: lambda: lambda: _matrix(csr, x) @ x,
        f"{name}, cached": lambda: partial(torch.matmul, _matrix(csr, x), x),
        "index_add": lambda: lambda: torch.zeros_like(x).index_add_(0, row, x[column]),
    }
    if find_spec("torch_sparse"):
        contenders["torch_sparse"] = partial(_torch_sparse, csr, x)
    if find_spec("turbo_gnn"):
        contenders["Turbo-GNN"] = _turbo_gnn
    return contenders


def _matrix(csr: Csr, x: Tensor) -> Tensor:
    ones = torch.ones(csr.indices.shape[0], dtype=x.dtype, device=x.device)
    return torch.sparse_csr_tensor(csr.indptr, csr.indices, ones, (x.shape[0], x.shape[0]), check_invariants=False)


def _torch_sparse(csr: Csr, x: Tensor) -> Run:
    from torch_sparse import SparseTensor, matmul  # pyright: ignore[reportMissingImports]

    sizes = (x.shape[0], x.shape[0])
    matrix = SparseTensor(
        rowptr=csr.indptr.long(), col=csr.indices.long(), sparse_sizes=sizes, is_sorted=True, trust_data=True
    )
    return lambda: matmul(matrix, x, reduce="sum")


def _turbo_gnn() -> Run:
    raise NotImplementedError("installed, but its call is not written here")


def gat_layer(
    src: Tensor, dst: Tensor, x: Tensor, grad_out: Tensor, *, heads: int, width: int, v2: bool = False
) -> dict[str, Build]:
    """Return a GAT or GATv2 layer of PyG, forward and backward. Shapes: src, dst [E], x, grad_out
    [N, heads * width]."""
    if find_spec("torch_geometric") is None:
        return {}
    return {PYG_V2 if v2 else PYG: partial(_gat_conv, src, dst, x, grad_out, heads, width, v2)}


def _gat_conv(src: Tensor, dst: Tensor, x: Tensor, grad_out: Tensor, heads: int, width: int, v2: bool) -> Run:
    from torch_geometric.nn import GATConv, GATv2Conv

    conv = GATv2Conv if v2 else GATConv
    layer = conv(heads * width, width, heads, add_self_loops=False).to(x.device, x.dtype)
    edge_index = torch.stack([src, dst])
    wanted = (x, *layer.parameters())
    return lambda: torch.autograd.grad(layer(x, edge_index), wanted, grad_out)


def extremum(row: Tensor, column: Tensor, x: Tensor) -> dict[str, Build]:
    """Maximum over neighbours without its winner. Shapes: row, column [E], x [N, F]."""

    def build() -> Run:
        where, empty = row[:, None].expand(-1, x.shape[1]), torch.full_like(x, -torch.inf)
        return lambda: empty.scatter_reduce(0, where, x[column], "amax", include_self=False)

    return {"scatter_reduce, no winner": build}
