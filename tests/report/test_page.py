"""report.html as text: its answer with the evidence, what it leaves blank, its colours. test_browser.py opens it."""

import re
from pathlib import Path
from typing import Any

import pytest

from gnnpar.report import colours, plots
from gnnpar.report import formatting as words
from gnnpar.report.colours import groups_in_colour, six_parts, strategies_in_colour
from gnnpar.report.comparison import compare
from gnnpar.report.page import context, render, write_page
from gnnpar.report.plots import log_axis
from gnnpar.report.runs import collect
from gnnpar.settings import ConfigError
from gnnpar.track.keys import BYTE_PHASES, PHASES
from gnnpar.training.result.result import LIVE, epoch_time
from planted_runs import DROP, OURS, Plant, accurate

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


def test_few_runs_settle_nothing(plant: Plant, tmp_path: Path) -> None:
    study(plant, 1.0, runs=1)
    (line,) = answers(tmp_path)
    assert "Not settled: speed (1 block of 3: block=0,1,2) and accuracy (1 seed of 5: " in line


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


def test_pictures_of_schedules_are_shown_where_runs_left_them(plant: Plant, tmp_path: Path) -> None:
    plant("0")
    assert "Schedules" not in render(compare(collect([tmp_path])))
    (tmp_path / "0" / "schedule.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    assert "data:image/svg+xml;base64,PHN2Zy" in render(compare(collect([tmp_path])))


def test_page_of_a_run_is_small_and_loads_nothing(plant: Plant, tmp_path: Path) -> None:
    plant("0")
    page = render(compare(collect([tmp_path])))
    assert len(page.encode()) < 1e5
    assert not re.search(r"(src|href)=.(?!data:|#)|url\(|@import|<link(?! rel=.icon)", page)


def test_answer_is_a_headline_with_its_evidence_below(plant: Plant, tmp_path: Path) -> None:
    for seed in range(3):
        plant(seed=seed, epoch=2.0)
        plant(seed=seed, epoch=1.0, **OURS)
    found = compare(collect([tmp_path]))
    assert "<h1>sbm / gcn: use graph_parallel on 2 ranks</h1>" in render(found)
    assert "<p>(2.00 [2.00, 2.00] x single over 3 blocks" in render(found)
    page = render(found, "It is twice as fast. On two ranks.")
    assert "<h1>It is twice as fast.</h1>" in page and "<p>On two ranks.</p>" in page
    assert '<p class="headline">sbm / gcn: use graph_parallel on 2 ranks</p>' in page


def test_every_part_of_time_bytes_and_memory_has_a_colour() -> None:
    assert set(colours.TIME) == set(PHASES)
    assert set(colours.BYTES) == set(BYTE_PHASES)
    assert set(colours.MEMORY) == set(LIVE)  # a category without one would be missing from the bars


def test_what_is_unfair_is_blank_and_never_the_fastest(plant: Plant, tmp_path: Path) -> None:
    plant(epoch=2.0, session="a")
    plant(epoch=0.5, session="b", **OURS)  # resumed on another day
    found = context(compare(collect([tmp_path])))
    (speedups,) = found["sections"]["speed-up"]
    assert [row.name for row in speedups.pictures["single"].rows] == ["single"]
    ours = next(row for _, rows in found["group_rows"] for row in rows if row.group.first["strategy"] != "single")
    assert (ours.cells["x single"].text, ours.cells["x single"].why) == ("-", "single was timed in another session")
    assert 'data-why="single was timed in another session"' in render(compare(collect([tmp_path])))


def test_a_folder_is_no_file(plant: Plant, tmp_path: Path) -> None:
    plant("0")
    with pytest.raises(ConfigError, match="is a folder; name a file"):
        write_page(compare(collect([tmp_path])), tmp_path)


def test_at_most_six_strategies_have_a_colour_and_the_rest_is_grey(plant: Plant, tmp_path: Path) -> None:
    names = ["sar", "adaqp", "bns", "cofree", "digest", "feature", "pipegcn", "tag", "single", "graph_parallel"]
    for i, name in enumerate(names):
        ranks = 1 if name == "single" else 2
        plant(epoch=2.0 - i / 10, curve=[0.1, 0.5], strategy=name, world_size=ranks, **accurate(70 + i))
    plant(epoch=1.0, curve=[0.1, 0.3], **OURS | DROP, **accurate(30))
    groups = compare(collect([tmp_path])).groups
    chosen = strategies_in_colour(groups, "single")
    assert chosen[:2] == ["single", "graph_parallel"] and len(chosen) == 6  # the baseline; then who is ahead
    tint = colours.of_strategies(chosen, names)
    assert len({tint[name] for name in chosen}) == 6 and {tint[n] for n in names if n not in chosen} == {colours.GREY}
    in_colour = groups_in_colour(groups, chosen)
    assert len(in_colour) == 6 and sum(group.control for group in in_colour) == 1  # the control is always seen
    drawn = plots.accuracy(groups, tint, "bytes")
    assert drawn is not None and drawn.x_ticks[-1] == (pytest.approx(100 / 1.04, abs=0.01), "200")
    thick = {(stroke.strategy, stroke.colour, stroke.dash) for stroke in drawn.strokes if stroke.opacity == 1}
    assert len({tint for _, tint, _ in thick} - {colours.GREY}) == 5 and len(thick) == 11  # two share one, one dashed
    assert sum(label.shown for label in drawn.labels) == 6 and len(drawn.labels) == 11


def test_bars_have_at_most_six_parts_and_keep_their_totals() -> None:
    bars = [{name: float(i + k) for i, name in enumerate("abcdefgh")} for k in (0, 3)]
    few = six_parts(bars)
    assert [list(bar) for bar in few] == [["d", "e", "f", "g", "h", "other"]] * 2
    assert [sum(bar.values()) for bar in few] == [sum(bar.values()) for bar in bars]
    assert six_parts([{"a": 1.0, "b": 0.0}]) == [{"a": 1.0}]


@pytest.mark.parametrize("values", [[8.5], [8.4, 8.6], [5.9], [1.35], [1.0], [3e-9, 3.1e-9], [1.0, 1e6]])
def test_logarithmic_axis_has_two_ticks_or_more(values: list[float]) -> None:
    axis = log_axis(values)
    assert len(axis.ticks) >= 2
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)


def test_the_axis_of_ratios_is_logarithmic_and_holds_all_intervals(plant: Plant, tmp_path: Path) -> None:
    for seed, seconds in enumerate((0.1, 2.0, 9.0)):  # an interval over three decades
        plant(seed=seed, epoch=2.0)
        plant(seed=seed, epoch=seconds, **OURS)
    found = compare(collect([tmp_path]))
    speedup = next(g.speedup for g in found.groups if g.first["strategy"] == "graph_parallel")
    (figure,) = context(found)["sections"]["speed-up"]
    picture = figure.pictures["single"]
    (span,) = [mark for mark in picture.rows[1].marks if mark.kind == "span"]
    assert speedup is not None and f"[{speedup.low:.3f}, {speedup.high:.3f}]" in span.hover
    assert span.left > 0 and span.left + span.width < 100
    places = {text: place for place, text in picture.ticks}
    assert places["1"] == picture.lines[0] and all(0 <= place <= 100 for place in places.values())
    assert places["10"] - places["1"] == pytest.approx(places["1"] - places["0.1"], abs=0.02)
