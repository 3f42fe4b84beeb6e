"""Rounds are a pure function of the counts, and a model's aggregations are known before anything is sent."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composing import configured, names
from gnnpar.models.gnn import ModelConfig
from gnnpar.parallel.sequential.rounds import RoundSchedule, Slice, plan_rounds
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.shape_trace import shape_trace
from gnnpar.partition.shard import cut
from gnnpar.verify.conformance import make_job, small_graph, train_in_threads


@st.composite
def matrices(draw, largest=40):
    size = draw(st.integers(1, 6))
    row = st.lists(st.integers(0, largest), min_size=size, max_size=size)
    counts = draw(st.lists(row, min_size=size, max_size=size))
    return tuple(tuple(0 if p == q else n for q, n in enumerate(row)) for p, row in enumerate(counts))


@given(counts=matrices(), limit=st.one_of(st.none(), st.integers(1, 50)), group=st.booleans())
def test_every_row_travels_once_and_both_ends_agree(counts, limit, group):
    rounds = plan_rounds(counts, limit=limit, group=group)
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for r in range(len(rounds)):
        for p in range(len(counts)):
            incoming = rounds.incoming(p, r)
            assert len({s.peer for s in incoming}) == len(incoming), "one message a pair and round"
            assert limit is None or sum(s.num_rows for s in incoming) <= limit
            for s in incoming:
                assert Slice(p, s.first, s.last) in rounds.outgoing(s.peer, r)
                seen.setdefault((p, s.peer), []).append((s.first, s.last))
            assert sum(len(rounds.outgoing(q, r)) for q in range(len(counts))) == sum(
                len(rounds.incoming(q, r)) for q in range(len(counts))
            )
    for p, row in enumerate(counts):
        for q, n in enumerate(row):
            pieces = seen.get((p, q), [])
            assert [first for first, _ in pieces] + [n] == [0, *(last for _, last in pieces)], (p, q)


@given(counts=matrices(), limit=st.one_of(st.none(), st.integers(1, 50)), group=st.booleans())
def test_nearer_peers_come_first_in_both_directions(counts, limit, group):
    rounds = plan_rounds(counts, limit=limit, group=group)
    size = len(counts)
    for p in range(size):
        read = [(p - s.peer) % size for r in range(len(rounds)) for s in rounds.incoming(p, r)]
        served = [(s.peer - p) % size for r in range(len(rounds)) for s in rounds.outgoing(p, r)]
        assert read == sorted(read)
        assert served == sorted(served)


FULL = tuple(tuple(0 if p == q else 10 for q in range(5)) for p in range(5))


@pytest.mark.parametrize(
    ("sizing", "row_nbytes", "expected"),
    [
        ("peer", 8, 4),
        ("one", 8, 1),
        ("part", 8, 2),  # 20 rows owned, 10 of each peer read
        (10 * 8 / 2**20, 8, 4),
        (5 * 8 / 2**20, 8, 8),  # two pieces a peer
        (10 * 8 / 2**20, 16, 8),  # wider rows, smaller rounds
        (1000.0, 8, 1),
    ],
)
def test_sizes_of_rounds(sizing, row_nbytes, expected):
    schedule = RoundSchedule(sizing, 20, FULL, FULL)
    assert len(schedule.pulls(row_nbytes)) == expected
    assert len(schedule.pushes(row_nbytes)) == expected


def test_a_budget_below_one_row_is_refused_with_numbers():
    with pytest.raises(ValueError, match=r"strategy\.rounds=1e-05 MiB holds no row of 512 bytes: set it to at least"):
        RoundSchedule(1e-5, 20, FULL, FULL).limit(512)


def test_peers_that_share_nothing_take_no_round():
    pairs = ((0, 5, 0, 0), (5, 0, 0, 0), (0, 0, 0, 7), (0, 0, 7, 0))
    assert len(plan_rounds(pairs, limit=None, group=False)) == 2  # distances 1 and 3; nothing in distance 2
    assert len(plan_rounds(((0,),), limit=3, group=True)) == 0


def shard_of(data):
    return cut(data, torch.zeros(data.num_nodes, dtype=torch.long), 1)[0]


@pytest.mark.parametrize("model", names("model"))
def test_every_model_is_one_fold_a_layer(model):
    data = small_graph()
    config = configured("model", model, "model.hidden=8", "model.num_layers=3")
    uses = shape_trace(config.build(data.num_features, 3, seed=0), shard_of(data))
    assert [use.layer for use in uses] == [0, 1, 2]
    assert [bool(use.pushed) for use in uses] == [model == "gat"] * 3


def test_rows_are_known_without_a_neighbour():
    data = small_graph()
    config = configured("model", "gat", "model.hidden=8", "model.heads=2", "model.attention_dropout=0.5")
    uses = shape_trace(config.build(data.num_features, 3, seed=0), shard_of(data))
    assert [[each.shape for each in use.src] for use in uses] == [[(2, 4), (2,)], [(1, 3), (1,)]]
    assert [each.shape for each in uses[0].pushed] == [(2, 4), (2,), (2,), (2,)]


class Forward:
    """A fold that somebody forgot to differentiate."""

    needs_src = linear = needs_edge_ids = False

    def init(self, num_dst, x):
        return ()

    def update(self, state, block, x):
        return (x.src[0].new_zeros(block.num_dst, *x.src[0].shape[1:]),)

    def finish(self, state):
        return state[0], ()


class ForwardConv(nn.Module):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.weight = nn.Linear(in_dim, out_dim)

    def forward(self, g, h):
        return g.aggregate(Forward(), g.source(lambda g, h: (self.weight(h),), h))


@dataclass(frozen=True, kw_only=True)
class ForwardModel(ModelConfig):
    def conv(self, in_dim, out_dim, *, index, aggregate_first):
        return ForwardConv(in_dim, out_dim)


def test_a_fold_without_a_gradient_is_refused_before_training():
    with pytest.raises(ValueError, match=r"the fold Forward of layer 0 has no gradient rule: give it a method grad"):
        train_in_threads(SAR(), ForwardModel(hidden=4), small_graph(), world=2)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("backward", "row"), [("pull", 40), ("push", 56)])
def test_a_budget_below_one_row_is_refused_before_training(backward, row):
    """One head of width 4 in fp64: 5 numbers a row pulled, 7 pushed; the widest row of all layers decides."""
    config = configured("model", "gat", "model.hidden=4", "model.heads=1")
    strategy = SAR(rounds=(row - 1) / 2**20, backward=backward)
    make_job(strategy, config, small_graph(), world=2)
    with pytest.raises(ValueError, match=f"holds no row of {row} bytes"):
        train_in_threads(strategy, config, small_graph(), world=2)
    assert train_in_threads(SAR(rounds=row / 2**20, backward=backward), config, small_graph(), world=2, epochs=1)
