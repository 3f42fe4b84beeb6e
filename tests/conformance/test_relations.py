"""Types of edges: `rgcn` under every strategy equals the single device, and that equals PyG's RGCNConv, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch_geometric.nn import FastRGCNConv, RGCNConv

from composing import configured, names
from gnnpar.models.pyg.model import PyG
from gnnpar.models.rgcn import RGCN
from gnnpar.models.rgcn import RGCNConv as OurConv
from gnnpar.parallel.cagnet.strategy import Cagnet
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.local import Pass
from gnnpar.parallel.needs import refuse_edge_data
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import cut
from gnnpar.verify.conformance import check, make_job, small_graph, train_in_threads
from gnnpar.verify.untouched import difference, prepared
from graphs import with_edge_data
from outcomes import assert_equals_autograd, assert_passed

TYPES = 3
DATA = with_edge_data(small_graph(), types=TYPES, width=0)
KINDS: dict[str, dict[str, int]] = {"free": {}, "bases": {"num_bases": 2}, "blocks": {"num_blocks": 2}}
RGCN_3 = RGCN(num_layers=3, hidden=8, num_bases=2)
VARIANTS: dict[str, Any] = {
    "central": GraphParallel(overlap="central_marginal"),
    "out_of_core": SAR(logical_parts=3),
    "replicated": Cagnet(replication=2),
    "mix": Hybrid(stages=1, parts=2, chunks=4, gradient="mix"),
}
NAMES = [*(name for name in names("strategy") if name != "tag"), *VARIANTS]


def strategy_of(name: str) -> Any:
    return VARIANTS[name] if name in VARIANTS else configured("strategy", name)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_equals_pyg(kind: str, fast: bool) -> None:
    """Outputs and the gradients of rows and of every parameter."""
    bases, blocks = KINDS[kind].get("num_bases"), KINDS[kind].get("num_blocks")
    ours = OurConv(6, 4, relations=TYPES, bases=bases, blocks=blocks).double()
    theirs = (FastRGCNConv if fast else RGCNConv)(6, 4, TYPES, num_bases=bases, num_blocks=blocks).double()
    torch.nn.init.xavier_uniform_(ours.own.weight)
    torch.nn.init.uniform_(ours.own.bias)
    state = {"weight": ours.neighbours, "root": ours.own.weight.T, "bias": ours.own.bias}
    theirs.load_state_dict(state if ours.mixing is None else {**state, "comp": ours.mixing})
    shard = cut(DATA, torch.zeros(DATA.num_nodes, dtype=torch.int64), 1)[0].to(torch.device("cpu"), torch.float64)
    x = torch.randn(DATA.num_nodes, 6, dtype=torch.float64)
    ends = torch.randn(DATA.num_nodes, 4, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.set_default_dtype(torch.float64)  # RGCNConv adds to zeros of the default
    try:
        expected = theirs(other, DATA.edge_index, DATA.edges.type)
    finally:
        torch.set_default_dtype(torch.float32)
    got = ours(WholeGraph(shard, Pass(0)), mine)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    (got * ends).sum().backward()
    (expected * ends).sum().backward()
    pairs = [(mine, other), (ours.neighbours, theirs.weight), (ours.own.bias, theirs.bias), (ours.mixing, theirs.comp)]
    for a, b in pairs:
        if a is not None and b is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)
    assert ours.own.weight.grad is not None
    torch.testing.assert_close(ours.own.weight.grad.T, theirs.root.grad, rtol=1e-9, atol=1e-12)


def test_all_that_carry_weights_carry_types() -> None:
    carried = {name: strategy_of(name).capabilities.edge_data for name in NAMES}
    assert {n for n, kinds in carried.items() if "weight" in kinds} == {n for n in NAMES if "type" in carried[n]}
    assert [n for n, kinds in carried.items() if "type" not in kinds] == ["minibatch"]


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_the_single_device(name: str) -> None:
    """In their exact limit, and where there is an oracle, that; dropout on. Others: test_strategies.py."""
    assert_passed(check(strategy_of(name), {"rgcn": RGCN_3}, worlds=(1, 2, 4), dataset=DATA))


@pytest.mark.parametrize(("rules", "fresh", "stale"), [({}, 2.0, 0.0), ({"gradient": "mix", "mixing": 0.3}, 1.7, 0.3)])
def test_stale_chunks_equal_autograd(rules: dict, fresh: float, stale: float) -> None:
    strategy = Hybrid(stages=2, parts=2, chunks=8, refresh=2, **rules)
    job = make_job(strategy, replace(RGCN_3, num_layers=4), DATA, world=4, epochs=4)
    assert_equals_autograd(job, refresh=2, fresh=fresh, stale=stale)


def test_bytes_are_those_of_one_sum() -> None:
    """A halo row travels once for all relations, whose number is in the formula nowhere."""
    halo = [train_in_threads(GraphParallel(), RGCN_3, data, world=3).traffic[0] for data in (DATA, small_graph())]
    assert halo[0]["forward"] == halo[1]["forward"]
    assert halo[0]["backward"] == halo[1]["backward"]


@pytest.mark.parametrize("name", ["graph_parallel", "sar", "bns"])
def test_a_cached_first_layer(name: str) -> None:
    limit = strategy_of(name).exact_limit()
    (case,) = check(limit, {"rgcn": RGCN_3}, worlds=(3,), dataset=DATA, first_layer="cached")
    assert case.passed, case


def test_a_strategy_that_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="has types on edges, which strategy=minibatch does not carry"):
        refuse_edge_data(strategy_of("minibatch"), RGCN_3, {"type"}, None, "d", {"strategy": "minibatch"})


def test_more_types_than_relations_are_refused() -> None:
    with pytest.raises(ValueError, match="num_relations=2, but the edges of the dataset have 3 types"):
        RGCN(num_relations=2).on(DATA.edge_sizes)
    with pytest.raises(ValueError, match="exclude each other"):
        RGCN(num_bases=2, num_blocks=2)
    with pytest.raises(ValueError, match="num_blocks=4 does not divide the widths of a layer, 6 and 8"):
        RGCN(num_blocks=4, hidden=8).on(DATA.edge_sizes).build(6, 3, seed=0)


TYPED = [("RGCNConv", {}), ("RGCNConv", {"num_bases": 2, "aggr": "sum"}), ("RGCNConv", {"num_blocks": 2})]
TYPED += [("FastRGCNConv", {"root_weight": False, "bias": False}), ("Shifted", {})]


@pytest.mark.parametrize(("kind", "options"), TYPED, ids=str)
def test_a_pyg_model_equals_itself_untouched(kind: str, options: dict[str, Any]) -> None:
    config = PyG(target="pyg_nets.Typed", kwargs={"kind": kind, **options}, self_loops=False)
    cases = check(GraphParallel(), {"pyg": config}, worlds=(3,))
    assert [case.reference for case in cases] == ["PyG", "single device"]
    assert_passed(cases)


def test_a_softmax_by_type_equals_itself_untouched() -> None:
    """RGATConv, on whole neighbourhoods. It has parameters that it never uses, which `gnnpar check` reports."""
    config = PyG(target="pyg_nets.Typed", kwargs={"kind": "RGATConv"}, self_loops=False)
    found = difference(config, prepared(small_graph(), config), 1e-9)
    unused = ("w", "l1", "b1", "l2", "b2")
    used = [error for name, error in found.gradients.items() if name.rpartition(".")[2] not in unused]
    assert max(found.loss, found.logits, *used) < 1e-9
    assert len(used) == 10
    two, one = (train_in_threads(GraphParallel(), config, DATA, world=world) for world in (2, 1))
    assert two.losses == pytest.approx(one.losses, rel=1e-12)


def test_sar_carries_pyg_relations() -> None:
    assert_passed(check(SAR(), {"pyg": PyG(target="pyg_nets.Typed")}, worlds=(2,)))


def test_what_a_pyg_model_does_with_types() -> None:
    mapped, own = (
        PyG(target="pyg_nets.Typed", kwargs={"kind": kind}, edge_types=3) for kind in ("RGCNConv", "Shifted")
    )
    assert mapped.ways()[0] == "conv1: RGCNConv, mapped to a sum by type of edge"
    assert mapped.edge_data == {"type"}
    assert not mapped.whole_neighborhoods
    assert own.whole_neighborhoods == ("conv1", "conv2")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"target": "pyg_nets.Typed", "edge_types": 0},
            "forward needs edge_type, and the edges of the dataset have no",
        ),
        (
            {"target": "pyg_nets.Typed", "kwargs": {"num_relations": 2}},
            "the graph has 3 types of edges, and the model reads 2 relations",
        ),
        ({"target": "pyg_nets.ByMask"}, "the model reads edge_type outside of a convolution"),
        ({"target": "pyg_nets.ByDictionary"}, "reads dictionaries by type (HeteroConv, HGTConv, to_hetero)"),
        ({"target": "pyg_nets.to_hetero"}, "reads dictionaries by type (HeteroConv, HGTConv, to_hetero)"),
    ],
)
def test_what_cannot_run_is_one_line(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the line is compared below
        run_typed(PyG(**fields))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def run_typed(config: PyG) -> None:
    """On the graph with types, or, of edge_types=0, built alone."""
    if config.edge_types == 0:
        config.build(6, 3, seed=0)
    else:
        train_in_threads(GraphParallel(), config, DATA, world=2)
