"""Attention by types of edges: `rgat` equals PyG's RGATConv, and strategies equal the single device, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import RGATConv

from composing import configured, names, rest_slow
from gnnpar.folds.edge_data import EdgeSizes
from gnnpar.models.initial import draw_glorot
from gnnpar.models.rgat import RGAT
from gnnpar.models.rgat import RGATConv as OurConv
from gnnpar.parallel.cagnet.strategy import Cagnet
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.local import Pass
from gnnpar.parallel.needs import refuse_edge_data
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import cut
from gnnpar.planner.extract import record
from gnnpar.training.result.export import Plain, traced
from gnnpar.verify.conformance import check, make_job, small_graph, train_in_threads
from graphs import with_edge_data
from outcomes import assert_equals_autograd

TYPES = 3
DATA = with_edge_data(small_graph(), types=TYPES, width=0)
KINDS: dict[str, dict[str, int]] = {"free": {}, "bases": {"num_bases": 2}, "blocks": {"num_blocks": 2}}
RGAT_2 = RGAT(hidden=8, heads=2, out_heads=2, num_bases=2, residual=True)
REFUSED = {"feature", "minibatch", "tag"}
SLOW = ("digest", "bns", "sancus", "cagnet")  # messages of others: rows of halos late, or broadcast
VARIANTS: dict[str, Any] = {
    "central": GraphParallel(overlap="central_marginal"),
    "out_of_core": SAR(logical_parts=3),
    "replicated": Cagnet(replication=2),
}


def strategy_of(name: str) -> Any:
    return VARIANTS[name] if name in VARIANTS else configured("strategy", name)


def view_of(data: Any) -> WholeGraph:
    shard = cut(data, torch.zeros(data.num_nodes, dtype=torch.int64), 1, edge_ids=True)[0]
    return WholeGraph(shard.to(torch.device("cpu"), torch.float64), Pass(0))


def compared(mine: Tensor, theirs: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Outputs, and the gradients of each pair."""
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    got = torch.autograd.grad(mine.square().sum(), [a for a, _ in pairs])
    want = torch.autograd.grad(theirs.square().sum(), [b for _, b in pairs])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b.view_as(a), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_equals_pyg(kind: str, within: bool, average: bool) -> None:
    """Outputs and the gradients of rows and of every parameter that a result depends on."""
    bases, blocks = KINDS[kind].get("num_bases"), KINDS[kind].get("num_blocks")
    shared = {"heads": 2, "average": average, "slope": 0.3, "attention_dropout": 0.0, "within": within}
    ours = OurConv(6, 4, **shared, relations=TYPES, bases=bases, blocks=blocks).double()
    draw_glorot(ours, 3)
    theirs = RGATConv(
        6,
        4 if average else 2,
        TYPES,
        num_bases=bases,
        num_blocks=blocks,
        attention_mechanism="within-relation" if within else "across-relation",
        heads=2,
        concat=not average,
        negative_slope=0.3,
    ).double()
    of_weights = theirs.weight if bases is None else theirs.basis
    matched = [(ours.neighbours, of_weights), (ours.query, theirs.q), (ours.key, theirs.k), (ours.bias, theirs.bias)]
    if ours.mixing is not None:
        matched.append((ours.mixing, theirs.att))
    with torch.no_grad():
        nn.init.uniform_(ours.bias)
        for mine, other in matched:
            other.copy_(mine)
    x = torch.randn(DATA.num_nodes, 6, dtype=torch.float64).requires_grad_()
    compared(ours(view_of(DATA), x), theirs(x, DATA.edge_index, DATA.edges.type), [*matched, (x, x)])


@pytest.mark.parametrize("name", rest_slow((name for name in names("strategy") if name not in REFUSED), *SLOW))
def test_every_strategy_equals_the_single_device_within_relations(name: str) -> None:
    """In its exact limit, and where it has an oracle, that; dropout on. Across relations: test_strategies.py."""
    cases = check(strategy_of(name), {"rgat": replace(RGAT_2, attention="within")}, worlds=(1, 2), dataset=DATA)
    assert cases
    for case in cases:
        assert case.passed, case


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_the_single_device(name: str) -> None:
    for case in check(strategy_of(name), {"rgat": replace(RGAT_2, attention="within")}, worlds=(2,), dataset=DATA):
        assert case.passed, case


@pytest.mark.parametrize("attention", ["across", "within"])
def test_attention_dropout_is_keyed_by_edge(attention: Any) -> None:
    config = replace(RGAT_2, attention=attention, attention_dropout=0.4)
    for case in check(GraphParallel(), {"rgat": config}, worlds=(3,), dataset=DATA):
        assert case.passed, case


@pytest.mark.parametrize("attention", ["across", "within"])
def test_stale_chunks_equal_autograd(attention: Any) -> None:
    config = replace(RGAT_2, attention=attention, num_layers=4)
    job = make_job(Hybrid(stages=2, parts=2, chunks=8, refresh=2), config, DATA, world=4, epochs=4)
    assert_equals_autograd(job, refresh=2, fresh=2.0, stale=0.0)


def test_bytes_are_those_of_one_relation() -> None:
    halo = [train_in_threads(GraphParallel(), RGAT_2, data, world=3).traffic[0] for data in (DATA, small_graph())]
    assert (halo[0]["forward"], halo[0]["backward"]) == (halo[1]["forward"], halo[1]["backward"])


@pytest.mark.parametrize("attention", ["across", "within"])
def test_the_planner_sees_the_rows(attention: Any) -> None:
    model = replace(RGAT_2, attention=attention, num_relations=TYPES).build(6, 3, seed=0)
    ir = record(model, 6)
    (fold,) = ir.folds(0)
    results = TYPES if attention == "within" else 1
    assert (fold.kind, fold.src, fold.out) == ("Generic", (6,), 8 * results)


def test_programs_hold_one_relation() -> None:
    one = RGAT_2.on(EdgeSizes()).build(6, 3, seed=0)
    x = torch.randn(DATA.num_nodes, 6)
    assert torch.allclose(traced(one).module()(x, DATA.edge_index), Plain(one)(x, DATA.edge_index), atol=1e-6)
    with pytest.raises(ValueError, match="attention by type of edge has no form in plain torch"):
        traced(RGAT_2.on(DATA.edge_sizes).build(6, 3, seed=0))


def test_what_cannot_run_is_one_line() -> None:
    with pytest.raises(ValueError, match="has types on edges, which strategy=minibatch does not carry"):
        refuse_edge_data(strategy_of("minibatch"), RGAT_2, {"type"}, None, "d", {"strategy": "minibatch"})
    with pytest.raises(ValueError, match="num_relations=2, but the edges of the dataset have 3 types"):
        RGAT(num_relations=2).on(DATA.edge_sizes)
    with pytest.raises(ValueError, match="exclude each other"):
        RGAT(num_bases=2, num_blocks=2)
    with pytest.raises(ValueError, match="Generic of layer 0 separates by neither") as caught:
        train_in_threads(strategy_of("feature"), RGAT_2, DATA, world=2)
    assert "\n" not in str(caught.value)
