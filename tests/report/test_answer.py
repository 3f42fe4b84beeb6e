"""What stands on top of a report: made from the data, with its evidence and what it does not settle."""

from pathlib import Path
from typing import Any

import pytest

from gnnpar.report import formatting as words
from gnnpar.report.comparison import compare
from gnnpar.report.page import context, render
from gnnpar.report.runs import collect
from gnnpar.training.result.result import epoch_time
from planted_runs import DROP, Plant, accurate

OURS: dict[str, Any] = {"strategy": "graph_parallel", "world_size": 2, "transport": "gloo"}
TAG: dict[str, Any] = OURS | {"strategy": "tag", "settings__strategy": {"quality": ["exact"]}}


def answers(folder: Path, **options: Any) -> list[str]:
    return compare(collect([folder]), **options).answers


def study(plant: Plant, seconds: float, runs: int = 5, loss: float = 0.0, ours: dict[str, Any] = OURS) -> None:
    for seed in range(runs):
        noise = 1 + 0.01 * seed
        plant(seed=seed, epoch=2.0, **accurate(80 + seed))
        plant(seed=seed, epoch=seconds * noise, **ours, **accurate(80 + seed - loss))


def test_what_is_faster_is_used_and_its_evidence_named(plant: Plant, tmp_path: Path) -> None:
    study(plant, 1.0)
    for seed in range(5):
        plant(seed=seed, epoch=1.0, **OURS | DROP, **accurate(40))
    (line,) = answers(tmp_path)
    assert line.startswith("sbm / gcn: use graph_parallel") and "on 2 ranks (1.96 [1.92, 2.00] x single over 5" in line
    assert "accuracy not inferior). The comparison with single is settled. Other machines and links: gnnpar" in line
    page = render(compare(collect([tmp_path])))
    assert page.index('id="answer"') < page.index('id="pictures"') < page.index('id="groups"')


def test_one_device_holds_the_graph(plant: Plant, tmp_path: Path) -> None:
    """Beside it stands the fastest of several ranks that does not lose accuracy."""
    study(plant, 4.0)
    for seed in range(5):
        plant(seed=seed, epoch=3.0, **OURS | {"strategy": "pipegcn"}, **accurate(70 + seed))
    (line,) = answers(tmp_path)
    assert "one device holds this graph: use single. The fastest of several ranks, graph_parallel" in line
    assert "has 0.49 times its speed" in line
    assert line.endswith("The comparison with single is settled. Other machines and links: gnnpar plan topology=NAME")


@pytest.mark.parametrize(("runs", "open_"), [(1, "speed (1 block of 3: block=0,1,2) and accuracy (1 seed of 5: ")])
def test_few_runs_settle_nothing(plant: Plant, tmp_path: Path, runs: int, open_: str) -> None:
    study(plant, 1.0, runs)
    (line,) = answers(tmp_path)
    assert f"Not settled: {open_}" in line


def test_runs_of_a_busy_machine_settle_no_speed(plant: Plant, tmp_path: Path) -> None:
    for seed in range(5):
        plant(seed=seed, epoch=2.0, cores=2, **accurate(80 + seed))
        load = {"before": 3.5 if seed else 2.5, "after": 9.0}
        plant(seed=seed, epoch=1.0, cores=2, load=load, **OURS, **accurate(80 + seed))
    (line,) = answers(tmp_path)
    assert "Not settled: speed (the machine was busy when 4 of 10 runs began) and accuracy (no verdict" in line


def test_one_block_of_a_busy_machine_recommends_nothing(plant: Plant, tmp_path: Path) -> None:
    for strategy, seconds in ((None, 37.8), ("digest", 1.0)):
        ours = {} if strategy is None else OURS | {"strategy": strategy}
        plant(epoch=seconds, cores=2, load={"before": 9.0, "after": 9.0}, **ours, **accurate(80))
    (line,) = answers(tmp_path)
    assert "not settled, as the machine was busy when 2 of 2 runs began: train again on a quiet machine. " in line
    assert "use" not in line.split() and "digest" in line  # it sends least


def test_what_loses_accuracy_is_not_recommended(plant: Plant, tmp_path: Path) -> None:
    study(plant, 1.0, loss=5.0)
    (line,) = answers(tmp_path)
    assert "use graph_parallel" not in line and "use single" in line


def test_no_sentence_on_speed_without_a_fair_ratio(plant: Plant, tmp_path: Path) -> None:
    plant(session="a", epoch=2.0)
    plant(session="b", epoch=1.0, **OURS)
    (line,) = answers(tmp_path)
    assert "not settled, as no ratio is fair: single was timed in another session" in line
    (line,) = answers(tmp_path, allow_unfair=True)
    assert "no ratio is fair" in line


def test_threads_are_no_statement_on_speed(plant: Plant, tmp_path: Path) -> None:
    plant(provenance="emulated", transport="threads", world_size=2)
    plant(provenance="emulated", transport="threads", world_size=2, strategy="sar")
    (line,) = answers(tmp_path)
    assert "no strategy is faster or slower by these runs" in line


@pytest.mark.parametrize(
    ("error", "exactness", "why"),
    [
        (0.5, ["exact"], "it expected 1.00 s an epoch and was off by +50%"),
        (0.01, ["exact"], "it expected 1.00 s an epoch of its choice, and more of the others"),
        (0.01, ["quantized"], "it was not allowed what is quantized (strategy.quality)"),
    ],
)
def test_tags_choice_is_explained_where_another_is_faster(
    plant: Plant, tmp_path: Path, error: float, exactness: list[str], why: str
) -> None:
    study(plant, 1.0, ours=OURS | {"exactness": exactness})
    predicted = {"label": "gnnpipe 2 stages", "epoch_seconds": 1.0, "epoch_error": error}
    predicted |= {"peak_bytes": 1, "peak_error": None, "replanned": None}
    for seed in range(5):
        plant(seed=seed, epoch=1.5, predicted=predicted, **TAG, **accurate(80 + seed))
    line = answers(tmp_path)[1]
    assert "tag chose gnnpipe 2 stages, and graph_parallel" in line and "1.47 times as fast: " in line
    assert why in line


def test_one_configuration_has_nothing_to_be_compared_with(plant: Plant, tmp_path: Path) -> None:
    plant()
    assert answers(tmp_path) == []


BUSY = {"before": 0.1, "after": 9.0, "others": "other programs keep 1.6 of 2 cores busy"}


def test_a_disturbed_run_is_left_out_of_the_answer_where_others_are_not(plant: Plant, tmp_path: Path) -> None:
    for seed in range(4):
        disturbed = {"load": BUSY, "epoch_seconds__mean": 0.196} if seed == 0 else {}
        plant(seed=seed, epoch=0.02, **disturbed, **accurate(80 + seed))
        plant(seed=seed, epoch=0.5 if seed == 0 else 0.08, **OURS, **accurate(80 + seed))
    found = compare(collect([tmp_path]))
    assert "has 0.25 times its speed (0.25 [0.25, 0.25] x single over 3 blocks" in found.answers[0]
    assert "the machine was busy when 1 of 8 runs began" in found.answers[0]
    assert [row["ratio_busy"] for row in found.rows] == [True, True] + 6 * [False]
    assert [row["busy"] for row in found.rows] == [True] + 7 * [False]
    assert not any(group.time_busy or group.ratio_busy for group in found.groups)


def test_a_number_of_disturbed_runs_alone_is_marked_wherever_it_stands(plant: Plant, tmp_path: Path) -> None:
    for seed in range(3):
        plant(seed=seed, epoch=2.0, load=BUSY, **accurate(80 + seed))
        plant(seed=seed, epoch=4.0, **OURS, **accurate(80 + seed))
    found = compare(collect([tmp_path]))
    single, ours = found.groups
    assert (single.time_busy, single.ratio_busy, ours.time_busy, ours.ratio_busy) == (True, True, False, True)
    assert "has 0.50 times its speed (0.50 [0.50, 0.50] busy x single" in found.answers[0]
    table = [words.group_cells(group) for group in found.groups]
    assert [line["epoch"].endswith(" busy") for line in table] == [True, False]
    assert all(line["speed-up"].endswith("] busy") for line in table)
    assert {words.run_text(row, "ratio") for row in found.rows} == {"1.00 busy", "0.50 busy"}
    drawn = {name: figures[0].pictures for name, figures in context(found)["sections"].items()}
    for picture, marks in ((drawn["speed-up"]["single"], [True, True]), (drawn["time"][""], [True, False])):
        assert [row.text.endswith(" busy") for row in picture.rows] == marks
    assert [row.text.endswith(" busy") for row in drawn["breakdown"][""].rows] == [True, False]
    assert not any("speedup" in group.best for group in found.groups)


def test_the_fastest_that_reaches_the_target_last_is_said_to(plant: Plant, tmp_path: Path) -> None:
    for seed in range(3):
        plant(seed=seed, epoch=1.0, curve=[0.1, 0.2, 0.75], metric__best_val=0.75)
        plant(seed=seed, epoch=2.0, curve=[0.75], **OURS, metric__best_val=0.75)
    found = compare(collect([tmp_path]))
    said = "2 of 2 to target, 3.00 s; graph_parallel 1.00 s"
    assert "use single. " in found.answers[0] and f"single is {said}" in found.answers[0]


@pytest.mark.parametrize(
    ("changes", "mean"),
    [
        ({}, False),
        ({"settings__strategy": {"codec": {"_target_": "gnnpar.codecs.codec.BFloat16"}}}, False),
        ({"settings__strategy": {"period": 1}}, False),
        ({"settings__strategy": {"period": 2}}, True),
        ({"settings__strategy": {"codec": {"period": 20}}}, True),
        ({"settings__strategy": {"batch_size": 512}}, True),
        ({"bytes_per_epoch__total": 10.5}, True),  # not the same in each epoch
    ],
)
def test_the_median_is_the_time_unless_epochs_differ_by_design(
    plant: Plant, changes: dict[str, Any], mean: bool
) -> None:
    result = plant(epoch=1.0, epoch_seconds__mean=9.0, **changes)
    assert epoch_time(result) == (9.0 if mean else 0.9)
