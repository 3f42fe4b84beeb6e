"""Random graphs to measure on, drawn on the device itself: seconds for a hundred million edges on a GPU."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gnnpar_kernels import Csr

CHUNK = 1 << 24  # edges drawn at once: their random numbers are fp64


@dataclass(frozen=True, kw_only=True)
class Size:
    """A random graph. In-degrees and out-degrees follow the same law.

    `hub`: weight of the heaviest node; the lightest has 1. With hub=1 degrees are uniform, else they follow a power law
    with exponent 3 up to `hub`.
    """

    nodes: int
    edges: int
    hub: float = 60.0
    seed: int = 0

    def scaled(self, factor: float) -> "Size":
        """Return a size with the same mean degree and law on a share of the nodes."""
        return replace(self, nodes=max(2, round(self.nodes * factor)), edges=max(1, round(self.edges * factor)))


GRAPHS = {
    "power": Size(nodes=50_000, edges=1_000_000),
    "uniform": Size(nodes=50_000, edges=1_000_000, hub=1.0),
    "arxiv": Size(nodes=169_343, edges=2_300_000, hub=400.0),
    "reddit": Size(nodes=232_965, edges=115_000_000, hub=200.0),
    "products": Size(nodes=2_449_029, edges=124_000_000, hub=400.0),
    # nodes and edges of anemoi-core's pull request 631: h_to_h of level 6, h_to_era of n320 (here square and random)
    "mesh": Size(nodes=40_962, edges=327_660, hub=1.0),
    "grid": Size(nodes=542_080, edges=1_626_240, hub=1.0),
}
SMALL = Size(nodes=1000, edges=6000, hub=800.0)  # rows of every class of length, one of them cut into pieces


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Both orientations of a graph. Shapes: src, dst [E] int64; forward rows are destinations, reverse rows sources."""

    size: Size
    src: Tensor
    dst: Tensor
    forward: Csr
    reverse: Csr

    @property
    def device(self) -> torch.device:
        return self.src.device


def _weights(size: Size, generator: torch.Generator) -> Tensor:
    """Draw the weights of nodes. Shapes: -> [nodes] fp64."""
    uniform = torch.rand(size.nodes, dtype=torch.float64, device=generator.device, generator=generator)
    weights = uniform.pow(-0.5).clamp(max=size.hub)
    weights[0] = size.hub
    return weights


def _draw(upto: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw nodes by inversion of their distribution, since torch.multinomial supports at most 2^24 nodes.

    Shapes: upto [nodes] sums of the weights -> [count] int64.
    """
    parts = []
    for begin in range(0, count, CHUNK):
        size = min(CHUNK, count - begin)
        uniform = torch.rand(size, dtype=torch.float64, device=upto.device, generator=generator)
        parts.append(torch.searchsorted(upto, uniform * upto[-1], right=True).clamp_(max=len(upto) - 1))
    return torch.cat(parts)


def _csr(row: Tensor, column: Tensor, edge_ids: Tensor, nodes: int) -> Csr:
    """Build a CSR. Shapes: row [E] ascending."""
    indptr = torch.zeros(nodes + 1, dtype=torch.int32, device=row.device)
    indptr[1:] = torch.bincount(row, minlength=nodes).cumsum(0)
    return Csr(indptr, column.int(), None, edge_ids)


def draw(size: Size, *, device: str) -> Inputs:
    """Draw a graph of this size, with edges sorted by (destination, source). Every call on a device draws the same."""
    generator = torch.Generator(device).manual_seed(size.seed)
    upto = _weights(size, generator).cumsum(0)
    pairs = _draw(upto, size.edges, generator) * size.nodes + _draw(upto, size.edges, generator)
    pairs = pairs.sort().values
    dst, src = pairs // size.nodes, pairs % size.nodes
    del pairs
    order = torch.sort(src, stable=True).indices
    forward = _csr(dst, src, torch.arange(size.edges, device=device), size.nodes)
    return Inputs(size=size, src=src, dst=dst, forward=forward, reverse=_csr(src[order], dst[order], order, size.nodes))
