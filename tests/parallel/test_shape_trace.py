"""A model's aggregations are known before anything is sent; what cannot be trained is refused there."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from composing import configured, names
from gnnpar.models.gnn import ModelConfig
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.shape_trace import shape_trace
from gnnpar.partition.shard import cut
from gnnpar.verify.conformance import make_job, small_graph, train_in_threads


def shard_of(data):
    return cut(data, torch.zeros(data.num_nodes, dtype=torch.long), 1)[0]


@pytest.mark.parametrize("model", names("model"))
def test_every_model_is_one_fold_a_layer(model):
    data = small_graph()
    config = configured("model", model, "model.hidden=8", "model.num_layers=3")
    uses = shape_trace(config.build(data.num_features, 3, seed=0), shard_of(data))
    assert [use.layer for use in uses] == [0, 1, 2]
    assert [bool(use.pushed) for use in uses] == [model == "gat"] * 3


def test_rows_are_known_without_a_neighbour():
    data = small_graph()
    config = configured("model", "gat", "model.hidden=8", "model.heads=2", "model.attention_dropout=0.5")
    uses = shape_trace(config.build(data.num_features, 3, seed=0), shard_of(data))
    assert [[each.shape for each in use.src] for use in uses] == [[(2, 4), (2,)], [(1, 3), (1,)]]
    assert [each.shape for each in uses[0].pushed] == [(2, 4), (2,), (2,), (2,)]


class Forward:
    """A fold that somebody forgot to differentiate."""

    needs_src = linear = needs_edge_ids = False

    def init(self, num_dst, x):
        return ()

    def update(self, state, block, x):
        return (x.src[0].new_zeros(block.num_dst, *x.src[0].shape[1:]),)

    def finish(self, state):
        return state[0], ()


class ForwardConv(nn.Module):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.weight = nn.Linear(in_dim, out_dim)

    def forward(self, g, h):
        return g.aggregate(Forward(), g.source(lambda g, h: (self.weight(h),), h))


@dataclass(frozen=True, kw_only=True)
class ForwardModel(ModelConfig):
    def conv(self, in_dim, out_dim, *, index, aggregate_first):
        return ForwardConv(in_dim, out_dim)


def test_a_fold_without_a_gradient_is_refused_before_training():
    with pytest.raises(ValueError, match=r"the fold Forward of layer 0 has no gradient rule: give it a method grad"):
        train_in_threads(SAR(), ForwardModel(hidden=4), small_graph(), world=2)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("backward", "row"), [("pull", 40), ("push", 56)])
def test_a_budget_below_one_row_is_refused_before_training(backward, row):
    """One head of width 4 in fp64: 5 numbers a row pulled, 7 pushed; the widest row of all layers decides."""
    config = configured("model", "gat", "model.hidden=4", "model.heads=1")
    strategy = SAR(rounds=(row - 1) / 2**20, backward=backward)
    make_job(strategy, config, small_graph(), world=2)
    with pytest.raises(ValueError, match=f"holds no row of {row} bytes"):
        train_in_threads(strategy, config, small_graph(), world=2)
    assert train_in_threads(SAR(rounds=row / 2**20, backward=backward), config, small_graph(), world=2, epochs=1)
