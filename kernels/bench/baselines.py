"""Alternatives to an op. A builder prepares as much as possible, and returns the call to be timed."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bench.graphs import Inputs
from gnnpar_kernels import Csr

Run = Callable[[], object]
Build = Callable[[], Run]  # called just before the contender runs; may fail for lack of memory or a package

PYG, PYG_V2, PYG_DOT, ANEMOI = "PyG GATConv", "PyG GATv2Conv", "PyG TransformerConv", "anemoi-core"
OPTIONAL = ("torch_geometric", "torch_sparse")
anemoi_core: Path | None = None
"""Checkout of github.com/ecmwf/anemoi-core (Apache 2.0), to import its Triton kernel from."""


def missing() -> list[str]:
    """Return optional packages that are not installed; their contenders are omitted."""
    absent = [name for name in OPTIONAL if find_spec(name) is None]
    return absent if anemoi_core else [*absent, "anemoi-core (--anemoi PATH)"]


def csr_name(device: torch.device) -> str:
    """Return the library of torch's product of a CSR and a dense matrix on this device."""
    return "cuSPARSE" if device.type == "cuda" else "torch CSR product"


def spmm(csr: Csr, row: Tensor, column: Tensor, x: Tensor) -> dict[str, Build]:
    """Return other sums over neighbours. Shapes: row, column [E] int64, the edges of csr; x [N, F] -> [N, F]."""
    name = csr_name(x.device)
    contenders: dict[str, Build] = {
        name: lambda: lambda: _matrix(csr, x) @ x,
        f"{name}, cached": lambda: partial(torch.matmul, _matrix(csr, x), x),
        "index_add": lambda: lambda: torch.zeros_like(x).index_add_(0, row, x[column]),
    }
    if find_spec("torch_sparse"):
        contenders["torch_sparse"] = partial(_torch_sparse, csr, x)
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


class Layer(NamedTuple):
    """A layer of attention on a graph. Shapes: x, grad_out [N, heads * width], edge [E, A] in the graph's order."""

    data: Inputs
    x: Tensor
    grad_out: Tensor
    heads: int
    width: int
    edge: Tensor | None = None

    def by_head(self, weight: Tensor) -> Tensor:
        """Return the product of the rows with a matrix, by head. Shapes: weight [H D, F] -> [N, H, D]."""
        return (self.x @ weight.t()).view(-1, self.heads, self.width)

    def drawn(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Draw trained matrices and vectors of the rows' type."""
        like = self.x
        return [(0.1 * torch.randn(shape, device=like.device)).to(like.dtype).requires_grad_() for shape in shapes]


def attention(name: str, layer: Layer) -> dict[str, Build]:
    """Return other implementations of the layer, forward and backward: PyG's convolution of this name, also compiled,
    and kernels of dot-product attention."""
    found: dict[str, Build] = {}
    if find_spec("torch_geometric"):
        found[name] = partial(_pyg, name, layer, compiled=False)
        found[f"{name}, compiled"] = partial(_pyg, name, layer, compiled=True)
    if name != PYG_DOT:
        return found
    if anemoi_core is not None and layer.edge is not None:  # its kernel requires edge rows
        found[ANEMOI] = partial(_anemoi, anemoi_core, layer)
    return found


def _pyg(name: str, layer: Layer, *, compiled: bool) -> Run:
    from torch_geometric import nn

    x, sizes = layer.x, (layer.heads * layer.width, layer.width, layer.heads)
    if name == PYG_DOT:
        edge_dim = None if layer.edge is None else layer.edge.shape[1]
        conv = nn.TransformerConv(*sizes, edge_dim=edge_dim, bias=False, root_weight=False)
    else:
        conv = (nn.GATv2Conv if name == PYG_V2 else nn.GATConv)(*sizes, add_self_loops=False)
    conv = conv.to(x.device, x.dtype)
    read = [p for name, p in conv.named_parameters() if not name.startswith("lin_skip")]  # unused without root_weight
    wanted, run = (x, *read), torch.compile(conv, dynamic=False) if compiled else conv
    given = (torch.stack([layer.data.src, layer.data.dst]), *(() if layer.edge is None else (layer.edge,)))
    return lambda: torch.autograd.grad(run(x, *given), wanted, layer.grad_out)


def weights_of(layer: Layer) -> list[Tensor]:
    """Return matrices for queries, keys and values, and for rows of edges."""
    total = layer.heads * layer.width
    return layer.drawn(*[(total, total)] * 3, *([] if layer.edge is None else [(total, layer.edge.shape[1])]))


def _anemoi(folder: Path, layer: Layer) -> Run:
    path = folder / "models/src/anemoi/models/triton/gt.py"
    if not path.is_file():
        raise ImportError(f"no {path}")
    spec = spec_from_file_location("anemoi_gt", path)
    assert spec is not None and spec.loader is not None
    gt = module_from_spec(spec)
    spec.loader.exec_module(gt)
    data, x, weights, edge = layer.data, layer.x, weights_of(layer), layer.edge
    assert edge is not None
    inward = data.src, data.forward.indptr.long()
    outward = data.reverse.indptr.long(), data.reverse.edge_ids, data.dst

    def run() -> object:
        rows = [
            (each @ w.t()).unflatten(1, (layer.heads, -1)) for each, w in zip((x, x, x, edge), weights, strict=True)
        ]
        out = gt.graph_transformer_attention_conv(*rows, inward, outward)
        return torch.autograd.grad(out.flatten(1), (x, *weights), layer.grad_out)

    return run


def extremum(row: Tensor, column: Tensor, x: Tensor) -> dict[str, Build]:
    """Return the maximum over neighbours, without its winner. Shapes: row, column [E], x [N, F]."""

    def build() -> Run:
        where, empty = row[:, None].expand(-1, x.shape[1]), torch.full_like(x, -torch.inf)
        return lambda: empty.scatter_reduce(0, where, x[column], "amax", include_self=False)

    return {"scatter_reduce, no winner": build}
