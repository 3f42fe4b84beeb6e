"""halo=cover: partial rows in the place of halo rows give the same numbers, and the fewest bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

from composing import WORLDS, configured, names
from gnnpar.codecs.codec import BFloat16, CodecConfig, Drop, Identity
from gnnpar.codecs.uniform import Uniform
from gnnpar.comm import CodedExchange, Communicator, RowLists, ThreadWorld
from gnnpar.folds.cover import count_cover, least_cover
from gnnpar.folds.sum import Sum
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import ModelSource
from gnnpar.parallel.cover import make_cover
from gnnpar.parallel.digest.strategy import Digest
from gnnpar.parallel.edges import EdgeOrder, Overlap
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.halo_graph import HaloGraph
from gnnpar.parallel.local import Pass
from gnnpar.parallel.pipegcn.strategy import PipeGCN
from gnnpar.parallel.row_bytes import Halo, RowBytes
from gnnpar.parallel.single.strategy import Single
from gnnpar.partition.shard import Shard
from gnnpar.planner.extract import record
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.work import Work
from gnnpar.verify.conformance import check, make_job, merge_ranks, small_graph, train_in_threads
from graphs import with_edge_data, with_weights
from outcomes import assert_equal, assert_passed, assert_same_bits

SMALL = ("model.hidden=8",)
DATA = {
    "gcn": with_weights(small_graph()),
    "rgcn": with_edge_data(small_graph(), types=3, width=0),
    "rgat": with_edge_data(small_graph(), types=3, width=0),
    "hgt": with_edge_data(small_graph(), types=3, width=0),
    "gine": with_edge_data(small_graph(), types=0, width=2),
}
MODELS = [name for name in names("model") if name != "pyg"]
COVER = GraphParallel(halo="cover")


def model_of(name: str) -> ModelSource:
    dropout = ("model.attention_dropout=0.4",) if name in ("gat", "gatv2") else ()
    return configured("model", name, *SMALL, *dropout)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("model", "overlap"), product(MODELS, ["edges", "none", "central_marginal"]))
def test_every_model_equals_the_single_device(model: str, overlap: Overlap) -> None:
    data, config = DATA.get(model, small_graph()), model_of(model)
    strategy, worlds = replace(COVER, overlap=overlap), sorted({*WORLDS} - {1} | {4})
    assert_passed(check(strategy, {model: config}, worlds=worlds, dataset=data, as_it_is=True))


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("model", "codec", "dtype"),
    product(MODELS, [Identity(), BFloat16(), Uniform(bits=4)], [torch.float32, torch.float64]),
)
def test_bytes_equal_the_formula_and_are_fewer(model: str, codec: CodecConfig, dtype: torch.dtype) -> None:
    data, strategy = DATA.get(model, small_graph()), replace(COVER, codec=codec)
    job = make_job(strategy, model_of(model), data, world=4, dtype=dtype, epochs=1)
    sent = merge_ranks(job, ThreadWorld(4).run(job)).traffic[0]
    ir = record(job.model, data.num_features)
    parts = PartStats.of(data.edge_index, job.plan.part_of, 4, data.edges.type)
    work = Work(ir, GraphStats.of(data), parts, ())
    forward, backward = RowBytes(codec, dtype.itemsize, "cover").exchanges(work)
    assert (sent["forward"], sent["backward"]) == (forward, backward)
    rows = RowBytes(codec, dtype.itemsize).exchanges(work)
    assert forward + backward <= sum(rows)


@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
def test_a_cached_first_layer_keeps_what_arrived(model: str) -> None:
    alone = train_in_threads(Single(), model_of(model), small_graph(), world=1)
    cached = train_in_threads(COVER, model_of(model), small_graph(), world=3, first_layer="cached")
    assert_equal(cached, alone)
    assert cached.traffic[1]["forward"] < cached.traffic[0]["forward"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "strategy",
    [
        PipeGCN(),
        PipeGCN(smooth_features=True, smooth_gradients=True, decay=0.5),
        PipeGCN(staleness=0),
        Digest(period=2, gradients=True),
        Digest(period=3),
    ],
    ids=str,
)
def test_late_sums_are_sums_of_late_rows(strategy: PipeGCN | Digest) -> None:
    """A linear fold of rows of an earlier epoch may be made where they are. Others keep rows."""
    for model, epochs in (("gcn", 6), ("gat", 2)):
        kept = train_in_threads(strategy, model_of(model), small_graph(), world=3, epochs=epochs)
        covered = train_in_threads(
            replace(strategy, halo="cover"), model_of(model), small_graph(), world=3, epochs=epochs
        )
        assert_equal(covered, kept)
        if model == "gcn":
            assert covered.traffic[0]["forward"] < kept.traffic[0]["forward"]
        elif not isinstance(strategy, PipeGCN) or strategy.staleness:
            assert covered.traffic == kept.traffic


@pytest.mark.quick(1)
@pytest.mark.parametrize("weights", [(1, 1), (2, 3), (136, 152), (3, 1)])
def test_no_cover_is_lighter(weights: tuple[int, int]) -> None:
    """Against integer programming."""
    gen = np.random.default_rng(0)
    for _ in range(60):
        num_dst, num_src, edges = *gen.integers(1, 9, 2), gen.integers(1, 25)
        dst, src = gen.integers(0, num_dst, edges), gen.integers(0, num_src, edges)
        there = least_cover(torch.as_tensor(dst), torch.as_tensor(src), weights).numpy()
        assert not {*dst[there]} & {*dst[~there]}  # a destination's edges are folded at one place
        found = len({*dst[there]}) * weights[1] + len({*src[~there]}) * weights[0]
        ends = np.zeros((edges, num_dst + num_src))
        ends[np.arange(edges), dst] = ends[np.arange(edges), num_dst + src] = 1
        cost = np.array([weights[1]] * int(num_dst) + [weights[0]] * int(num_src))
        least = milp(cost, constraints=LinearConstraint(ends, 1), bounds=Bounds(0, 1), integrality=np.ones(len(cost)))
        assert found == round(least.fun)


def test_a_star_travels_as_one_row_either_way() -> None:
    """Ten sources of one destination, and one source of ten destinations."""
    zero, ten = torch.zeros(10, dtype=torch.int64), torch.arange(10)
    part_of = torch.tensor([0] + [1] * 10)
    for edges, found in (((ten + 1, zero), (0, 1)), ((zero, ten + 1), (1, 0))):
        counts = count_cover(torch.stack(edges), part_of, 2, None, (1, 1), 0)
        assert tuple(counts.sum((1, 2))[:2]) == found


@pytest.mark.parametrize(("world", "taken"), [(2, "rows"), (4, "cover")])
def test_auto_takes_a_cover_where_it_saves_a_tenth(world: int, taken: Halo) -> None:
    """Two random parts of this graph save 2 %, four 12 %."""
    sent: dict[Halo, int] = {}
    for halo in ("rows", "cover", "auto"):
        outcome = train_in_threads(GraphParallel(halo=halo), GCN(hidden=8), small_graph(), world=world, epochs=1)
        sent[halo] = outcome.traffic[0]["forward"]
    assert sent["cover"] < sent["rows"]
    assert (sent["cover"] <= 0.9 * sent["rows"]) == (taken == "cover")
    assert sent["auto"] == sent[taken]


def test_quantized_partial_rows_are_right_on_average() -> None:
    """One sum over in-edges of eight copies of the features, rows and partial rows in 2 bits, over 50 epochs: noise has
    mean 0 in 400 draws."""
    copies, epochs = 8, 50
    job = make_job(COVER, GCN(hidden=8), small_graph(), world=4)

    def body(comm: Communicator) -> tuple[torch.Tensor, int]:
        shard = Shard.open(small_graph() if comm.rank == 0 else None, job.plan.part_of, comm).to(
            comm.device, torch.float64
        )
        cover = make_cover(shard, comm, (1, 1))

        def coded(lists: RowLists, config: CodecConfig) -> CodedExchange:
            return CodedExchange(comm, config.build(lists, comm, 0))

        exact, two = coded(shard.row_lists, Identity()), Uniform(bits=2)
        codings = {0: (coded(cover.edges.shard.row_lists, two), coded(cover.lists, two), exact)}
        edges = EdgeOrder(shard, "edges")
        view = HaloGraph(shard, Pass(0), exchange=exact, edges=edges, covers={0: cover}, coded=codings)
        x, sums = shard.x.repeat(1, copies), list[torch.Tensor]()
        for epoch in range(epochs):
            sums.append(view.during(Pass(0, epoch, training=True)).aggregate(Sum(), (x,)))
            comm.flush(keep=0)
        plain = replace(view, covers={}).during(Pass(0)).aggregate(Sum(), (x,))
        comm.flush(keep=0)
        noise = (torch.stack(sums) - plain).unflatten(2, (copies, -1)).transpose(1, 2).flatten(0, 1)
        return noise, sum(map(len, cover.lists.sent.values()))

    found = ThreadWorld(4).run(body)
    assert sum(partial for _, partial in found) > 10
    noise = torch.cat([each for each, _ in found], dim=1)
    spread = noise.square().mean(0).sqrt()
    assert (spread > 0).double().mean() > 0.5
    ends = 2**-8 * 4  # the ends of a row's range travel in bfloat16, and values reach 4
    assert (noise.mean(0).abs() <= 5 * spread / 400**0.5 + ends).all()
    assert spread.mean() > 10 * ends


def test_a_run_repeats_to_the_bit() -> None:
    strategy, config = replace(COVER, codec=Uniform(bits=4)), model_of("gat")
    assert_same_bits(*(train_in_threads(strategy, config, small_graph(), world=3) for _ in range(2)))


@pytest.mark.parametrize("strategy", [GraphParallel, PipeGCN, Digest])
def test_a_codec_that_sends_nothing_has_no_cover(strategy: type[GraphParallel | PipeGCN | Digest]) -> None:
    with pytest.raises(ValueError, match=r"strategy.halo=cover: codec=drop sends nothing.*Set halo=rows"):
        strategy(codec=Drop(), halo="cover")
