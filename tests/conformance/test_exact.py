"""Options of strategies, models and graphs in the exact limit, and where there is an oracle, as configured (fp64).

Every strategy with every model as they are by default: test_strategies.py. PyG models: test_pyg_models.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from composing import PRESETS, configured, names
from conformance.methods import three
from conformance.test_edge_data import ACROSS, DATA, HETERO, HGT_2, MODELS, TYPED, WITHIN
from gnnpar.models.gcnii import GCNII
from gnnpar.models.gnn import ModelSource
from gnnpar.parallel.cagnet.strategy import Cagnet
from gnnpar.parallel.feature.strategy import FeatureParallel
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sampling.strategy import Minibatch
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.strategy import Strategy
from gnnpar.verify.conformance import check, small_graph
from graphs import with_weights
from outcomes import assert_passed

Case = tuple[Strategy, ModelSource, tuple[int, ...], dict[str, Any]]
CACHED: dict[str, Any] = {"first_layer": "cached"}
UNIFORM = Minibatch(sampler="uniform", clusters=6, clusters_per_batch=3, normalize="subgraph")
WHOLE_BATCHES = {"cluster": Minibatch(sampler="cluster"), "saint": Minibatch(sampler="saint"), "uniform": UNIFORM}
NORMED = three("sage", "model.norm=batch")
OPTIONS_OF_EDGES: list[tuple[Any, Any, dict[str, Any]]] = [  # attention dropout is keyed by edge
    (GCNII(num_layers=3, hidden=8, encoder="linear", decoder="linear"), DATA, {}),
    *((each, TYPED, {"attention_dropout": 0.4}) for each in (ACROSS, WITHIN)),
    (HGT_2, HETERO, {"attention_dropout": 0.4}),
    (HGT_2, HETERO, {"encoder": "linear", "decoder": "linear"}),
]


def models() -> Iterator[tuple[str, Case]]:
    for model in ("gat", "gatv2", "transformer"):
        yield f"dropout of {model}", (GraphParallel(), three(model, "model.attention_dropout=0.4"), (2, 4), {})
    for model, order in product(("gcn", "sage", "resgcn"), ("transform_first", "aggregate_first")):
        yield f"{model}, {order}", (GraphParallel(), three(model, f"model.order={order}"), (3,), {})
    for i, (config, data, changes) in enumerate(OPTIONS_OF_EDGES):
        yield f"edge data {i}", (GraphParallel(), replace(config, **changes), (3,), {"dataset": data})
    for strategy, world, kind, jump in (
        ("gnnpipe", 3, "gcnii", "cat"),
        ("gnnpipe", 2, "resgcn", "max"),
        ("hybrid", 4, "sage", "max"),
        ("minibatch", 2, "sage", "cat"),
    ):
        config = three(kind, "model.encoder=linear", "model.decoder=linear", f"model.jump={jump}")
        yield f"jump={jump} under {strategy} {world}", (configured("strategy", strategy), config, (world,), {})


def strategies() -> Iterator[tuple[str, Case]]:
    for prefetch in (0, 2, 9):
        yield f"cagnet, {prefetch} parts ahead", (Cagnet(prefetch=prefetch), three("gat"), (5,), {})
    few = {"dataset": small_graph(num_nodes=12, num_edges=3)}
    yield "cagnet, parts without edges to others", (Cagnet(), three("gat"), (4,), few)
    for world, copies in ((4, 2), (8, 2), (9, 3)):
        yield f"cagnet, {copies} copies on {world}", (Cagnet(replication=copies), three("gcn"), (world,), {})
    for model in ("sage", "gin", "gcnii"):
        strategy, weighted = Cagnet(replication=2, prefetch=0), {"dataset": with_weights(small_graph())}
        yield f"cagnet, shared edges of {model}", (strategy, three(model), (4,), weighted)
    for model, options in (
        ("gcn", ()),
        ("sage_max", ()),
        ("gat", ("model.heads=4",)),
        ("gat", ("model.heads=8",)),
        ("gat", ("model.heads=2", "model.attention_dropout=0.4")),
        ("gatv2", ("model.heads=8",)),
        ("gatv2", ("model.heads=2",)),
    ):  # more ranks than shares, and uneven shares
        yield f"feature, {model} {' '.join(options)}", (FeatureParallel(), three(model, *options), (3, 5), {})
    for (name, strategy), model in product(WHOLE_BATCHES.items(), ("gcn", "sage_max", "gat")):
        yield f"one batch by {name}, {model}", (strategy, configured("model", model, "model.hidden=8"), (1, 2), {})
    for model in ("gcn", "gat"):
        yield f"halo=cover, {model}", (GraphParallel(halo="cover"), three(model), (1, 2, 3, 4), {})


def layers() -> Iterator[tuple[str, Case]]:
    """What is kept of layer 0, and norms over all rows."""
    for model in ("gcn", "gat"):
        yield f"feature keeps layer 0, {model}", (FeatureParallel(), three(model), (3,), CACHED)
        heads = ("model.heads=2", "model.attention_dropout=0.4") if model == "gat" else ("model.order=aggregate_first",)
        yield f"sar keeps layer 0, {model}", (SAR(), three(model, *heads), (1, 3), CACHED)
    yield "cagnet keeps layer 0", (Cagnet(replication=2), three("gcn"), (4,), CACHED)
    for model, name in product(("gcn", "rgcn"), ("graph_parallel", "sar", "bns")):  # halo nodes have weighted degrees
        (config, data), limit = MODELS[model], configured("strategy", name).exact_limit()
        yield f"{name} keeps layer 0, {model} with edge data", (limit, config, (3,), {"dataset": data, **CACHED})
    for name in names("strategy"):
        if (strategy := configured("strategy", name)).capabilities.moments and name not in ("tag", "single"):
            yield f"norms under {name}", (strategy, NORMED, (2,), {})
    yield "norms of copies", (Cagnet(replication=2), NORMED, (4,), {})


CASES = dict((*models(), *strategies(), *layers()))
SLOW = {f"norms under {preset}" for preset in PRESETS}


@pytest.mark.quick(22)
@pytest.mark.parametrize(
    ("strategy", "config", "worlds", "more"),
    [pytest.param(*case, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, case in CASES.items()],
)
def test_options_equal_the_single_device(
    strategy: Strategy, config: ModelSource, worlds: tuple[int, ...], more: dict[str, Any]
) -> None:
    cases = check(strategy, {"model": config}, worlds=worlds, **more)
    assert {case.world for case in cases} == {*worlds}
    assert_passed(cases)
