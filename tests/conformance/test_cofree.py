"""CoFree-GNN: what parts of a vertex cut compute and send; docs/strategies/cofree.md is the specification."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composing import configured
from engines import Rank, on_ranks
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import GNN
from gnnpar.parallel.cofree.strategy import _CHOICE, _MASK, CoFree
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import check_plan
from gnnpar.partition.partition import Random
from gnnpar.partition.shard import cut_nodes
from gnnpar.partition.vertex_cut import DBH, HDRF, RandomEdges
from gnnpar.verify.conformance import make_job, relative_error, small_graph, train_in_threads
from gnnpar_kernels import fold_key, keep_mask

WORLD, SEED = 3, 3
PLAIN = ("model.hidden=8", "model.dropout=0", "model.norm=none")


def of_dense(net: GNN, matrix: Tensor, degree: Tensor, x: Tensor) -> Tensor:
    """Kipf and Welling's layers on a dense matrix: no view, fold or kernel of gnnpar."""
    scale = degree.clamp_min(1).rsqrt()[:, None]
    for i, layer in enumerate(net.layers):
        conv: Any = layer.get_submodule("conv")
        x = scale * (matrix @ (scale * (x @ conv.weight.T))) + conv.bias
        x = x.relu() if i + 1 < len(net.layers) else x
    return x


@pytest.mark.parametrize(
    ("fields", "by"),
    [
        ({}, DBH()),
        ({"degrees": "graph"}, Random()),
        ({"reweight": "copies"}, HDRF()),
        ({"reweight": "none"}, RandomEdges()),
        ({"drop_edge": 0.5, "masks": 3}, DBH()),
        ({"drop_edge": 0.5, "masks": 3, "degrees": "graph"}, DBH()),
    ],
    ids=str,
)
def test_it_is_plain_autograd_of_the_weighted_losses_of_all_parts(fields: dict[str, Any], by: Any) -> None:
    """In epoch 2, whose mask is another one than that of epoch 0."""
    data, config, strategy = small_graph(), configured("model", "gcn", *PLAIN), CoFree(**fields)
    got = train_in_threads(strategy, config, data, world=WORLD, epochs=1, seed=SEED, partition=by)
    plan = make_job(strategy, config, data, world=WORLD, seed=SEED, partition=by).plan
    part_of, edge_part_of = plan.part_of, plan.placement.edge_part_of
    assert edge_part_of is not None
    net = config.build(data.num_features, data.num_classes, seed=SEED).double()
    src, dst = data.edge_index
    apart, num_nodes = src != dst, data.num_nodes
    total = torch.bincount(torch.cat([src[apart], dst[apart]]), minlength=num_nodes)
    held = torch.zeros(WORLD, num_nodes, dtype=torch.bool)
    for p in range(WORLD):
        for s, d in data.edge_index[:, apart & (edge_part_of == p)].T.tolist():
            held[p, s] = held[p, d] = True
    held[part_of, torch.arange(num_nodes)] |= total == 0
    loss, counted = torch.zeros((), dtype=torch.float64), 0
    for p in range(WORLD):
        mine = torch.where(apart, edge_part_of == p, held[p, dst])
        degree = torch.bincount(torch.cat([src[mine & apart], dst[mine & apart]]), minlength=num_nodes)
        if strategy.drop_edge:
            number = fold_key(SEED, 0, p, _CHOICE) % strategy.masks
            ids = torch.minimum(src, dst) * 2**31 + torch.maximum(src, dst)
            stays = keep_mask(ids, 1, p=strategy.drop_edge, key=fold_key(SEED, number, _MASK))[:, 0]
            assert 0.3 < float(stays.double().mean()) < 0.7
            mine &= stays | ~apart
        matrix = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
        matrix.index_put_((dst[mine], src[mine]), torch.ones(int(mine.sum()), dtype=torch.float64), accumulate=True)
        in_degree = matrix.sum(1) if strategy.degrees == "part" else data.in_degree.double()
        logits = of_dense(net, matrix, in_degree, data.x.double())
        each = nn.functional.cross_entropy(logits, data.y, reduction="none")
        weight = {
            "degree": torch.where(total > 0, degree / total.clamp_min(1).double(), 1.0),
            "copies": 1 / held.sum(0).double(),
            "none": torch.ones(num_nodes, dtype=torch.float64),
        }[strategy.reweight]
        rows = held[p] & data.train_mask
        loss, counted = loss + (weight * each)[rows].sum(), counted + int(rows.sum())
    loss = loss / (counted if strategy.reweight == "none" else int(data.train_mask.sum()))
    assert got.losses[0] == pytest.approx(float(loss), rel=1e-12)
    named = dict(net.named_parameters())
    for (name, _), expected in zip(named.items(), torch.autograd.grad(loss, list(named.values())), strict=True):
        assert relative_error(got.gradients[0][name], expected) < 1e-12


@pytest.mark.parametrize(("world", "by"), [(3, Random()), (5, DBH())], ids=str)
def test_bytes_are_those_of_the_sum_of_gradients_whatever_the_cut(world: int, by: Any) -> None:
    config, data = configured("model", "gat", "model.hidden=8"), small_graph()
    got = train_in_threads(CoFree(), config, data, world=world, dtype=torch.float32, partition=by)
    numbers = sum(p.numel() for p in config.build(data.num_features, data.num_classes, seed=0).parameters()) + 1
    assert got.traffic == [{"reduce": 2 * (world - 1) * numbers * 4}] * 2


def test_what_a_rank_holds_is_its_copies_its_masks_and_its_own_nodes() -> None:
    config, data = GCN(hidden=8), small_graph()
    strategy = CoFree(drop_edge=0.3, masks=2)
    job = make_job(strategy, config, data, world=WORLD, dtype=torch.float32, epochs=9)
    edges = job.plan.placement.edge_part_of
    assert edges is not None

    def more_bytes(rank: Rank) -> tuple[int, int]:
        copies = rank.shard.copies
        assert copies is not None
        before = rank.engine.live_bytes()
        masks = before["structure"] - rank.shard.structure_nbytes - copies.shard.inner.nbytes
        assert masks > 0, "they are there before an epoch draws one"
        rank.train(9)  # both are drawn, and transposed
        more = rank.engine.live_bytes()["structure"] - before["structure"]
        rows = before["features"] - rank.shard.features_nbytes - copies.shard.features_nbytes
        return more, rows - 4 * int(copies.shard.train_mask.sum())

    for more, rest in on_ranks(job, more_bytes):
        assert more > 0
        assert rest == 0
    parts = cut_nodes(data, job.plan.part_of, edges, WORLD)
    assert torch.allclose(
        torch.zeros(data.num_nodes, dtype=torch.float64).index_add_(
            0, torch.cat([p.shard.node_ids for p in parts]), torch.cat([p.share for p in parts])
        ),
        torch.ones(data.num_nodes, dtype=torch.float64),
    )


def test_a_plan_without_its_cut_is_refused() -> None:
    plan = make_job(CoFree(), GCN(hidden=4), small_graph(), world=2).plan
    check_plan(CoFree(), plan)
    with pytest.raises(ValueError, match="Single has no vertex cut"):
        check_plan(Single(), replace(plan, placement=replace(plan.placement, mesh=((0,),))))
    with pytest.raises(ValueError, match="CoFree needs a vertex cut"):
        check_plan(CoFree(), replace(plan, placement=replace(plan.placement, edge_part_of=None)))
