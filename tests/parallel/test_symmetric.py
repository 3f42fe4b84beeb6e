"""Symmetric normalisation in the weights of edges: the same losses and gradients as rows scaled before and after."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from composing import configured
from engines import Rank, on_ranks
from gnnpar.comm import ThreadWorld
from gnnpar.models.gcn import GCN
from gnnpar.models.gcnii import GCNII
from gnnpar.parallel import context
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.local import Pass
from gnnpar.partition.shard import Shard
from gnnpar.verify.conformance import Job, make_job, merge_ranks, small_graph
from gnnpar.verify.soundness import with_edge_data

MODELS = {
    "gcn": GCN(num_layers=3, hidden=16),
    "transform_first": GCN(num_layers=2, hidden=4, order="transform_first"),
    "gcnii": GCNII(num_layers=3, hidden=16, encoder="linear", decoder="linear"),
}
INSIDE = [  # strategy, options, ranks
    ("single", "", 1),
    ("graph_parallel", "strategy.overlap=edges", 3),
    ("graph_parallel", "strategy.overlap=none", 2),
    ("graph_parallel", "strategy.overlap=central_marginal", 3),
    ("sar", "strategy.rounds=peer", 3),
    ("sar", "strategy.rounds=one strategy.backward=pull", 3),
    ("sar", "strategy.logical_parts=3", 1),
    ("cagnet", "", 3),
    ("cagnet", "strategy.replication=2", 4),
    ("feature", "", 3),
]
KEPT = [{"first_layer": "cached"}, {"dtype": torch.bfloat16}]
OUTSIDE = [  # strategy, options, model
    *(("graph_parallel", f"codec={codec}", "gcn", {}) for codec in ("bf16", "uniform", "drop")),
    *((strategy, "", "gcn", {}) for strategy in ("pipegcn", "digest", "sancus", "bns")),
    ("gnnpipe", "strategy.chunks=4", "gcn", {}),
    ("minibatch", "strategy.batch_size=16", "gcn", {}),
    *((s, "", "gcn", more) for s, more in product(["single", "graph_parallel", "sar", "cagnet", "feature"], KEPT)),
    ("graph_parallel", "", "sage", {}),
]


def job_of(strategy: str, options: str, world: int, model: str = "gcn", *, weighted: bool = False, **more) -> Job:
    data = with_edge_data(small_graph(), {"weight"} if weighted else set())
    config = MODELS[model] if model in MODELS else configured("model", model)
    return make_job(configured("strategy", strategy, *options.split()), config, data, world=world, **more)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Shard]:
    """The shards whose edges are weighted."""
    found: list[Shard] = []
    weigh = context.normalised
    monkeypatch.setattr(context, "normalised", lambda shard: found.append(weigh(shard)) or found[-1])
    return found


@pytest.mark.quick(2)
@pytest.mark.parametrize(("inside", "model", "weighted"), product(INSIDE, MODELS, [False, True]))
def test_losses_and_gradients(inside, model, weighted, made, monkeypatch) -> None:
    strategy, options, world = inside
    job = job_of(strategy, options, world, model, weighted=weighted)
    inside = merge_ranks(job, ThreadWorld(world).run(job))
    assert len(made) >= world
    monkeypatch.setattr(context, "normalised", lambda shard: shard)
    outside = merge_ranks(job, ThreadWorld(world).run(job))
    assert inside.traffic == outside.traffic
    torch.testing.assert_close(inside.losses, outside.losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(inside.gradients, outside.gradients, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(inside.logits, outside.logits, rtol=1e-11, atol=1e-13)


@pytest.mark.quick(6)
@pytest.mark.parametrize(("strategy", "options", "model", "more"), OUTSIDE)
def test_coded_and_kept_rows_those_of_16_bits_and_of_other_models_stay_scaled(strategy, options, model, more, made):
    world = 1 if strategy == "single" else 2
    ThreadWorld(world).run(job_of(strategy, options, world, model, **more))
    assert not made


class Widest(TorchDispatchMode):
    """Products by entry of two tensors with a row a node."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.count = rows, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul.Tensor and out.ndim == 2 and out.shape[0] == self.rows and out.shape[1] > 1:
            self.count += 1
        return out


@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("graph_parallel", 2), ("sar", 2)])
def test_no_pass_scales_rows(strategy, world, monkeypatch) -> None:
    """Two a layer forward, two backward (layer 0: none) where rows are scaled; none where edges are."""
    config = replace(MODELS["gcn"], dropout=0.0)
    job = make_job(configured("strategy", strategy), config, small_graph(), world=world)

    def passes(rank: Rank) -> int:
        with Widest(rank.shard.num_inner) as counted:
            rank.engine.train_epoch(0, rank.optimizer)
        return counted.count

    assert on_ranks(job, passes) == [0] * world
    monkeypatch.setattr(context, "normalised", lambda shard: shard)
    assert min(on_ranks(job, passes)) >= 10


def test_the_weights_are_counted_as_structure() -> None:
    (comm,) = ThreadWorld(1).communicators()
    data = small_graph()
    shard = Shard.open(data, torch.zeros(data.num_nodes, dtype=torch.int64), comm)
    plain, weighted = shard.structure_nbytes, context.normalised(shard)
    assert weighted.structure_nbytes == plain + (4 + 8) * data.num_edges  # with the destinations of edges
    assert not WholeGraph(shard, Pass(0)).normalised
    assert WholeGraph(weighted, Pass(0)).normalised
