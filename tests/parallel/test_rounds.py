"""Rounds are a pure function of the counts: every row once, within the limit, the same for sender and receiver."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnpar.parallel.sequential.rounds import RoundSchedule, Slice, plan_rounds


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
