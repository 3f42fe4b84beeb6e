"""Timelines as Chrome traces and pictures: complete, well formed, true to their times."""

import json
import xml.etree.ElementTree as ET

import pytest

from gnnpar.parallel.pipeline.schedule import Action, fill_drain, lower
from gnnpar.parallel.pipeline.simulate import Link, simulate
from gnnpar.track.timelines import ROWS, chrome_trace, schedule_picture
from gnnpar.training.trace import costs_of, plan_of, schedules_of

SVG = "{http://www.w3.org/2000/svg}"


def took(kind: str, stage: int, slot: int) -> float:
    return {"forward": 0.010 + 0.001 * stage, "backward": 0.020}.get(kind, 0.0)


TIMELINE = simulate(fill_drain(2, 4), took, link=Link(latency_seconds=0.001)).rows()


def test_a_trace_has_every_span_at_its_time():
    data = json.loads(json.dumps(chrome_trace(TIMELINE, {"epoch": 6})))
    spans = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert sorted((e["pid"], e["name"], round(e["ts"], 3), round(e["ts"] + e["dur"], 3)) for e in spans) == sorted(
        (rank, text, round(start * 1e6, 3), round(end * 1e6, 3)) for rank, text, start, end in TIMELINE
    )
    assert {e["cat"] for e in spans} == {"compute", "send", "receive"}
    assert data["otherData"] == {"epoch": 6}


def test_ranks_and_rows_have_names_and_nothing_overlaps_inside_a_row():
    rows = [(0, "compute", 0.0, 3.0), (0, "bubble", 3.0, 4.0), *TIMELINE]
    events = chrome_trace(rows, {})["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    lanes: dict[tuple[int, int], float] = {}
    for e in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        lane = e["pid"], e["tid"]
        assert named[lane].split()[0] == e["cat"] in ROWS
        assert e["ts"] >= lanes.get(lane, 0.0) - 1e-6
        lanes[lane] = e["ts"] + e["dur"]


def name(bar: ET.Element) -> str:
    return (bar[0].text or "").split()[0]


def bars(picture: str) -> list[ET.Element]:
    return [e for e in ET.fromstring(picture).iter(f"{SVG}rect") if e.find(f"{SVG}title") is not None]


def test_a_picture_draws_every_action_in_proportion():
    picture = schedule_picture({"planned": TIMELINE, "measured <1>": TIMELINE})
    texts = [e.text for e in ET.fromstring(picture).iter(f"{SVG}text")]
    assert texts.count("rank 0") == texts.count("rank 1") == 2
    assert {"planned", "measured <1>", "ms", "forward"} <= set(texts)
    drawn = bars(picture)
    computes = sum(text[0] in "FB" for _, text, _, _ in TIMELINE)
    sends = sum(text[0] == "S" for _, text, _, _ in TIMELINE)
    assert len(drawn) == 2 * (computes + sends)
    width = {name(e): float(e.get("width", "0")) for e in drawn}
    assert width["B0@1"] / width["F0@0"] == pytest.approx(2.0, rel=0.01)


def test_waiting_is_drawn_and_a_picture_of_nothing_is_refused():
    rows = [(0, "F0@0", 0.0, 2.0), (0, "exposed", 0.0, 1.0), (0, "compute", 1.0, 2.0)]
    assert [name(e) for e in bars(schedule_picture({"measured": rows}))] == ["F0@0", "exposed"]
    with pytest.raises(ValueError, match="no actions"):
        schedule_picture({"planned": []})


def test_costs_are_what_is_left_of_an_action_when_waiting_is_taken_out():
    rows = [(0, "F0@0", 0.0, 2.0), (0, "exposed", 0.25, 0.75), (0, "bubble", 1.5, 3.0), (1, "bubble", 0.0, 9.0)]
    assert costs_of(rows) == {(0, Action("forward", 0, 0)): pytest.approx(1.0)}


def test_the_plan_of_a_measured_pipeline_is_its_simulation():
    """Planned from what was measured with free links: the same timeline, message times aside, for each part."""
    free = simulate(fill_drain(2, 4), took).rows()
    done = [(2 * rank, text, a, b) for rank, text, a, b in free]
    schedules = schedules_of(in_order(done), ((0,), (2,)))
    assert schedules == {(0, 2): lower(fill_drain(2, 4))}
    planned = plan_of(done, schedules)
    assert [row for row in planned if row[1][0] in "FB"] == [
        (2 * rank, text, pytest.approx(a), pytest.approx(b)) for rank, text, a, b in free if text[0] in "FB"
    ]
    assert schedules_of([(0, "compute", 0.0, 1.0)], ((0, 1),)) == {}


def in_order(rows):
    """As ranks do them: a simulated send is on the wire at the time at which the next action starts."""
    order = {(2 * r, str(a)): i for r, mine in enumerate(lower(fill_drain(2, 4)).actions) for i, a in enumerate(mine)}
    return sorted(rows, key=lambda row: order[row[0], row[1]])
