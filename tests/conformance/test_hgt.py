"""Attention by types of nodes and edges: `hgt` is PyG's HGTConv, and strategies equal the single device, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import one_hot
from torch_geometric.data import HeteroData
from torch_geometric.nn import HGTConv

from composing import names, rest_slow
from conformance.test_relational_attention import SLOW, strategy_of
from data.samples import hetero
from gnnpar.data.preprocess import prepare
from gnnpar.data.saved import PT, raw_graph
from gnnpar.folds.edge_data import EdgeSizes
from gnnpar.models.hgt import HGT
from gnnpar.models.hgt import HGTConv as OurConv
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.local import Pass
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import cut
from gnnpar.planner.extract import record
from gnnpar.training.result.export import traced
from gnnpar.verify.conformance import check, make_job, small_graph
from graphs import with_edge_data
from outcomes import assert_equals_autograd

KINDS, RELATIONS = 3, 5
TYPED = prepare(raw_graph("typed", hetero()), PT(self_loops="keep", drop_duplicates=False), seed=0)
HGT_2 = HGT(hidden=8, heads=2, num_node_types=KINDS, residual=True)
REFUSED = {"minibatch", "tag"}


def of_pyg(theirs: Any, data: HeteroData, ours: OurConv) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Dense layers: (our parameter, theirs stacked as ours are). theirs: a HGTConv."""
    of_kind = [theirs.kqv_lin.lins[kind] for kind in data.node_types]
    pairs = []
    for i, layer in enumerate((ours.key, ours.query, ours.value)):
        pairs.append((layer.weight, torch.stack([each.weight.chunk(3)[i].t() for each in of_kind])))
        pairs.append((layer.bias, torch.stack([each.bias.chunk(3)[i] for each in of_kind])))
    outs = [theirs.out_lin.lins[kind] for kind in data.node_types]
    return [
        *pairs,
        (ours.out.weight, torch.stack([each.weight.t() for each in outs])),
        (ours.out.bias, torch.stack([each.bias for each in outs])),
    ]


def test_a_layer_equals_pyg() -> None:
    """Outputs and the gradients of rows and of every parameter."""
    gen, data, heads, width = torch.Generator().manual_seed(1), hetero(), 2, 8
    data["venue"].x = torch.zeros(4, 0)
    theirs = HGTConv(width, width, data.metadata(), heads=heads).double()
    ours = OurConv(
        width, width, width=width, heads=heads, kinds=KINDS, relations=RELATIONS, attention_dropout=0.0
    ).double()
    relations = ["__".join(kind) for kind in data.edge_types]
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(-0.6, 0.6, generator=gen)
        for mine, other in of_pyg(theirs, data, ours):
            mine.copy_(other)
        ours.attend.copy_(theirs.k_rel.weight.view_as(ours.attend))
        ours.pass_on.copy_(theirs.v_rel.weight.view_as(ours.pass_on))
        ours.prior.copy_(torch.cat([theirs.p_rel[name] for name in relations]).t())
        assert ours.skip is not None
        ours.skip.copy_(torch.stack([theirs.skip[kind] for kind in data.node_types]).flatten())
    x = torch.randn(TYPED.num_nodes, width, dtype=torch.float64, generator=gen).requires_grad_()
    counts = [data[kind].num_nodes for kind in data.node_types]
    kinds = one_hot(torch.repeat_interleave(torch.arange(KINDS), torch.tensor(counts))).double()
    shard = cut(TYPED, torch.zeros(TYPED.num_nodes, dtype=torch.int64), 1)[0].to(torch.device("cpu"), torch.float64)
    mine = ours(WholeGraph(shard, Pass(0)), x, kinds)
    found = theirs(dict(zip(data.node_types, x.split(counts), strict=True)), data.edge_index_dict)
    other = torch.cat([found[kind] for kind in data.node_types])
    torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
    of_ours = torch.autograd.grad(mine.square().sum(), [x, ours.attend, ours.pass_on, ours.prior, ours.key.weight])
    of_theirs = torch.autograd.grad(
        other.square().sum(),
        [x, theirs.k_rel.weight, theirs.v_rel.weight]
        + [theirs.p_rel[name] for name in relations]
        + [theirs.kqv_lin.lins[kind].weight for kind in data.node_types],
    )
    priors, lins = of_theirs[3 : 3 + RELATIONS], of_theirs[3 + RELATIONS :]
    expected = [*of_theirs[:3], torch.cat(priors).t(), torch.stack([each.chunk(3)[0].t() for each in lins])]
    for a, b in zip(of_ours, expected, strict=True):
        torch.testing.assert_close(a, b.view_as(a), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", rest_slow((name for name in names("strategy") if name not in REFUSED), *SLOW))
def test_every_strategy_equals_the_single_device(name: str) -> None:
    """In its exact limit, and where it has an oracle, that; dropout on, three types of nodes, five of edges."""
    cases = check(strategy_of(name), {"hgt": HGT_2}, worlds=(1, 2), dataset=TYPED)
    assert cases
    for case in cases:
        assert case.passed, case


@pytest.mark.parametrize("changes", [{"attention_dropout": 0.4}, {"encoder": "linear", "decoder": "linear"}])
def test_options_equal_the_single_device(changes: dict[str, Any]) -> None:
    for case in check(GraphParallel(), {"hgt": replace(HGT_2, **changes)}, worlds=(3,), dataset=TYPED):
        assert case.passed, case


def test_stale_chunks_equal_autograd() -> None:
    data = with_edge_data(small_graph(), types=3, width=0)
    data.x[:, -2:] = one_hot(torch.arange(data.num_nodes) % 2)
    config = HGT(hidden=8, heads=2, num_node_types=2, num_layers=4)
    job = make_job(Hybrid(stages=2, parts=2, chunks=8, refresh=2), config, data, world=4, epochs=4)
    assert_equals_autograd(job, refresh=2, fresh=2.0, stale=0.0)


def test_the_planner_sees_keys_and_values() -> None:
    model = replace(HGT_2, num_relations=RELATIONS).build(9, 3, seed=0)
    ir = record(model, 9)
    (fold,) = ir.folds(0)
    assert (fold.kind, fold.src, fold.out) == ("Generic", (8, 8), 8)
    assert model.carry_widths(1) == (8, KINDS)


def test_what_cannot_run_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"num_node_types=3 reads so many columns at the end of .* which there are 3"):
        HGT_2.build(3, 3, seed=0)
    with pytest.raises(ValueError, match=r"hidden=9 does not divide into model.heads=2 heads: use hidden=10"):
        replace(HGT_2, hidden=9).build(9, 3, seed=0)
    with pytest.raises(ValueError, match="num_relations=2, but the edges of the dataset have 5 types"):
        replace(HGT_2, num_relations=2).on(TYPED.edge_sizes)
    with pytest.raises(ValueError, match="attention by type of edge has no form in plain torch"):
        traced(HGT_2.on(EdgeSizes(types=2)).build(9, 3, seed=0))
