"""Models that read types or attributes of edges: their prices, their programs, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from composing import configured
from conformance.test_edge_data import ACROSS, HETERO, HGT_2, TYPED, WITHIN
from gnnpar.folds.edge_data import EdgeSizes
from gnnpar.models.rgat import RGAT
from gnnpar.models.rgcn import RGCN
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.local import Pass
from gnnpar.partition.shard import cut
from gnnpar.planner.extract import record
from gnnpar.training.result.export import Plain, traced
from gnnpar.verify.conformance import small_graph, train_in_threads
from outcomes import refused

TYPES, KINDS, RELATIONS, WIDTH = 3, 3, 5, 3


@pytest.mark.parametrize("model", ["gine", "transformer"])
def test_the_planner_sees_what_edges_carry(model: str) -> None:
    plain, wide = (configured("model", model, f"model.edge_dim={dim}").build(6, 3, seed=0) for dim in (0, WIDTH))
    for net, edge in ((wide, (WIDTH,)), (plain, ())):
        ir = record(net, 6)
        assert [fold.edge for i in range(2) for fold in ir.folds(i)] == [edge] * 2


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


def without_attributes(model: str) -> None:
    data = small_graph()
    shard = cut(data, torch.zeros(data.num_nodes).long(), 1, edge_ids=True)[0]
    configured("model", model, f"model.edge_dim={WIDTH}").build(6, 3, seed=0)(WholeGraph(shard, Pass(0)), shard.x)


TYPES_LINE = "num_relations=2, but the edges of the dataset have {} types"
CANNOT: list[tuple[Callable[[], object], str]] = [
    (lambda: RGCN(num_relations=2).on(TYPED.edge_sizes), TYPES_LINE.format(3)),
    (lambda: RGAT(num_relations=2).on(TYPED.edge_sizes), TYPES_LINE.format(3)),
    (lambda: replace(HGT_2, num_relations=2).on(HETERO.edge_sizes), TYPES_LINE.format(5)),
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
    *(
        (lambda given=given: traced(given[0].on(given[1]).build(given[2], 3, seed=0)), "has no form in plain torch")
        for given in ((HGT_2, EdgeSizes(types=2), 9), (ACROSS, TYPED.edge_sizes, 6))
    ),
    *(
        (
            lambda model=model: configured("model", model, f"model.edge_dim={WIDTH}").on(small_graph().edge_sizes),
            r"model\.edge_dim=3, but edge_attr of the dataset has width 0",
        )
        for model in ("gine", "transformer")
    ),
    *(
        (lambda model=model: without_attributes(model), "reads 3 attributes of each edge, and the graph has none")
        for model in ("gine", "transformer")
    ),
]


@pytest.mark.parametrize(("run", "line"), CANNOT)
def test_what_cannot_run_is_refused_in_one_line(run: Callable[[], object], line: str) -> None:
    with refused(line):
        run()
