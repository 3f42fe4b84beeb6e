"""Schedules: what generators make can run, and what cannot run is refused with its reason."""

import itertools
from dataclasses import replace

import pytest

from gnnpar.parallel.pipeline.schedule import (
    KINDS,
    Action,
    Schedule,
    fill_drain,
    lower,
    message_of,
    one_forward_one_backward,
    validate,
)

SIZES = [(s, k, v) for s, k, v in itertools.product([1, 2, 3, 4, 8], [1, 2, 3, 8, 16], [1, 2, 3])]


@pytest.mark.parametrize("kind", KINDS)
def test_actions_have_a_text_form_both_ways(kind):
    action = Action(kind, 3, 12)
    assert Action.parse(str(action)) == action


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
    ("old", "new", "said"),
    [
        ("F1@0 B1@0", "B1@0 F1@0", r"B1@0 on rank 0 comes before F1@0"),
        ("F0@1 F1@1", "F1@1 F0@1", r"F1@1 on rank 1 comes before F0@1"),
        ("B1@1 B0@1", "B1@1", "B0@1 is missing on rank 1"),
        ("B1@1 B0@1", "B1@1 B1@1 B0@1", "B1@1 is there twice on rank 1"),
        ("F0@0 F1@0", "F0@0 F1@0 F1@1", "F1@1 is on rank 0, but its stage is on rank 1"),
        ("F0@0 F1@0", "F0@0 F1@0 F2@0", "F2@0 on rank 0 does not exist: there are 2 virtual stages and 2 slots"),
        ("F0@0 F1@0 B1@0 B0@0", "F0@0 B0@0 F1@0 B1@0", "deadlock: rank 0 at B0@0 for B0@1; rank 1 at F1@1 for F1@0"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(old, new, said):
    with pytest.raises(ValueError, match=said):
        validate(changed(str(fill_drain(2, 2)), old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("SF0@0 ", "", "SF0@0 is missing on rank 0"),
        ("RF0@1 RF1@1 F0@1", "RF1@1 RF0@1 F0@1", "message 0 from rank 0 to rank 1 is for RF0@1, but .* RF1@1"),
        ("F0@0 SF0@0", "SF0@0 F0@0", "SF0@0 on rank 0 comes before F0@0"),
        ("RF1@1 F0@1 F1@1", "F0@1 F1@1 RF1@1", "F1@1 on rank 1 comes before RF1@1"),
        ("B1@1 SB1@1", "B1@1 SF1@1 SB1@1", "SF1@1 has no neighbour"),
    ],
)
def test_messages_that_do_not_fit_are_refused(old, new, said):
    with pytest.raises(ValueError, match=said):
        validate(changed(str(lower(fill_drain(2, 2))), old, new))


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="stages=2, slots=0"):
        fill_drain(2, 0)
