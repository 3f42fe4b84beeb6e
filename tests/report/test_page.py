"""report.html as text: what it says, what it leaves blank, and how few colours it needs. test_browser.py opens it."""

import re
from pathlib import Path
from typing import Any

import pytest

from gnnpar.report import colours, plots
from gnnpar.report.colours import groups_in_colour, six_parts, strategies_in_colour
from gnnpar.report.comparison import compare
from gnnpar.report.page import context, render, write_page
from gnnpar.report.plots import log_axis
from gnnpar.report.runs import collect
from gnnpar.settings import ConfigError
from gnnpar.track.keys import BYTE_PHASES, PHASES
from gnnpar.training.result.result import LIVE
from planted_runs import DROP, Plant, accurate

OURS: dict[str, Any] = {"strategy": "graph_parallel", "world_size": 2, "transport": "gloo"}


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
