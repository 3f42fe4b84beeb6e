"""Schedules: what can run, which gradients exist, simulated times against closed forms, cuts into stages."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gnnpar.parallel.pipeline.placing import balanced, even
from gnnpar.parallel.pipeline.schedule import (
    Action,
    Schedule,
    fill_drain,
    inputs,
    lower,
    message_of,
    one_forward_one_backward,
    validate,
)
from gnnpar.parallel.pipeline.simulate import Counts, Coverage, Link, bubble_share, expected, grid, kept, simulate

SIZES = [(s, k, v) for s, k, v in itertools.product([1, 2, 3, 4, 8], [1, 2, 3, 8, 16], [1, 2, 3])]


def test_a_schedule_has_a_text_form_both_ways():
    schedule = lower(fill_drain(2, 3, virtual=2))
    assert Schedule.parse(str(schedule)) == schedule
    assert str(fill_drain(2, 2)) == "F0@0 F1@0 B1@0 B0@0\nF0@1 F1@1 B1@1 B0@1"
    with pytest.raises(ValueError, match="'F3' is no action"):
        Action.parse("F3")


@pytest.mark.parametrize(("stages", "slots", "virtual"), SIZES)
def test_what_is_generated_can_run(stages, slots, virtual):
    made = [fill_drain(stages, slots, virtual=virtual)]
    made += [one_forward_one_backward(stages, slots)] if virtual == 1 else []
    for schedule in made:
        validate(schedule)
        lowered = lower(schedule)
        messages = [action for mine in lowered.actions for action in mine if not action.computes]
        crossings = 0 if stages == 1 else stages * virtual - 1
        assert len(messages) == 2 * 2 * slots * crossings  # two directions, a send and a receive each


def test_a_receive_is_posted_one_slot_ahead_and_no_further():
    """Two buffers a direction are enough: when an action runs, at most its own and the next receive are posted."""
    for schedule in [fill_drain(4, 6), fill_drain(2, 4, virtual=3), one_forward_one_backward(3, 5)]:
        for mine in lower(schedule).actions:
            posted, seen = 0, []
            for action in mine:
                posted += action.kind.startswith("receive")
                if action.computes:
                    seen.append(posted)
                    posted -= Action.parse(f"R{action}") in mine
            assert max(seen) <= 2
    first = lower(fill_drain(2, 3)).actions[1]
    assert " ".join(map(str, first)).startswith("RF0@1 RF1@1 F0@1 RF2@1 F1@1 F2@1 B2@1 SB2@1 B1@1")


def test_messages_have_a_sender_and_a_receiver():
    schedule = lower(fill_drain(2, 2, virtual=2))
    assert message_of(schedule, Action.parse("SF1@1")) == (1, 0, Action.parse("RF1@2"))
    assert message_of(schedule, Action.parse("RB0@1")) == (0, 1, Action.parse("RB0@1"))


def changed(text: str, old: str, new: str) -> Schedule:
    assert old in text
    return replace(Schedule.parse(text.replace(old, new)), stages=2, slots=2, virtual=1)


@pytest.mark.parametrize(
    ("lowered", "old", "new", "said"),
    [
        (False, "F1@0 B1@0", "B1@0 F1@0", r"B1@0 on rank 0 comes before F1@0"),
        (False, "F0@1 F1@1", "F1@1 F0@1", r"F1@1 on rank 1 comes before F0@1"),
        (False, "B1@1 B0@1", "B1@1", "B0@1 is missing on rank 1"),
        (False, "B1@1 B0@1", "B1@1 B1@1 B0@1", "B1@1 is there twice on rank 1"),
        (False, "F0@0 F1@0", "F0@0 F1@0 F1@1", "F1@1 is on rank 0, but its stage is on rank 1"),
        (False, "F0@0 F1@0", "F0@0 F1@0 F2@0", "F2@0 on rank 0 does not exist: there are 2 virtual stages and 2 slots"),
        (
            False,
            "F0@0 F1@0 B1@0 B0@0",
            "F0@0 B0@0 F1@0 B1@0",
            "deadlock: rank 0 at B0@0 for B0@1; rank 1 at F1@1 for F1@0",
        ),
        (True, "SF0@0 ", "", "SF0@0 is missing on rank 0"),
        (True, "RF0@1 RF1@1 F0@1", "RF1@1 RF0@1 F0@1", "message 0 from rank 0 to rank 1 is for RF0@1, but .* RF1@1"),
        (True, "F0@0 SF0@0", "SF0@0 F0@0", "SF0@0 on rank 0 comes before F0@0"),
        (True, "RF1@1 F0@1 F1@1", "F0@1 F1@1 RF1@1", "F1@1 on rank 1 comes before RF1@1"),
        (True, "B1@1 SB1@1", "B1@1 SF1@1 SB1@1", "SF1@1 has no neighbour"),
    ],
)
def test_a_schedule_that_cannot_run_or_sends_what_does_not_fit_is_refused(lowered, old, new, said):
    made = fill_drain(2, 2)
    with pytest.raises(ValueError, match=said):
        validate(changed(str(lower(made) if lowered else made), old, new))


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="stages=2, slots=0"):
        fill_drain(2, 0)


EDGES = [[9, 1, 2, 0], [3, 8, 1, 1], [0, 2, 7, 4], [5, 0, 1, 6]]  # [into, from]
TOTAL = sum(map(sum, EDGES))


def coverage(schedule: Schedule, edges: Counts, order: Sequence[int]) -> Coverage:
    """Count the coverage of one epoch. `edges` [K, K] by chunk, `order[slot]` the chunk at a slot."""
    cells = [(i, j, float(edges[order[i]][order[j]])) for i in range(len(order)) for j in range(len(order))]
    matrices = [kept(schedule, stage) for stage in range(schedule.num_stages)]
    return Coverage(
        own=sum(n for i, j, n in cells if i == j) / TOTAL,
        fresh=sum(n for i, j, n in cells if j < i) / TOTAL,
        stale=sum(n for i, j, n in cells if j > i) / TOTAL,
        kept=sum(n for matrix in matrices for i, j, n in cells if matrix[i][j]) / TOTAL / len(matrices),
    )


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_lifo_keeps_every_fresh_edge(stages, order):
    found = coverage(fill_drain(stages, 4), EDGES, order)
    fresh = sum(EDGES[order[i]][order[j]] for i in range(4) for j in range(i))
    assert found.fresh == pytest.approx(fresh / TOTAL)
    assert found.kept == pytest.approx((30 + fresh) / TOTAL)
    assert found.kept_of_fresh == pytest.approx(1.0)
    assert found.own + found.fresh + found.stale == pytest.approx(1.0)


def test_virtual_stages_change_nothing():
    assert coverage(fill_drain(2, 4, virtual=2), EDGES, (1, 0, 2, 3)) == coverage(fill_drain(2, 4), EDGES, (1, 0, 2, 3))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_1f1b_keeps_no_edge_across_chunks(stages):
    found = coverage(one_forward_one_backward(stages, 4), EDGES, (0, 1, 2, 3))
    assert found.kept == found.own == pytest.approx(30 / TOTAL)
    assert found.kept_of_fresh == 0.0


@pytest.mark.parametrize("schedule", [fill_drain(2, 4), one_forward_one_backward(2, 4), fill_drain(2, 4, virtual=2)])
def test_the_expectation_is_the_mean_over_all_orders(schedule):
    every = [coverage(schedule, EDGES, order) for order in itertools.permutations(range(4))]
    mean = expected(schedule, EDGES)
    for name in ("own", "fresh", "stale", "kept"):
        assert getattr(mean, name) == pytest.approx(sum(getattr(c, name) for c in every) / len(every))


def test_bad_sizes():
    with pytest.raises(ValueError, match=r"edges are \[4, 4\], but the schedule has 3 slots"):
        expected(fill_drain(2, 3), EDGES)


def costs(forward: float = 1.0, backward: float = 2.0):
    return lambda kind, stage, slot: {"forward": forward, "backward": backward}.get(kind, 0.0)


@pytest.mark.parametrize(("stages", "slots"), [(1, 4), (2, 8), (4, 16), (8, 32), (16, 64), (4, 2)])
def test_the_bubble_of_fill_drain(stages, slots):
    timeline = simulate(fill_drain(stages, slots), costs())
    assert timeline.makespan == pytest.approx(3 * (slots + stages - 1))
    assert timeline.bubble_share == pytest.approx(bubble_share(stages, slots))
    for rank in range(stages):
        assert timeline.bubble(rank) / timeline.makespan == pytest.approx((stages - 1) / (slots + stages - 1))


@pytest.mark.parametrize(("stages", "slots", "virtual"), [(2, 4, 2), (4, 16, 2), (8, 32, 2), (8, 32, 4), (4, 4, 3)])
def test_the_bubble_of_virtual_stages(stages, slots, virtual):
    timeline = simulate(fill_drain(stages, slots, virtual=virtual), costs())
    assert timeline.bubble_share == pytest.approx(bubble_share(stages, slots, virtual))


def test_a_chain_by_hand_with_a_slow_link():
    """Two ranks, two slots, F 1 s, B 2 s, messages 0.5 s + 1 s latency."""
    link = Link(latency_seconds=1.0, bytes_per_second=2.0)
    timeline = simulate(fill_drain(2, 2), costs(), link=link, nbytes=lambda *_: 1.0)
    found = {str(s.action): (s.start, s.end) for s in timeline.spans if not s.action.kind.startswith("receive")}
    assert found == {
        "F0@0": (0, 1),
        "SF0@0": (1, 2.5),
        "F1@0": (1, 2),
        "SF1@0": (2, 3.5),
        "F0@1": (2.5, 3.5),
        "F1@1": (3.5, 4.5),
        "B1@1": (4.5, 6.5),
        "SB1@1": (6.5, 8),
        "B0@1": (6.5, 8.5),
        "B1@0": (8, 10),
        "SB0@1": (8.5, 10),
        "B0@0": (10, 12),
    }
    assert timeline.makespan == 12
    assert (timeline.busy(0), timeline.bubble(0)) == (6, 6)


def test_a_link_slower_than_the_computation_sets_the_pace():
    """Messages of 5 s one after the other: the last of K forwards is there after 1 + 5 K."""
    timeline = simulate(fill_drain(2, 6), costs(), link=Link(bytes_per_second=1.0), nbytes=lambda *_: 5.0)
    wire = sorted((s.start, s.end) for s in timeline.spans if s.action.kind == "send_forward")
    assert wire == [(1 + 5 * i, 6 + 5 * i) for i in range(6)]


def test_half_duplex_is_never_faster_and_slower_where_directions_meet():
    made = one_forward_one_backward(2, 6)  # both directions at once
    full, half = (
        simulate(made, costs(1, 1), link=Link(bytes_per_second=1.0, duplex=duplex), nbytes=lambda *_: 1.5).makespan
        for duplex in ("full", "half")
    )
    assert half > full


@pytest.mark.parametrize("seed", range(20))
def test_laws_of_random_timelines(seed):
    """No rank does two things at once, nothing starts before its inputs, nothing that could start waits."""
    draw = random.Random(seed)
    stages, slots, virtual = draw.randint(1, 4), draw.randint(1, 6), draw.randint(1, 3)
    schedule = lower(fill_drain(stages, slots, virtual=virtual))
    took = {a: draw.uniform(0.1, 2.0) if a.computes else 0.0 for mine in schedule.actions for a in mine}
    timeline = simulate(
        schedule,
        lambda kind, stage, slot: took[type(next(iter(took)))(kind, stage, slot)],
        link=Link(latency_seconds=0.1, bytes_per_second=1.0),
        nbytes=lambda *_: draw.uniform(0, 1.5),
    )
    span_of = {s.action: s for s in timeline.spans}
    assert set(span_of) == {a for mine in schedule.actions for a in mine}
    for mine in schedule.actions:
        free = 0.0
        for action in (a for a in mine if a.computes):
            span = span_of[action]
            ready = [span_of[a].end for a in inputs(schedule, action) if not a.kind.startswith("send")]
            assert span.start == pytest.approx(max([free, *ready]))
            assert span.end - span.start == pytest.approx(took[action])
            free = span.end
    for rank in range(stages):
        wire = sorted((s.start, s.end - 0.1) for s in timeline.spans if s.rank == rank and s.action.kind[:4] == "send")
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(wire))


def lock_step(schedule, seconds):
    """Return GNNPipe's estimate of an epoch of fill-drain: in every slot all stages wait for the slowest."""
    stages, total = schedule.stages, 0.0
    for step in range(schedule.slots + stages - 1):
        active = [(stage, step - stage) for stage in range(stages) if 0 <= step - stage < schedule.slots]
        total += max(seconds("forward", *each) for each in active) + max(seconds("backward", *each) for each in active)
    return total


@pytest.mark.parametrize("seed", range(10))
def test_the_published_estimate_is_never_below_ours(seed):
    """Lock step waits in every slot for the slowest stage; without barriers imbalance averages out (spec 9.7)."""
    draw = random.Random(seed)
    cost = {(kind, s, k): draw.uniform(1, 2) for kind in ("forward", "backward") for s in range(4) for k in range(8)}
    made = fill_drain(4, 8)
    ours = simulate(made, lambda *action: cost.get(action, 0.0)).makespan
    assert ours <= lock_step(made, lambda *action: cost[action]) + 1e-9


def test_the_grid():
    lines = ["rank 0  F0 F1 F2 .  .  B2 B1 B0", "rank 1  .  F0 F1 F2 B2 B1 B0 ."]
    assert grid(fill_drain(2, 3)).splitlines() == [*lines, "2 ranks, 3 slots: 8 steps, bubble 25.0%"]
    assert "F0@2" in grid(fill_drain(2, 2, virtual=2))


def every_cut(num_layers: int, stages: int):
    for ends in itertools.combinations(range(1, num_layers), stages - 1):
        marks = (0, *ends, num_layers)
        yield tuple(range(a, b) for a, b in itertools.pairwise(marks))


@pytest.mark.parametrize("seed", range(40))
def test_the_balanced_cut_is_the_best_of_all(seed):
    draw = random.Random(seed)
    num_layers = draw.randint(1, 9)
    stages = draw.randint(1, num_layers)
    costs = [float(draw.choice([0, 1, 1, 2, 3, 8])) for _ in range(num_layers)]
    slowest = {cut: max(sum(costs[i] for i in layers) for layers in cut) for cut in every_cut(num_layers, stages)}
    best = min(slowest.values())
    expected = min((tuple(map(len, cut)), cut) for cut, cost in slowest.items() if cost == best)[1]
    assert balanced(costs, stages) == expected


def test_even_cuts_give_the_rest_to_the_first_stages():
    assert [len(layers) for layers in even(33, 8)] == [5, 4, 4, 4, 4, 4, 4, 4]
    assert even(3, 3) == (range(0, 1), range(1, 2), range(2, 3))


def test_the_expensive_first_layer_of_physics_gets_a_stage_of_its_own():
    """Cutting by cost instead of by count takes the slowest stage from 2.56 to about 1.5 ms."""
    costs = [1.36] + [0.30] * 32  # ms a chunk
    by_count = max(sum(costs[i] for i in layers) for layers in even(33, 8))
    by_cost = max(sum(costs[i] for i in layers) for layers in balanced(costs, 8))
    assert by_count == pytest.approx(2.56)
    assert by_cost == pytest.approx(1.5, abs=0.05)


@pytest.mark.parametrize("cut", [lambda: even(3, 4), lambda: balanced([1.0, 2.0, 3.0], 4)])
def test_more_stages_than_layers(cut):
    with pytest.raises(ValueError, match="3 layers cannot be cut into 4 stages"):
        cut()
