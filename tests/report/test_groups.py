"""Groups: ratios inside blocks, accuracies paired by seed, censored times, what is bold; intervals and verdicts."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import stdtrit

import gnnpar
from gnnpar.config.jobs import Job
from gnnpar.report import curves
from gnnpar.report.comparison import Comparison, compare
from gnnpar.report.exports import cells
from gnnpar.report.fairness import differences, exchanged
from gnnpar.report.formatting import row_name, to_target
from gnnpar.report.groups import Group, Median, median
from gnnpar.report.runs import collect
from gnnpar.report.statistics import FEWEST_BLOCKS, FEWEST_SEEDS, family, geometric_mean, mean, non_inferiority
from planted_runs import DROP, OURS, Plant, accurate


def compared(folder: Path, **options: Any) -> Comparison:
    return compare(collect([folder]), **options)


def group_of(found: Comparison, strategy: str = "graph_parallel", *, control: bool = False) -> Group:
    (group,) = [g for g in found.groups if g.first["strategy"] == strategy and g.control == control]
    return group


def test_ratios_form_inside_blocks_only(plant: Plant, tmp_path: Path) -> None:
    for block, (base, ours) in enumerate([(8.0, 4.0), (8.0, 1.0), (1.0, 1.0)]):
        plant(epoch=base, block=block)
        plant(epoch=ours, block=block, **OURS)
    plant(epoch=0.001, block=7, **OURS)  # no baseline ran beside it
    group = group_of(compared(tmp_path))
    assert list(group.ratios.values()) == [2.0, 8.0, 1.0]
    assert group.speedup is not None and group.speedup.value == pytest.approx(16 ** (1 / 3))
    assert group.speedup.low < 1 < group.speedup.value < 8 < group.speedup.high
    assert group.rows[-1]["why_no_ratio"] == "single differs in block"


def test_the_negative_control_is_no_baseline(plant: Plant, tmp_path: Path) -> None:
    plant(epoch=4.0, **OURS)
    plant(epoch=1.0, **OURS | DROP)
    plant(epoch=2.0)
    found = compared(tmp_path, baseline="graph_parallel")
    assert list(group_of(found, "single").ratios.values()) == [2.0]
    assert list(group_of(found, control=True).ratios.values()) == [4.0]


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


def test_a_run_that_went_on_from_another_training_is_no_sample_of_its_seed(plant: Plant, tmp_path: Path) -> None:
    for seed in range(6):
        plant(f"single{seed}", seed=seed, **accurate(80 + seed))
        plant(f"ours{seed}", seed=seed, **OURS, **accurate(80 + seed))
    begun = {"begun_otherwise": {"epochs": 5, "settings": ["optim"]}}
    plant("ours3 again", seed=3, **OURS, **accurate(20.0), **begun)
    plant("ours4 again", seed=4, hashes__split="0" * 64, **OURS, **accurate(30.0))
    first, other = [g for g in compared(tmp_path).groups if g.first["strategy"] == "graph_parallel"][:2]
    assert (first.verdict, first.difference and first.difference.value, len(first.rows)) == ("not inferior", 0.0, 7)
    assert "begun otherwise" in other.changed and other.difference is None


@pytest.mark.parametrize(
    ("loss", "said"), [(0.0, "dataset unfit for the claim"), (None, "no negative control"), (2.0, "inconclusive")]
)
def test_a_control_that_shows_nothing_is_said(plant: Plant, tmp_path: Path, loss: float | None, said: str) -> None:
    for seed in range(6):
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
    plant(seed=1, epoch=None, status="failed", error="rank 1: killed", **OURS)
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
    assert median(list(zip(values, censored, strict=True))) == Median(*want)


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
        plant(seed=seed, epoch=2.0 + seed, **accurate(80 + seed))
        plant(seed=seed, epoch=(1.0 + seed / 10) * (2.0 + seed) / 2, **OURS, **accurate(80 + seed + (-1) ** seed))
    found = compared(tmp_path)
    assert group_of(found).best == {"speedup"}
    assert group_of(found, "single").best == set()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"epochs": 77}, "graph_parallel/gcn: no run of single with equal epochs (77; single "),
        ({"hashes__graph": "f" * 64}, "graph_parallel/gcn: no run of single with equal graph (ffffffff; single "),
        ({"settings__model__hidden": 7}, "graph_parallel/gcn: no run of single with equal model settings"),
        ({"session": "later"}, "graph_parallel/gcn: timed in another session than single, not side by side with it"),
    ],
)
def test_unfair_comparisons_are_told(plant: Plant, tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    plant()
    plant(**OURS, **changes)
    found = compared(tmp_path)
    (warning,) = found.warnings
    assert warning.startswith(line)
    blank = group_of(found)
    assert blank.speedup is None and blank.why_no_speedup.startswith("single ")
    by_time = "session" in changes
    assert (blank.difference is not None, blank.verdict, bool(blank.why_no_difference)) == (
        (True, "not enough runs", False) if by_time else (False, "", True)
    )


@pytest.mark.parametrize(
    ("changes", "line"), [({"commit": "abc"}, "2 commits: "), ({"versions__torch": "1.0"}, "2 torch versions: ")]
)
def test_what_forbids_no_ratio_is_named_apart(plant: Plant, tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    plant()
    plant(**OURS, **changes)
    found = compared(tmp_path)
    assert found.warnings == [] and group_of(found).speedup is not None
    assert [remark.startswith(line) for remark in found.remarks] == [True]


@pytest.mark.parametrize("runs", [1, 2, 4])
def test_few_seeds_and_blocks_have_no_interval_and_no_verdict(plant: Plant, tmp_path: Path, runs: int) -> None:
    for seed in range(runs):
        plant(seed=seed, epoch=2.0, **accurate(80 + seed))
        plant(seed=seed, epoch=1.0, **OURS, **accurate(80 + seed))  # two seeds that agree to the last digit
    found = compared(tmp_path)
    ours = group_of(found)
    assert ours.verdict == "not enough runs" and ours.difference is not None and ours.speedup is not None
    assert all(math.isnan(x) for x in (ours.difference.low, ours.difference.high))
    assert math.isnan(ours.speedup.low) == (runs < 3)
    assert not ours.best & {"accuracy"} and (runs > 2 or not ours.best)
    assert found.notes[0].startswith(f"sbm/gcn: not enough runs: {runs} seed")


def test_one_configuration_is_the_baseline_of_ratios_and_of_verdicts(plant: Plant, tmp_path: Path) -> None:
    lazy: dict[str, Any] = {"strategy": "lazy", "exactness": ["stale"], "transport": "gloo", "world_size": 2}
    for seed, (two, four) in enumerate([(1.0, 1.5), (4.0, 3.0), (1.0, 1.5), (1.0, 1.5), (1.0, 1.5)]):
        plant(seed=seed, epoch=two, settings__strategy={"every": 2}, **lazy, **accurate(70))
        plant(seed=seed, epoch=four, settings__strategy={"every": 4}, **lazy, **accurate(60))
        plant(seed=seed, epoch=2.0, **accurate(75))
    found = compared(tmp_path, baseline="lazy")
    two, four, single = found.groups
    assert [group.verdict for group in found.groups] == ["baseline", "inferior", "not inferior"]
    assert single.ratios == {(0, None): 0.5, (1, None): 2.0, (2, None): 0.5, (3, None): 0.5, (4, None): 0.5}
    assert set(two.ratios.values()) == {1.0} and four.ratios[1, None] == pytest.approx(4 / 3)
    assert single.difference is not None and single.difference.value == pytest.approx(5)


def test_what_was_timed_in_another_session_is_listed_with_its_command(plant: Plant, tmp_path: Path) -> None:
    for name, session, changes in (("0", "a", {}), ("1", "b", OURS), ("2", "a", OURS | {"model": "gat"})):
        plant(name, session=session, **changes)
    plant("3", session="a", model="gat")
    assert "gnnpar train -m strategy=" in compared(tmp_path).commands[0]  # no job.json in them
    for i in range(4):
        Job(tmp_path, str(i), str(i), ()).save()
    (line,) = compared(tmp_path).commands
    assert line.startswith("to time them side by side: remove ")
    assert line.endswith("/1 " + os.path.relpath(tmp_path / "0") + ", and give the command of that sweep again")


def test_strategies_that_are_unfair_alike_share_a_line(plant: Plant, tmp_path: Path) -> None:
    for model in ("gcn", "gat"):
        plant(model=model)
    for strategy, model in (("sar", "gcn"), ("sar", "gat"), ("adaqp", "gcn"), ("adaqp", "gat"), ("tag", "gcn")):
        plant(strategy=strategy, model=model, provenance="emulated")
    (warning,) = compared(tmp_path).warnings
    assert warning.startswith("sar, adaqp with gcn, gat; tag with gcn (5 runs): no run of single with equal provenance")


def test_among_baselines_that_of_the_same_session_counts(plant: Plant, tmp_path: Path) -> None:
    plant(session="a", epoch=2.0)
    plant(session="b", epoch=1.0)
    plant(session="a", epoch=0.5, **OURS)
    found = compared(tmp_path)
    assert [row["ratio"] for row in found.rows] == [1.0, 1.0, 4.0]
    assert found.warnings == []


def test_rows_are_named_by_the_settings_that_differ(plant: Plant, tmp_path: Path) -> None:
    for lr in (0.1, 0.01):
        for hidden in (8, 16):
            plant(settings__optim__lr=lr, settings__model__hidden=hidden)
    found = compared(tmp_path)
    names = [f"model.hidden={hidden} optim.lr={lr}" for lr in (0.1, 0.01) for hidden in (8, 16)]
    assert [row["settings"] for row in found.rows] == names
    assert [group.title for group in found.groups] == [f"single {name}" for name in names]
    assert [row_name(row) for row in found.rows] == [f"single {name}" for name in names]


def test_models_of_pyg_are_named_by_their_classes_and_data_by_its_name(plant: Plant, tmp_path: Path) -> None:
    for target, name in (("mynet.Net", "web"), ("mynet.Other", "web"), ("mynet.Net", "wiki")):
        own = {"settings__model__target": target, "settings__dataset__name": name, "settings__dataset__path": "a.pt"}
        plant(model="pyg", dataset="pt", **own)
    found = compared(tmp_path)
    tasks = ["web / pyg Net", "web / pyg Other", "wiki / pyg Net"]
    assert [f"{row['dataset']} / {row['model']}" for row in found.rows] == tasks
    assert sorted(curves.tasks(found.groups).values()) == tasks


def test_a_key_that_a_strategy_does_not_read_makes_no_second_row(plant: Plant, tmp_path: Path) -> None:
    for codec in ("Identity", "Drop"):
        target = {"_target_": f"gnnpar.codecs.codec.{codec}"}
        plant(settings__codec=target, settings__world_size=2 if codec == "Drop" else 1)
        plant(settings__codec=target, settings__strategy={"codec": target}, **OURS)
    found = compared(tmp_path)
    assert [(group.title, len(group.rows)) for group in found.groups] == [
        ("single", 2),
        ("graph_parallel codec=identity", 1),
        ("graph_parallel codec=drop", 1),
    ]


def test_bars_are_as_long_as_the_epoch_of_the_table(plant: Plant, tmp_path: Path) -> None:
    for seed, seconds in enumerate((0.01, 0.1, 1.0)):
        plant(seed=seed, epoch=seconds)
    (group,) = compared(tmp_path).groups
    parts = curves.breakdown_of(group)
    assert group.epoch_seconds is not None and parts is not None
    assert group.epoch_seconds.value == pytest.approx(0.09)
    assert sum(parts.values()) == pytest.approx(0.09)


def test_an_error_is_better_where_it_is_lower(plant: Plant, tmp_path: Path) -> None:
    for seed in range(6):
        base = {"metric__name": "mae", "metric__best_val": 0.5, "metric__test_at_best_val": 0.5}
        plant(seed=seed, curve=[0.9, 0.5], **base)
        plant(seed=seed, curve=[0.4, 0.3], **OURS, **base | {"metric__test_at_best_val": 0.4 + 0.001 * seed})
        plant(seed=seed, curve=[0.9, 0.8], **OURS, **DROP, **base | {"metric__test_at_best_val": 0.6 + 0.001 * seed})
    found = compared(tmp_path)
    ours, control = group_of(found), group_of(found, control=True)
    assert (ours.verdict, control.verdict) == ("not inferior", "inferior")
    assert ours.best == {"accuracy"} and ours.seconds_to_target == Median(1.0, 1.0)
    assert control.seconds_to_target is not None and math.isinf(control.seconds_to_target.high)


@pytest.mark.parametrize(("what", "key"), [("graph", "graph_seed"), ("split", "split_seed"), ("split", "split_index")])
def test_configuration_on_two_graphs_or_splits_is_named(template: dict[str, Any], what: str, key: str) -> None:
    other = {**template, "seed": 9, "hashes": {**template["hashes"], what: "0" * 64}}
    assert exchanged([template, template]) == []
    assert f"are of several {what}s; the data has changed" in exchanged([template, other])[0]
    dataset = {**template["settings"]["dataset"], key: None}
    drawn = [{**each, "settings": {**each["settings"], "dataset": dataset}} for each in (template, other)]
    assert exchanged(drawn) == [], "drawn by the seed of the run"


def test_folder_named_like_a_pattern_is_that_folder(plant: Plant, tmp_path: Path) -> None:
    plant("[1]", seed=5)
    plant("1", seed=6)
    assert list(gnnpar.compare([tmp_path / "[1]"]).frame["seed"]) == [5]
    assert sorted(gnnpar.compare([tmp_path]).frame["seed"]) == [5, 6]


def test_runs_with_other_early_stopping_or_captured_epochs_differ(template: dict[str, Any]) -> None:
    changes = {"early_stopping": {"patience": 1, "min_delta": 0.0}, "launch": {"cuda_graph": True}}
    for name, changed in zip(("early stopping", "cuda_graph"), changes.items(), strict=True):
        assert name in differences(template, {**template, "settings": {**template["settings"], **dict([changed])}})


@pytest.mark.parametrize(
    ("n", "deviation", "half"), [(5, 0.3, 0.29), (10, 0.3, 0.17), (10, 0.5, 0.29), (20, 0.5, 0.19)]
)
def test_one_sided_half_widths_of_the_protocol(n: int, deviation: float, half: float) -> None:
    x = np.linspace(-1, 1, n)
    x *= deviation / x.std(ddof=1)
    assert non_inferiority(x, half + 0.006) == "not inferior"
    assert non_inferiority(x, half - 0.006) == "inconclusive"
    assert non_inferiority(x - 1, 1 - half - 0.006) == "inferior"


def test_mean_with_students_interval() -> None:
    found = mean([1.0, 2.0, 3.0], fewest=3)
    assert found.n == 3
    assert (found.value, found.high) == (2.0, pytest.approx(2 + 4.302653 / math.sqrt(3)))
    assert math.isnan(mean([1.0, 2.0, 3.0]).low)


@pytest.mark.parametrize("n", [FEWEST_BLOCKS, 5, 10])
def test_intervals_of_ratios_cover_what_they_say(n: int) -> None:
    """Of 1,000 studies of n blocks each, 95 % hold the truth: at 3 blocks, too."""
    logs = 0.3 + 0.1 * np.random.default_rng(n).standard_normal((1000, n))
    found = [geometric_mean(np.exp(each).tolist()) for each in logs]
    covered = sum(each.low <= math.exp(0.3) <= each.high for each in found)
    assert 930 <= covered <= 970  # three deviations of a count of 950 are 21
    assert found[0].value == pytest.approx(math.exp(logs[0].mean()))


@pytest.mark.parametrize("n", [FEWEST_SEEDS, 10])
def test_intervals_of_means_cover_what_they_say(n: int) -> None:
    samples = np.random.default_rng(n).standard_normal((1000, n))
    found = [mean(each.tolist()) for each in samples]
    assert 930 <= sum(each.low <= 0 <= each.high for each in found) <= 970


@pytest.mark.parametrize(("n", "wrong"), [(2, 0), (4, 0), (5, 50), (10, 50)])
def test_false_verdicts_stay_below_their_level(n: int, wrong: int) -> None:
    """A method that is worse by exactly the margin passes in 5 % of studies, and in none below five seeds."""
    samples = -0.3 + 0.3 * np.random.default_rng(n).standard_normal((1000, n))
    verdicts = [non_inferiority(each.tolist(), 0.3) for each in samples]
    assert abs(verdicts.count("not inferior") - wrong) <= (21 if wrong else 0)
    assert abs(verdicts.count("inferior") - wrong) <= (21 if wrong else 0)
    assert wrong or set(verdicts) == {"not enough runs"}


def test_a_family_is_stepped_down_as_holm_says() -> None:
    """Three studies whose one-sided p are 0.01, 0.02 and 0.04: each passes alone and in its turn (0.05 / 3, / 2, / 1);
    with 0.03 in the place of 0.02 the second fails, and the third with it."""

    def study(p: float, n: int = 10) -> list[float]:
        x = np.linspace(-1, 1, n)
        x /= x.std(ddof=1)
        return (x - stdtrit(n - 1, p) / math.sqrt(n) - 1).tolist()

    assert family([study(0.02), study(0.04), study(0.01)], 1) == ["not inferior"] * 3
    assert family([study(0.03), study(0.04), study(0.01)], 1) == ["inconclusive", "inconclusive", "not inferior"]
    assert [non_inferiority(study(p), 1) for p in (0.01, 0.03, 0.04, 0.06)] == ["not inferior"] * 3 + ["inconclusive"]
    assert family([study(0.97), study(0.96), study(0.99)], 1) == ["inconclusive", "inconclusive", "inferior"]
    mixed = family([study(0.03), [5.0] * 3, [5.0] * 5, [-5.0] * 5], 1)
    assert mixed == ["inconclusive", "not enough runs", "not inferior", "inferior"]


def test_false_verdicts_of_a_family_stay_below_its_level() -> None:
    """Ten methods worse by exactly the margin: in 5 % of families one passes, where uncorrected ones pass in 40 %."""
    samples = -0.3 + 0.3 * np.random.default_rng(0).standard_normal((1000, 10, 10))
    wrong = sum("not inferior" in family(each.tolist(), 0.3) for each in samples)
    assert 29 <= wrong <= 71  # three deviations of a count of 50 are 21


def test_no_numbers_is_an_error() -> None:
    for values in ([], [1.0, math.nan]):
        with pytest.raises(ValueError, match="at least one number"):
            mean(values)
    with pytest.raises(ValueError, match="margin is 0"):
        non_inferiority([0.0, 0.1], 0)
