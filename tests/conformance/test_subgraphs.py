"""ClusterGCN and GraphSAINT: what a batch computes; docs/strategies/minibatch.md is the specification."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import subgraph

from composing import configured
from conformance.test_cofree import PLAIN, of_dense
from conformance.test_exact import UNIFORM
from conformance.test_minibatch import shard_of
from gnnpar.folds.aggregator import ByBlock
from gnnpar.folds.generic import Generic
from gnnpar.folds.max import Max
from gnnpar.folds.sum import Sum
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import GNN
from gnnpar.parallel.local import Pass
from gnnpar.parallel.sampling.batches import DRAW, Induced, Shared, shuffled
from gnnpar.parallel.sampling.neighbours import Replica, sampler_of
from gnnpar.parallel.sampling.saint import NodeSets, SaintBatches, estimated
from gnnpar.parallel.sampling.strategy import Minibatch
from gnnpar.parallel.sampling.view import SampledGraph, subgraph_of
from gnnpar.verify.conformance import make_job, relative_error, small_graph, train_in_threads
from gnnpar_kernels import fold_key

CLUSTERS = Minibatch(sampler="cluster", clusters=6, clusters_per_batch=6, normalize="subgraph")
SAINT = Minibatch(sampler="saint", batch_size=30)
ALONE = Shared("graph", seed=1, rank=0, ranks=1)


def replica() -> tuple[Replica, Tensor]:
    """The small graph on one rank, and its features, in fp64."""
    shard, graph = shard_of(small_graph())
    return graph, shard.x


def dense(graph: Any) -> Tensor:
    """[N, N] by destination and source: how many edges, loops too."""
    src, dst = graph.edge_index
    matrix = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.float64)
    return matrix.index_put_((dst, src), torch.ones(len(src), dtype=torch.float64), accumulate=True)


def gradients_of(net: GNN, loss: Tensor) -> dict[str, Tensor]:
    named = dict(net.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert max(relative_error(got[name], gradient) for name, gradient in expected.items()) < 1e-12


@pytest.mark.parametrize("world", [1, 3])
def test_a_batch_of_clusters_is_autograd_on_the_subgraph_of_each_rank(world: int) -> None:
    """Degrees are those of the subgraph; edges between clusters of different ranks are not there."""
    data, config = small_graph(), configured("model", "gcn", *PLAIN)
    got = train_in_threads(CLUSTERS, config, data, world=world, epochs=1, seed=3)
    job = make_job(CLUSTERS, config, data, world=world, seed=3)
    cluster_of = job.plan.placement.chunk_of
    assert cluster_of is not None
    net = config.build(data.num_features, data.num_classes, seed=3).double()
    rank_of = torch.empty(6, dtype=torch.int64)
    order = shuffled(6, 3, 0)
    for rank in range(world):
        rank_of[order[rank::world]] = rank
    mine = rank_of[cluster_of]
    matrix = dense(data) * (mine[:, None] == mine[None, :])
    assert bool((matrix != dense(data)).any()) == (world > 1)
    logits = of_dense(net, matrix, matrix.sum(1), data.x.double())
    loss = nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
    assert got.losses[0] == pytest.approx(float(loss), rel=1e-12)
    same(got.gradients[0], gradients_of(net, loss))


def random_parts(num_nodes: int, clusters: int, seed: int, epoch: int) -> Tensor:
    """The part of each node, [N], and that parts are of N / clusters nodes."""
    rng = np.random.Generator(np.random.Philox(key=fold_key(seed, epoch, DRAW)))
    of_node = torch.as_tensor(rng.permutation(num_nodes)) % clusters
    assert int(torch.bincount(of_node, minlength=clusters).diff().abs().max()) <= 1
    return of_node


@pytest.mark.parametrize("world", [1, 2, 3])
def test_random_nodes_are_pyg_on_the_induced_subgraph_of_each_rank(world: int) -> None:
    """Two epochs of two steps by PyG's layers and SGD, in fp64: losses, final logits. Parts differ by epoch."""
    data = small_graph()
    config = configured("model", "sage", *PLAIN)
    got = train_in_threads(UNIFORM, config, data, world=world, epochs=2, seed=3)
    net = config.build(data.num_features, data.num_classes, seed=3).double()
    rows, drawn = data.x.double(), [random_parts(data.num_nodes, 6, 3, epoch) for epoch in range(2)]
    assert not torch.equal(*drawn)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch, part_of in enumerate(drawn):
        order, losses, total = shuffled(6, 3, epoch), 0.0, int(data.train_mask.sum())
        for step in range(2):
            united = order[3 * step : 3 * step + 3]
            loss = torch.zeros((), dtype=torch.float64)
            for rank in range(world):
                nodes = torch.isin(part_of, united[rank::world]).nonzero().flatten()
                edges, _ = subgraph(nodes, data.edge_index, relabel_nodes=True, num_nodes=data.num_nodes)
                logits, train = pyg_logits(net, rows[nodes], edges), data.train_mask[nodes]
                loss = loss + nn.functional.cross_entropy(logits[train], data.y[nodes][train], reduction="sum")
            optimizer.zero_grad()
            (loss / int(data.train_mask[torch.isin(part_of, united)].sum())).backward()
            optimizer.step()
            losses += float(loss) / total
        assert got.losses[epoch] == pytest.approx(losses, rel=1e-12)
    assert relative_error(got.logits, pyg_logits(net, rows, data.edge_index)) < 1e-12


def pyg_logits(net: GNN, x: Tensor, edges: Tensor) -> Tensor:
    """GraphSAGE by PyG's SAGEConv with the weights of `net`."""
    for i, layer in enumerate(net.layers):
        ours: Any = layer.get_submodule("conv")
        weights = {"lin_l.weight": ours.neighbours, "lin_l.bias": ours.own.bias, "lin_r.weight": ours.own.weight}
        x = functional_call(SAGEConv(x.shape[1], len(ours.own.bias)), weights, (x, edges))
        x = x.relu() if i + 1 < len(net.layers) else x
    return x


@pytest.mark.parametrize("saint", ["node", "edge", "walk"])
def test_a_drawn_subgraph_is_autograd_with_weighted_edges_and_losses(saint: Any) -> None:
    """The mean over the steps and ranks of an epoch, at the weights that it begins with."""
    data, config, world = small_graph(), configured("model", "gcn", *PLAIN), 2
    strategy = replace(SAINT, saint=saint)
    got = train_in_threads(strategy, config, data, world=world, epochs=1, seed=3)
    graph, x = replica()
    sets = NodeSets(graph, saint, 15, 2)
    num_nodes, draws, whole = data.num_nodes, -(-20 * data.num_nodes // 15), dense(data)
    steps = -(-num_nodes // 30)
    counts = estimated(graph, sets, draws, 3)
    of_edge = torch.ones(num_nodes, num_nodes, dtype=torch.float64)
    targets = torch.arange(num_nodes).repeat_interleave(graph.edges.indptr.diff())
    of_edge[targets, graph.edges.sources] = counts.nodes[targets] / counts.edges.clamp_min(1).double()
    of_edge.fill_diagonal_(1)
    net = config.build(data.num_features, data.num_classes, seed=3).double()
    loss = torch.zeros((), dtype=torch.float64)
    for step in range(steps):
        for rank in range(world):
            drawn = torch.zeros(num_nodes, dtype=torch.float64)
            drawn[sets.draw(fold_key(3, 0, step, rank, DRAW))] = 1
            matrix = whole * of_edge * drawn[:, None] * drawn[None, :]
            logits = of_dense(net, matrix, data.in_degree.double(), x)
            each = nn.functional.cross_entropy(logits, data.y, reduction="none")
            rows = data.train_mask & (drawn > 0)
            loss = loss + (each * draws / counts.nodes.clamp_min(1).double())[rows].sum()
    loss = loss / (steps * world * int(data.train_mask.sum()))
    same(got.gradients[0], gradients_of(net, loss))


@pytest.mark.quick(1)
@pytest.mark.parametrize("saint", ["node", "edge", "walk"])
def test_normalised_sums_and_losses_are_unbiased(saint: Any) -> None:
    """The mean over 500 draws is the sum over all in-edges, within 5 of its standard errors; those of the
    probabilities, estimated from 500 draws of their own, are as large, so the bound is 5 sqrt(2). Without weights it is
    missed."""
    graph, x = replica()
    num_nodes, draws = len(x), 500
    sets, induced = NodeSets(graph, saint, 24, 2), Induced(graph.edges, graph.train, 1)
    counts = estimated(graph, sets, draws, 7)
    batches = SaintBatches(graph, ALONE, 1, sets, counts, steps=draws)
    exact = dense(small_graph()) @ x
    sums, losses = torch.zeros(draws, *exact.shape, dtype=torch.float64), torch.zeros(draws, num_nodes)
    bare, held = torch.zeros_like(exact), torch.zeros(draws, num_nodes)
    for step in range(draws):
        sub = batches[0, step]
        view = SampledGraph(sub, Pass(0), hops=1)
        assert sub.loss_weight is not None
        sums[step, sub.node_ids[: view.num_read]] = view.aggregate(Sum(), (x[sub.node_ids],))[: view.num_read]
        losses[step, sub.node_ids[: view.num_read]] = sub.loss_weight.float()
        held[step, sub.node_ids[: view.num_read]] = 1
        plain = SampledGraph(sub._replace(weights=None), Pass(0), hops=1)
        bare[sub.node_ids[: view.num_read]] += plain.aggregate(Sum(), (x[sub.node_ids],))[: view.num_read]
    assert induced.of(graph.train).ends[0] == len(graph.train)
    # where an in-edge is in a handful of draws alone, a standard error says nothing
    targets = torch.arange(num_nodes).repeat_interleave(graph.edges.indptr.diff())
    rarest = torch.full((num_nodes,), float(draws)).scatter_reduce(0, targets, counts.edges.float(), "amin")
    often = (rarest >= 8) & (held.sum(0) >= 8)
    often &= torch.zeros(num_nodes, dtype=torch.bool).index_fill_(0, graph.train, True)
    assert int(often.sum()) >= 5
    number = held.sum(0)[often].double()[:, None]
    mean = sums.sum(0)[often] / number
    spread = ((sums - (sums.sum(0) / held.sum(0)[:, None].clamp_min(1))) * held[..., None]).square().sum(0)[often]
    error = (spread / number).sqrt() / number.sqrt()
    bound = 5 * 2**0.5 * error + 1e-9
    assert bool(((mean - exact[often]).abs() < bound).all())
    assert not bool(((bare[often] / number - exact[often]).abs() < bound).all())
    weight, of_weight = losses.mean(0)[often], losses.std(0)[often] / draws**0.5
    assert bool(((weight - 1).abs() < 5 * 2**0.5 * of_weight + 1e-6).all())


def test_a_fold_of_an_edge_function_is_weighted_as_a_sum_is_and_maxima_are_not() -> None:
    graph, x = replica()
    sets = NodeSets(graph, "node", 24, 2)
    counts = estimated(graph, sets, 40, 7)
    sub = SaintBatches(graph, ALONE, 1, sets, counts, steps=1)[0, 0]
    view, rows = SampledGraph(sub, Pass(0), hops=1), x[sub.node_ids].requires_grad_()
    assert sub.weights is not None
    assert float(sub.weights.max()) > 1
    own = view.aggregate(Generic(value=lambda src, dst, edge, shared: src[0]), (rows,))
    (of_own,) = torch.autograd.grad(own.square().sum(), rows)
    linear = view.aggregate(Sum(), (rows,))
    (of_linear,) = torch.autograd.grad(linear.square().sum(), rows)
    torch.testing.assert_close(own, linear)
    torch.testing.assert_close(of_own, of_linear)
    plain = SampledGraph(sub._replace(weights=None), Pass(0), hops=1)
    assert torch.equal(view.aggregate(Max(), (rows,)), plain.aggregate(Max(), (rows,)))


def test_a_fold_that_cannot_count_an_edge_more_than_once_is_refused_where_edges_are_left_out() -> None:
    class Own(ByBlock):
        summed = True

    graph, x = replica()
    sampler, _ = sampler_of(graph.edges, (2,), "own")
    sub = subgraph_of(sampler.draw(torch.arange(20), 1), graph, "graph")
    assert sub.weights is not None
    with pytest.raises(ValueError, match=r"fold Own cannot count an edge more than once.*normalize=subgraph"):
        SampledGraph(sub, Pass(0), hops=1).aggregate(cast(Any, Own()), (x[sub.node_ids],))


@pytest.mark.parametrize("sampler", ["cluster", "uniform"])
def test_every_training_node_is_in_one_batch_of_clusters_and_only_gradients_travel(sampler: Any) -> None:
    strategy = Minibatch(sampler=sampler, clusters=7, clusters_per_batch=3)
    data, world = small_graph(), 2
    got = train_in_threads(strategy, GCN(hidden=8), data, world=world, epochs=2, dtype=torch.float32)
    numbers = sum(p.numel() for p in GCN(hidden=8).build(data.num_features, data.num_classes, seed=0).parameters()) + 1
    steps = 3  # of 3, 3 and 1 clusters: the last leaves a rank without nodes
    assert got.traffic == [{"reduce": steps * 2 * (world - 1) * numbers * 4}] * 2
    graph, _ = replica()
    cluster_of = make_job(strategy, GCN(hidden=8), data, world=world).plan.placement.chunk_of
    ranks = [
        strategy.batches(replace(graph, cluster_of=cluster_of), [1, 1], seed=0, rank=rank, ranks=world)
        for rank in range(world)
    ]
    for epoch in range(2):
        subs = [batches[epoch, step] for batches in ranks for step in range(len(batches))]
        seeds = torch.cat([sub.node_ids[: sub.ends[0]] for sub in subs])
        assert torch.equal(seeds.sort().values, graph.train)
        assert sum(ranks[0].size((epoch, step)) for step in range(steps)) == len(graph.train)


@pytest.mark.parametrize("saint", ["node", "walk"])
def test_steps_of_drawn_subgraphs_send_gradients_alone(saint: Any) -> None:
    data, world = small_graph(), 2
    strategy = Minibatch(sampler="saint", saint=saint, walk_length=1, batch_size=25)
    got = train_in_threads(strategy, GCN(hidden=8), data, world=world, dtype=torch.float32)
    numbers = sum(p.numel() for p in GCN(hidden=8).build(data.num_features, data.num_classes, seed=0).parameters()) + 1
    steps = 3  # as many as 60 nodes need in batches of 25
    assert got.traffic == [{"reduce": steps * 2 * (world - 1) * numbers * 4}] * 2


def test_draws_are_keyed() -> None:
    graph, _ = replica()
    batches, again = (UNIFORM.batches(graph, [1, 1], seed=0, rank=0, ranks=2) for _ in range(2))
    earlier, later = batches[4, 1], batches[5, 1]
    assert torch.equal(later.node_ids, again[5, 1].node_ids)
    assert not torch.equal(later.node_ids.sort().values, earlier.node_ids.sort().values)
    for saint in ("node", "edge", "walk"):
        sets = NodeSets(graph, saint, 20, 2)  # type: ignore[arg-type]
        assert torch.equal(sets.draw(5), sets.draw(5))
        assert not torch.equal(sets.draw(5), sets.draw(6))
        assert len(sets.draw(5)) <= 20
