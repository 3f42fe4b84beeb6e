"""A user's own layer with edge features runs under every overlap and cached, equal to the single device."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from gnnpar.folds.generic import Generic
from gnnpar.models.gnn import ModelConfig
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.single.strategy import Single
from gnnpar.verify.conformance import check, small_graph, train_in_threads
from outcomes import assert_passed


def _score(src, dst, edge, shared):
    return (torch.tanh(src[0] + dst[0] + edge[0]) * shared[0]).sum(-1, keepdim=True)


def _value(src, dst, edge, shared):
    return (src[0] * edge[0]).unsqueeze(1)


class EdgeConv(nn.Module):
    """Attention whose scores and values read a learned function of the edge."""

    glorot = ("of_edge", "attention")
    needs_edge_ids = True

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Linear(in_dim, out_dim)
        self.of_edge = nn.Parameter(torch.empty(1, out_dim))
        self.attention = nn.Parameter(torch.empty(1, out_dim))

    def message(self, g, h):
        return (self.weight(h),)

    def forward(self, g, h):
        src = g.source(self.message, h)
        edge = torch.sin(g.edge_ids.to(h.dtype) * 0.37)[:, None] * self.of_edge
        agg = Generic(value=_value, score=_score, dropout=g.edge_dropout(0.3))
        return g.aggregate(agg, src, (self.weight(h),), (edge,), (self.attention,)).flatten(1)


@dataclass(frozen=True, kw_only=True)
class EdgeModel(ModelConfig):
    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        return EdgeConv(in_dim, out_dim)


@pytest.mark.quick(1)
@pytest.mark.parametrize("first_layer", ["live", "cached"])
@pytest.mark.parametrize("overlap", ["none", "edges", "central_marginal"])
def test_edge_rows_stay_with_their_edges(overlap, first_layer):
    models = {"edge": EdgeModel(hidden=4)}
    assert_passed(check(GraphParallel(overlap=overlap), models, worlds=(1, 3), first_layer=first_layer))


def test_the_edge_operand_matters():
    config, data = EdgeModel(hidden=4), small_graph()
    gradient = train_in_threads(Single(), config, data, world=1).gradients[0]
    assert float(gradient["layers.0.conv.of_edge"].abs().max()) > 1e-4


def test_without_edge_ids_the_view_says_what_to_do():
    class Forgetful(EdgeConv):
        needs_edge_ids = False

    @dataclass(frozen=True, kw_only=True)
    class ForgetfulModel(ModelConfig):
        def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
            return Forgetful(in_dim, out_dim)

    with pytest.raises(ValueError, match="give the model needs_edge_ids = True"):
        train_in_threads(Single(), ForgetfulModel(hidden=4), small_graph(), world=1)
