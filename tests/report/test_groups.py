"""Groups: ratios inside blocks, accuracies paired by seed beside the control, censored times, what is bold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gnnpar.report.comparison import Comparison, compare
from gnnpar.report.formatting import to_target
from gnnpar.report.groups import Group, cells
from gnnpar.report.runs import collect
from gnnpar.report.targets import Median, median
from planted_runs import DROP, Plant, accurate

OURS: dict[str, Any] = {"strategy": "graph_parallel", "world_size": 2, "transport": "gloo"}


def compared(folder: Path, **options: Any) -> Comparison:
    return compare(collect([folder]), **options)


def group_of(found: Comparison, strategy: str = "graph_parallel", *, control: bool = False) -> Group:
    (group,) = [g for g in found.groups if g.first["strategy"] == strategy and g.control == control]
    return group


def test_ratios_form_inside_blocks_only(plant: Plant, tmp_path: Path) -> None:
    for block, (base, ours) in enumerate([(8.0, 4.0), (8.0, 1.0), (1.0, 1.0)]):
        plant(median=base, block=block)
        plant(median=ours, block=block, **OURS)
    plant(median=0.001, block=7, **OURS)  # no baseline ran beside it
    group = group_of(compared(tmp_path))
    assert group.ratios == [2.0, 8.0, 1.0]
    assert group.speedup is not None and group.speedup.value == pytest.approx(16 ** (1 / 3))
    assert 1.0 <= group.speedup.low < group.speedup.value < group.speedup.high <= 8.0
    assert group.rows[-1]["why_no_ratio"] == "single differs in block"


def test_the_negative_control_is_no_baseline(plant: Plant, tmp_path: Path) -> None:
    plant(median=4.0, **OURS)
    plant(median=1.0, **OURS | DROP)
    plant(median=2.0)
    found = compared(tmp_path, baseline="graph_parallel")
    assert group_of(found, "single").ratios == [2.0]
    assert group_of(found, control=True).ratios == [4.0]


def test_accuracies_are_paired_by_seed_and_stand_beside_the_control(plant: Plant, tmp_path: Path) -> None:
    for seed in range(6):
        level = 70.0 + 3 * seed  # seeds differ far more than strategies do
        plant(seed=seed, **accurate(level))
        plant(seed=seed, **OURS, **accurate(level - 0.1 + 0.02 * seed))
        plant(seed=seed, **OURS | DROP, **accurate(level - 5 - 0.1 * seed))
    plant(seed=99, **OURS, **accurate(1.0))  # no baseline of this seed: counted in no difference
    found = compared(tmp_path)
    ours, control = group_of(found), group_of(found, control=True)
    assert ours.difference is not None and ours.difference.n == 6
    assert ours.difference.value == pytest.approx(-0.05)
    assert (ours.verdict, control.verdict, ours.control_verdict) == ("not inferior", "inferior", "inferior")
    assert group_of(found, "single").verdict == "baseline"
    assert found.notes == []
    assert group_of(compared(tmp_path, margin=0.01)).verdict != "not inferior"


@pytest.mark.parametrize(
    ("loss", "said"), [(0.0, "dataset unfit for the claim"), (None, "no negative control"), (0.3, "inconclusive")]
)
def test_a_control_that_shows_nothing_is_said(plant: Plant, tmp_path: Path, loss: float | None, said: str) -> None:
    for seed in range(4):
        plant(seed=seed, **accurate(80 + seed))
        plant(seed=seed, **OURS, **accurate(80 + seed))
        if loss is not None:
            plant(seed=seed, **OURS | DROP, **accurate(80 + seed - loss * (1 + (-1) ** seed)))
    (note,) = compared(tmp_path).notes
    assert said in note and note.startswith("sbm/gcn: ")


def test_an_epoch_of_many_steps_is_said(plant: Plant, tmp_path: Path) -> None:
    plant(seed=0)
    plant(seed=0, strategy="minibatch", settings__strategy={"batch_size": 64})
    assert compared(tmp_path).notes[0] == (
        "sbm/gcn: an epoch of minibatch is many steps: compare time to target, not epochs"
    )


def test_what_did_not_complete_is_counted(plant: Plant, tmp_path: Path) -> None:
    plant(seed=0)
    plant(seed=0, **OURS)
    plant(seed=1, median=None, status="failed", error="rank 1: killed", **OURS)
    group = group_of(compared(tmp_path))
    assert (cells(group)["runs"], cells(group)["completed"], len(group.times)) == (2, 1, 1)


def test_runs_that_differ_in_more_than_seed_and_block_are_groups_of_their_own(plant: Plant, tmp_path: Path) -> None:
    plant(seed=0, settings__seed=0)
    plant(seed=1, settings__seed=1)
    plant(seed=0, settings__optim__lr=0.5)
    plant(seed=0, oversubscribed=True)
    found = compared(tmp_path)
    assert [len(group.rows) for group in found.groups] == [2, 1, 1]
    assert "optim.lr=0.5" in {word for group in found.groups for word in group.changed.split()}
    assert found.repeated


@pytest.mark.parametrize(
    ("values", "censored", "want"),
    [
        ([1.0, 2.0, 9.0], [False, False, False], (2.0, 2.0)),
        ([1.0, 2.0, 9.0], [False, False, True], (2.0, 2.0)),  # wherever it would have got there: not before 9
        ([3.0, 4.0, 5.0], [True, False, False], (4.0, 5.0)),  # whether it would have got there before 4, 5 or neither
        ([1.0, 10.0], [False, True], (5.5, math.inf)),
        ([10.0, 11.0, 12.0], [True, True, True], (11.0, math.inf)),
        ([1.0, 2.0], [False, False], (1.5, 1.5)),
    ],
)
def test_medians_of_censored_times_are_known_or_between_bounds(values: list, censored: list, want: tuple) -> None:
    assert median(values, censored) == Median(*want)


def test_bounds_of_a_median_are_words() -> None:
    assert to_target(None, "s") == "-"
    assert to_target(Median(2.0, 2.0), "s") == to_target(Median(2.0, 2.0000001), "s") == "2.00 s"
    assert to_target(Median(2.0, 2.5), "s") == "2.00 s to 2.50 s"
    assert to_target(Median(2**20, math.inf), "B") == "> 1.0 MiB"


def test_the_target_is_fixed_on_validation_and_nobody_is_dropped(plant: Plant, tmp_path: Path) -> None:
    for seed, best in enumerate((0.80, 0.82)):
        plant(seed=seed, metric__best_val=best, curve=[0.5, best])
        plant(seed=seed, **OURS, curve=[0.1, 0.2, 0.81] if seed else [0.1] * 5)
    found = compared(tmp_path)
    base, ours = group_of(found, "single"), group_of(found)
    assert base.target == pytest.approx(0.81 - math.sqrt(2) / 100)
    assert base.seconds_to_target == Median(2.0, 2.0)
    assert ours.seconds_to_target == Median(4.0, math.inf)  # 3 s, and more than 5 s
    assert ours.bytes_to_target == Median(400.0, math.inf)
    fixed = group_of(compared(tmp_path, target=0.15))
    assert fixed.target == 0.15
    assert fixed.seconds_to_target == Median(3.5, math.inf)


def test_bold_only_where_a_paired_test_says_so(plant: Plant, tmp_path: Path) -> None:
    for seed in range(5):
        plant(seed=seed, median=2.0 + seed, **accurate(80 + seed))
        plant(seed=seed, median=(1.0 + seed / 10) * (2.0 + seed) / 2, **OURS, **accurate(80 + seed + (-1) ** seed))
    found = compared(tmp_path)
    assert group_of(found).best == {"speedup"}
    assert group_of(found, "single").best == set()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"epochs": 77}, "graph_parallel/gcn: no run of single with equal epochs (77; single "),
        ({"hashes__graph": "f" * 64}, "graph_parallel/gcn: no run of single with equal graph (ffffffff; single "),
        ({"settings__model__hidden": 7}, "graph_parallel/gcn: no run of single with equal model settings"),
        ({"commit": "abc"}, "2 commits: "),
        ({"session": "later"}, "graph_parallel/gcn: timed in another session than single, not side by side with it"),
        ({"versions__torch": "1.0"}, "2 torch versions: "),
    ],
)
def test_unfair_comparisons_are_told(plant: Plant, tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    plant()
    plant(**OURS, **changes)
    (warning,) = compared(tmp_path).warnings
    assert warning.startswith(line)


def test_strategies_that_are_unfair_alike_share_a_line(plant: Plant, tmp_path: Path) -> None:
    for model in ("gcn", "gat"):
        plant(model=model)
    for strategy, model in (("sar", "gcn"), ("sar", "gat"), ("adaqp", "gcn"), ("adaqp", "gat"), ("tag", "gcn")):
        plant(strategy=strategy, model=model, provenance="emulated")
    (warning,) = compared(tmp_path).warnings
    assert warning.startswith("sar, adaqp with gcn, gat; tag with gcn (5 runs): no run of single with equal provenance")


def test_among_baselines_that_of_the_same_session_counts(plant: Plant, tmp_path: Path) -> None:
    plant(session="a", median=2.0)
    plant(session="b", median=1.0)
    plant(session="a", median=0.5, **OURS)
    found = compared(tmp_path)
    assert [row["ratio"] for row in found.rows] == [1.0, 1.0, 4.0]
    assert found.warnings == []


def test_a_fair_comparison_has_no_warning(plant: Plant, tmp_path: Path) -> None:
    for seed in range(2):
        plant(seed=seed)
        plant(seed=seed, **OURS)
    assert compared(tmp_path).warnings == []
