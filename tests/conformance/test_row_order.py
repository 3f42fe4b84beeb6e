"""Rows of a part in another order: the same sums by row, the same draws, the same answers by node."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from composing import PRESETS, configured, names
from gnnpar.cli import check
from gnnpar.codecs.uniform import Uniform
from gnnpar.comm import ThreadWorld
from gnnpar.data.dataset import Dataset
from gnnpar.data.links import Link
from gnnpar.data.synthetic import SBM
from gnnpar.data.tasks import Labels
from gnnpar.models.pyg.model import PyG
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.needs import orders_rows, refuse_row_order
from gnnpar.partition.row_order import BLOCK_ROWS, fetches, in_order
from gnnpar.partition.shard import cut
from gnnpar.settings import ConfigError
from gnnpar.verify.conformance import Job, Outcome, graph_for, make_job, merge_ranks, relative_error, small_graph
from gnnpar.verify.differences import rounding
from graphs import with_edge_data, with_weights
from outcomes import assert_equal

SMALL = ("model.hidden=8", "model.num_layers=3")
MODELS: dict[str, tuple[tuple[str, ...], Dataset]] = {
    "gcn": ((), with_weights(small_graph())),
    "sage": (("model.aggregator=max",), small_graph()),
    "gat": (("model.attention_dropout=0.4",), small_graph()),
    "rgcn": ((), with_edge_data(small_graph(), types=3, width=0)),
    "transformer": ((), with_edge_data(small_graph(), types=1, width=2)),
}
ABLE = {"single", "graph_parallel", "adaqp", "adaqp_p", "adaqp_q", "bns", "pipegcn", "digest"}
STRATEGIES: dict[str, Any] = {
    "quantized": GraphParallel(codec=Uniform(bits=4)),
    "central": GraphParallel(overlap="central_marginal"),
    "cover": GraphParallel(halo="cover"),
    **{name: configured("strategy", name) for name in ("single", "graph_parallel", "bns", "pipegcn", "digest")},
}


def trained(job: Job) -> Outcome:
    return merge_ranks(job, ThreadWorld(job.plan.num_parts).run(job))


WAYS = [*((name, "live") for name in MODELS), ("gcn", "cached"), ("sage", "cached")]


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        pytest.param(strategy, way, marks=() if strategy == "graph_parallel" or (i + j) % 3 == 0 else pytest.mark.slow)
        for i, strategy in enumerate(STRATEGIES)
        for j, way in enumerate(WAYS)
    ],
)
def test_a_training_is_the_same_in_any_order(strategy: str, way: tuple[str, Any]) -> None:
    """Losses, gradients, logits and bytes: rows of a block add in their order, sums over rows in another."""
    model, first_layer = way
    overrides, data = MODELS[model]
    config = configured("model", model, *SMALL, *overrides)
    job = make_job(STRATEGIES[strategy], config, data, world=1 if strategy == "single" else 3, first_layer=first_layer)
    given, ordered = trained(job), trained(replace(job, row_order="metis"))
    assert_equal(ordered, given, losses=1e-11, logits=1e-10)
    assert ordered.traffic == given.traffic


READ_EDGES: dict[str, Any] = {
    **{name: configured("model", name, *SMALL) for name in ("gine", "transformer", "rgat")},
    **{
        kind: PyG(target="pyg_nets.Rows", kwargs={"kind": kind}, self_loops=False)
        for kind in ("GINEConv", "TransformerConv", "GATv2Conv")
    },
}


@cache
def alone(model: str) -> Outcome:
    return trained(make_job(configured("strategy", "single"), READ_EDGES[model], graph_of(model), world=1))


def graph_of(model: str) -> Dataset:
    return graph_for(configured("strategy", "single"), READ_EDGES[model], small_graph())


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("strategy", "first_layer", "model"), product(sorted(ABLE - PRESETS), ["live", "cached"], READ_EDGES)
)
def test_rows_of_edges_stay_with_their_edges_in_any_order(strategy: str, first_layer: Any, model: str) -> None:
    """Against one device in the order of ids, in the exact limit."""
    limit, data = configured("strategy", strategy).exact_limit(), graph_of(model)
    world = 1 if strategy == "single" else 2
    job = make_job(limit, READ_EDGES[model], data, world=world, first_layer=first_layer, row_order="metis")
    got, expected = trained(job), alone(model)
    assert got.losses == pytest.approx(expected.losses, rel=1e-11)
    for mine, theirs in zip(got.gradients, expected.gradients, strict=True):
        least = rounding(theirs.values(), data.num_nodes)
        assert max(relative_error(mine[name], each, least=least) for name, each in theirs.items()) < 1e-9
    assert relative_error(got.logits, expected.logits) < 1e-9


def test_a_check_trains_in_the_order_and_with_the_first_layer_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    run = Job.__call__

    def noted(self: Job, comm: Any) -> Any:
        seen.append((self.row_order, self.first_layer))
        return run(self, comm)

    monkeypatch.setattr(Job, "__call__", noted)
    given = ["strategy=graph_parallel", "model=transformer", "row_order=metis", "first_layer=cached"]
    assert check.run([*given, "--worlds=2"]) == 0
    assert seen == [("none", "live"), ("metis", "cached"), ("metis", "cached")]
    for line, overrides in {
        "row_order=metis: strategy=sar reads rows by their": ["strategy=sar", "row_order=metis"],
        "first_layer=cached is for strategies without chunks": ["strategy=gnnpipe", "first_layer=cached"],
    }.items():
        with pytest.raises(ConfigError, match=line):
            check.run([*overrides, "model=gcn", "--worlds=2"])


def test_what_can_be_in_any_order_says_so() -> None:
    able = {name for name in names("strategy") if configured("strategy", name).capabilities.row_order}
    assert able == ABLE
    assert not orders_rows(STRATEGIES["single"], Link())
    with pytest.raises(ValueError, match="row_order=metis: strategy=sar reads rows by their ascending ids"):
        refuse_row_order(configured("strategy", "sar"), "metis", Labels(), {"strategy": "sar"})
    refuse_row_order(configured("strategy", "sar"), "auto", Labels(), {})


def test_auto_orders_what_has_no_order_and_leaves_what_has() -> None:
    """A block model whose ids say nothing of its blocks; a ring, whose ids are its order; a graph that fits a cache."""
    blocks = SBM(
        num_nodes=12_000, avg_degree=8, num_features=16, homophily=0.9, bridge_share=0.02, lateral_share=0.02
    ).load(None, 0)
    shard = cut(blocks, torch.zeros(blocks.num_nodes, dtype=torch.int64), 1)[0]
    ordered, line = in_order(shard, "auto")
    assert fetches(ordered.inner) < 0.6 * fetches(shard.inner)
    assert line == f"rows in 8 blocks: {fetches(shard.inner):.2f} -> {fetches(ordered.inner):.2f} fetches an edge"
    assert in_order(ordered, "auto") == (ordered, "")
    small = cut(small_graph(), torch.zeros(small_graph().num_nodes, dtype=torch.int64), 1)[0]
    assert small.num_inner < BLOCK_ROWS and in_order(small, "auto") == (small, "")
