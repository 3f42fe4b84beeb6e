"""Rule 17 of the protocol, measured without gnnpar's own layers: small models, trained with and without the cut edges.

A cut edge that is silenced delivers zeros and takes no gradient back (what `codec=drop` does); degrees stay global and
evaluation is exact. In GAT the zero row still takes part in the softmax.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pymetis
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnpar.data import Dataset


class _SymmetricSum(torch.autograd.Function):
    """Sum over neighbours of an undirected graph, so the gradient is the same sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, indptr: Tensor) -> Tensor:
        ctx.save_for_backward(indices, indptr)
        return F.embedding_bag(indices, x, indptr, mode="sum", include_last_offset=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        indices, indptr = ctx.saved_tensors
        total = F.embedding_bag(indices, grads[0].contiguous(), indptr, mode="sum", include_last_offset=True)
        return total, None, None


@dataclass(frozen=True, eq=False)
class Cut:
    """A dataset and a METIS partition of it."""

    data: Dataset
    part: Tensor  # [N]
    crossing: Tensor  # [E] bool

    @classmethod
    def of(cls, data: Dataset, parts: int) -> "Cut":
        src, dst = data.edge_index
        kept = src != dst
        indptr = _indptr(dst[kept], data.num_nodes)
        graph = pymetis.CSRAdjacency(indptr.numpy(), src[kept].numpy())
        _, membership = pymetis.part_graph(parts, graph, recursive=False)
        part = torch.tensor(membership)
        return cls(data, part, part[src] != part[dst])

    @property
    def alpha(self) -> float:
        """Halo rows of all parts per node: pairs (part, remote source of it)."""
        src, dst = self.data.edge_index
        rows = self.part[dst[self.crossing]] * self.data.num_nodes + src[self.crossing]
        return len(torch.unique(rows)) / self.data.num_nodes

    def csr(self, *, silenced: bool) -> tuple[Tensor, Tensor]:
        src, dst = self.data.edge_index
        kept = ~self.crossing if silenced else torch.ones_like(self.crossing)
        return src[kept].contiguous(), _indptr(dst[kept], self.data.num_nodes)


def _indptr(dst: Tensor, num_nodes: int) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(dst, minlength=num_nodes).cumsum(0)])


class Model(nn.Module):
    """Two layers, 64 hidden, dropout 0.5 between them: gcn, sage (mean), gat (4 heads, then 1) or mlp."""

    def __init__(self, kind: str, cut: Cut):
        super().__init__()
        self.kind, self.cut = kind, cut
        widths, self.heads = (cut.data.num_features, 64, cut.data.num_classes), (4, 1)
        self.linear = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.own = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))
        shapes = [(2, h, b // h) for h, b in zip(self.heads, widths[1:], strict=True)]
        self.scores = nn.ParameterList(nn.init.xavier_uniform_(torch.empty(shape)) for shape in shapes)
        self.degree = cut.data.in_degree.float()[:, None]
        self.graphs = {silenced: cut.csr(silenced=silenced) for silenced in (False, True)}

    def forward(self, *, silenced: bool) -> Tensor:
        x = self.cut.data.x
        for layer, linear in enumerate(self.linear):
            z = linear(x)
            if self.kind == "gcn":
                z = self.degree.rsqrt() * _SymmetricSum.apply(self.degree.rsqrt() * z, *self.graphs[silenced])
            elif self.kind == "sage":
                z = _SymmetricSum.apply(z, *self.graphs[silenced]) / self.degree + self.own[layer](x)
            elif self.kind == "gat":
                z = self._attend(z, layer, silenced=silenced)
            x = F.dropout(F.relu(z), 0.5, self.training) if layer == 0 else z
        return x

    def _attend(self, z: Tensor, layer: int, *, silenced: bool) -> Tensor:
        src, dst = self.cut.data.edge_index
        z = z.unflatten(1, (self.heads[layer], -1))
        heard = (~self.cut.crossing).float()[:, None] if silenced else torch.ones(len(src), 1)
        score = F.leaky_relu(
            (z * self.scores[layer][0]).sum(-1)[src] * heard + (z * self.scores[layer][1]).sum(-1)[dst], 0.2
        )
        weight = (score - score.detach().max()).exp()
        total = torch.zeros(len(z), z.shape[1]).index_add(0, dst, weight)
        message = (weight / total[dst] * heard)[:, :, None] * z[src]
        return torch.zeros_like(z).index_add(0, dst, message).flatten(1)


def accuracy(cut: Cut, kind: str, *, silenced: bool = False, seeds: range = range(2), epochs: int = 30) -> float:
    """Test accuracy in percent after `epochs` steps of Adam at 0.01, mean over seeds."""
    data, scores = cut.data, []
    for seed in seeds:
        torch.manual_seed(seed)
        model = Model(kind, cut)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(epochs):
            optimizer.zero_grad()
            F.cross_entropy(model(silenced=silenced)[data.train_mask], data.y[data.train_mask]).backward()
            optimizer.step()
        with torch.no_grad():
            right = model.eval()(silenced=False).argmax(1) == data.y
        scores.append(100 * right[data.test_mask].float().mean().item())
    return sum(scores) / len(scores)
