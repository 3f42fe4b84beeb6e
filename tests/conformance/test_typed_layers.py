"""Models of types: `rgcn`, `rgat` and `hgt` are PyG's RGCNConv, RGATConv and HGTConv. Strategies: test_edge_data.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch_geometric.data import HeteroData
from torch_geometric.nn import FastRGCNConv, HGTConv, RGATConv, RGCNConv

from composing import configured
from conformance.test_edge_data import ACROSS, HETERO, HGT_2, TYPED, WITHIN
from data.samples import hetero
from gnnpar.folds.edge_data import EdgeSizes
from gnnpar.models.hgt import HGT
from gnnpar.models.hgt import HGTConv as OurHGTConv
from gnnpar.models.initial import draw_glorot
from gnnpar.models.pyg.model import PyG
from gnnpar.models.rgat import RGAT
from gnnpar.models.rgat import RGATConv as OurRGATConv
from gnnpar.models.rgcn import RGCN
from gnnpar.models.rgcn import RGCNConv as OurRGCNConv
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.local import Pass
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import cut
from gnnpar.planner.extract import record
from gnnpar.training.result.export import Plain, traced
from gnnpar.verify.conformance import check, small_graph, train_in_threads
from gnnpar.verify.pyg_reference import difference, prepared
from outcomes import assert_passed

TYPES, KINDS, RELATIONS = 3, 3, 5
SHARES: dict[str, dict[str, int]] = {"free": {}, "bases": {"num_bases": 2}, "blocks": {"num_blocks": 2}}


def view_of(data: Any) -> WholeGraph:
    shard = cut(data, torch.zeros(data.num_nodes, dtype=torch.int64), 1, edge_ids=True)[0]
    return WholeGraph(shard.to(torch.device("cpu"), torch.float64), Pass(0))


def compared(mine: Tensor, theirs: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Outputs, and the gradients of each pair; of a matrix that PyG holds transposed as well."""
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    got = torch.autograd.grad(mine.square().sum(), [a for a, _ in pairs])
    want = torch.autograd.grad(theirs.square().sum(), [b for _, b in pairs])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b.view_as(a), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kind", SHARES)
def test_rgcn_equals_pyg(kind: str, fast: bool) -> None:
    """Outputs and the gradients of rows and of every parameter."""
    bases, blocks = SHARES[kind].get("num_bases"), SHARES[kind].get("num_blocks")
    ours = OurRGCNConv(RGCN(num_relations=TYPES, num_bases=bases, num_blocks=blocks), 6, 4).double()
    theirs = (FastRGCNConv if fast else RGCNConv)(6, 4, TYPES, num_bases=bases, num_blocks=blocks).double()
    torch.nn.init.xavier_uniform_(ours.own.weight)
    torch.nn.init.uniform_(ours.own.bias)
    state = {"weight": ours.neighbours, "root": ours.own.weight.T, "bias": ours.own.bias}
    theirs.load_state_dict(state if ours.mixing is None else {**state, "comp": ours.mixing})
    x = torch.randn(TYPED.num_nodes, 6, dtype=torch.float64)
    ends = torch.randn(TYPED.num_nodes, 4, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.set_default_dtype(torch.float64)  # RGCNConv adds to zeros of the default
    try:
        expected = theirs(other, TYPED.edge_index, TYPED.edges.type)
    finally:
        torch.set_default_dtype(torch.float32)
    got = ours(view_of(TYPED), mine)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    (got * ends).sum().backward()
    (expected * ends).sum().backward()
    pairs = [(mine, other), (ours.neighbours, theirs.weight), (ours.own.bias, theirs.bias), (ours.mixing, theirs.comp)]
    for a, b in pairs:
        if a is not None and b is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)
    assert ours.own.weight.grad is not None
    torch.testing.assert_close(ours.own.weight.grad.T, theirs.root.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("kind", SHARES)
def test_rgat_equals_pyg(kind: str, within: bool, average: bool) -> None:
    """Outputs and the gradients of rows and of every parameter that a result depends on."""
    bases, blocks = SHARES[kind].get("num_bases"), SHARES[kind].get("num_blocks")
    config = RGAT(hidden=8, heads=2, out_heads=2, slope=0.3, attention="within" if within else "across")
    config = replace(config, num_relations=TYPES, num_bases=bases, num_blocks=blocks)
    ours = OurRGATConv(config, 6, 4, index=1 if average else 0).double()  # the last layer averages its heads
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
    x = torch.randn(TYPED.num_nodes, 6, dtype=torch.float64).requires_grad_()
    compared(ours(view_of(TYPED), x), theirs(x, TYPED.edge_index, TYPED.edges.type), [*matched, (x, x)])


def of_pyg(theirs: Any, data: HeteroData, ours: OurHGTConv) -> list[tuple[torch.Tensor, torch.Tensor]]:
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


def test_hgt_equals_pyg() -> None:
    """Outputs and the gradients of rows and of every parameter."""
    gen, data, heads, width = torch.Generator().manual_seed(1), hetero(), 2, 8
    data["venue"].x = torch.zeros(4, 0)
    theirs = HGTConv(width, width, data.metadata(), heads=heads).double()
    config = HGT(hidden=width, heads=heads, num_node_types=KINDS, num_relations=RELATIONS)
    ours = OurHGTConv(config, width, width).double()
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
    x = torch.randn(HETERO.num_nodes, width, dtype=torch.float64, generator=gen).requires_grad_()
    counts = [data[kind].num_nodes for kind in data.node_types]
    kinds = one_hot(torch.repeat_interleave(torch.arange(KINDS), torch.tensor(counts))).double()
    mine = ours(view_of(HETERO), x, kinds)
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


@pytest.mark.parametrize(
    ("config", "sizes", "fold"),
    [
        (replace(ACROSS, num_relations=TYPES), 6, ("Generic", (6,), 8)),
        (replace(WITHIN, num_relations=TYPES), 6, ("Generic", (6,), 8 * TYPES)),
        (replace(HGT_2, num_relations=RELATIONS), 9, ("Generic", (8, 8), 8)),
    ],
)
def test_the_planner_sees_the_rows(config: Any, sizes: int, fold: Any) -> None:
    """Of rgat the results, of hgt keys and values."""
    model = config.build(sizes, 3, seed=0)
    (found,) = record(model, sizes).folds(0)
    assert (found.kind, found.src, found.out) == fold
    assert config.__class__ is not HGT_2.__class__ or model.activation_widths(1) == (8, KINDS)


def test_programs_hold_one_relation() -> None:
    one = ACROSS.on(EdgeSizes()).build(6, 3, seed=0)
    x = torch.randn(TYPED.num_nodes, 6)
    assert torch.allclose(traced(one).module()(x, TYPED.edge_index), Plain(one)(x, TYPED.edge_index), atol=1e-6)


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (
            lambda: RGCN(num_relations=2).on(TYPED.edge_sizes),
            "num_relations=2, but the edges of the dataset have 3 types",
        ),
        (
            lambda: RGAT(num_relations=2).on(TYPED.edge_sizes),
            "num_relations=2, but the edges of the dataset have 3 types",
        ),
        (
            lambda: replace(HGT_2, num_relations=2).on(HETERO.edge_sizes),
            "num_relations=2, but the edges of the dataset have 5 types",
        ),
        (lambda: RGCN(num_bases=2, num_blocks=2), "exclude each other"),
        (lambda: RGAT(num_bases=2, num_blocks=2), "exclude each other"),
        (
            lambda: RGCN(num_blocks=4, hidden=8).on(TYPED.edge_sizes).build(6, 3, seed=0),
            "num_blocks=4 does not divide the widths of a layer, 6 and 8",
        ),
        (
            lambda: train_in_threads(configured("strategy", "feature"), ACROSS, TYPED, world=2),
            "Generic of layer 0 separates by neither",
        ),
        (
            lambda: HGT_2.build(3, 3, seed=0),
            "num_node_types=3 reads so many columns at the end of .* which there are 3",
        ),
        (
            lambda: replace(HGT_2, hidden=9).build(9, 3, seed=0),
            "hidden=9 does not divide into model.heads=2 heads: use hidden=10",
        ),
        (
            lambda: traced(HGT_2.on(EdgeSizes(types=2)).build(9, 3, seed=0)),
            "attention by type of edge has no form in plain torch",
        ),
        (
            lambda: traced(ACROSS.on(TYPED.edge_sizes).build(6, 3, seed=0)),
            "attention by type of edge has no form in plain torch",
        ),
    ],
)
def test_what_cannot_run_is_one_line(run: Callable[[], object], line: str) -> None:
    with pytest.raises(ValueError, match=line) as caught:
        run()
    assert "\n" not in str(caught.value)


OF_PYG = [("RGCNConv", {}), ("RGCNConv", {"num_bases": 2, "aggr": "sum"}), ("RGCNConv", {"num_blocks": 2})]
OF_PYG += [("FastRGCNConv", {"root_weight": False, "bias": False}), ("Shifted", {})]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "options"), OF_PYG, ids=str)
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
    two, one = (train_in_threads(GraphParallel(), config, TYPED, world=world) for world in (2, 1))
    assert two.losses == pytest.approx(one.losses, rel=1e-12)


def test_what_a_pyg_model_does_with_types() -> None:
    mapped, own = (
        PyG(target="pyg_nets.Typed", kwargs={"kind": kind}, edge_types=3) for kind in ("RGCNConv", "Shifted")
    )
    assert mapped.aggregation_paths()[0] == "conv1: RGCNConv, mapped to a sum by type of edge"
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
def test_pyg_models_of_types_that_cannot_run_are_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the line is compared below
        run_typed(PyG(**fields))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def run_typed(config: PyG) -> None:
    """On the graph with types, or, of edge_types=0, built alone."""
    if config.edge_types == 0:
        config.build(6, 3, seed=0)
    else:
        train_in_threads(GraphParallel(), config, TYPED, world=2)
