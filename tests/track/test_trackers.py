"""metrics.jsonl survives a kill, the terminal shows what it should, timelines are true to their times."""

import errno
import json
import sys
import threading
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from gnnpar.parallel.pipeline.schedule import Action, fill_drain, lower
from gnnpar.parallel.pipeline.simulate import Link, simulate
from gnnpar.track import console, keys
from gnnpar.track.console import Bar, Console, Lines, figure, num_bytes, picture, progress_lines, seconds, stdout
from gnnpar.track.jsonl import Jsonl, missing_epochs, read_rows
from gnnpar.track.timelines import ROWS, chrome_trace, schedule_picture
from gnnpar.track.tracker import Null, Quiet, Tee
from gnnpar.training.trace import costs_of, plan_of, schedules_of

ROW = {"epoch": 0, "loss/train": 1.5, "time/timed": 1, "time/epoch_seconds": 0.25, "time/train_seconds": 0.25}
ROW |= {"comm/total_bytes": 0, "comm/total_bytes_so_far": 0}


def test_rows_come_back_and_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    tracker = Jsonl(tmp_path)
    tracker.start({})
    tracker.log(ROW)
    tracker.log(ROW | {"epoch": 1, "loss/train": float("nan")})
    assert [row["epoch"] for row in read_rows(tmp_path)] == [0, 1]  # before it is closed
    tracker.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "loss')
    assert read_rows(tmp_path) == [ROW, ROW | {"epoch": 1, "loss/train": None}]
    assert read_rows(tmp_path / "nowhere") == []


@pytest.mark.parametrize("lacking", ROW)
@pytest.mark.parametrize("how", ["without", "null"])
def test_a_run_does_not_go_on_from_rows_without_what_every_row_has(tmp_path: Path, lacking: str, how: str) -> None:
    row = {k: v for k, v in ROW.items() if k != lacking} if how == "without" else ROW | {lacking: None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert missing_epochs(tmp_path, 1) == ("" if (lacking, how) == ("loss/train", "null") else "0")


def test_only_names_of_the_table_are_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="loss/tran"):
        Jsonl(tmp_path).log({"epoch": 0, "loss/tran": 1.0})


def test_every_name_has_a_unit_and_a_meaning() -> None:
    for name, key in keys.KEYS.items():
        assert key.meaning, name
        assert not name.endswith("_seconds") or key.unit == "s"
        assert not name.endswith("_bytes") or key.unit == "B"


def test_plain_lines_every_few_epochs_and_the_last(capsys: pytest.CaptureFixture) -> None:
    tracker = Console(every=2).build(Path(), 5, {})
    assert isinstance(tracker, Lines)
    tracker.start({"strategy": "single", "parts": [{"part": 0, "nodes": 1234}]})
    for epoch in range(5):
        tracker.log(ROW | {"epoch": epoch} | ({"metric/val": 0.5} if epoch == 2 else {}))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "single"
    assert lines[2].split() == ["0", "1,234"]
    assert [line.split("  ")[:4] for line in lines[3:]] == [
        ["epoch 2/5", "loss 1.5000", "250.0 ms/epoch", "left 0 s"],
        ["epoch 4/5", "loss 1.5000", "val 0.5000", "250.0 ms/epoch"],
        ["epoch 5/5", "loss 1.5000", "val 0.5000", "250.0 ms/epoch"],
    ]


def test_epochs_that_take_seconds_have_a_line_each(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr("gnnpar.track.console.time.monotonic", lambda: next(clock))
    lines = Lines(20, every=10)
    for epoch in range(3):
        lines.log(ROW | {"epoch": epoch})
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["2/20", "3/20"]


def test_what_takes_long_is_said_until_it_changes(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every look whether anything has happened since the last one; the thread is gone at the end."""
    monkeypatch.setattr("gnnpar.track.console.SILENT_SECONDS", 0.05)
    seen = iter(["reading", "reading", "epoch 1", "epoch 2", "epoch 2", "", ""])
    over = threading.Event()

    def doing() -> str:
        now = next(seen, None)
        if now is None:
            over.set()
        return now or ""

    with progress_lines(doing):
        assert over.wait(20)
    assert [line.split(" ...")[0] for line in capsys.readouterr().out.splitlines()] == ["reading", "epoch 2"]
    assert "progress_lines" not in {thread.name for thread in threading.enumerate()}


def test_the_bar_starts_advances_and_ends(capsys: pytest.CaptureFixture) -> None:
    bar = Bar(3)
    bar.start({"parts": []})
    for epoch in range(3):
        bar.log(ROW | {"epoch": epoch, "metric/val": 0.25})
    bar.close()
    assert bar.progress.tasks[0].completed == 3
    assert "val 0.2500" in bar.progress.tasks[0].fields["figures"]


def test_a_tee_tells_everybody_and_quiet_nobody() -> None:
    told: list[dict] = []

    class Memo(Null):
        def log(self, row) -> None:
            told.append(dict(row))

    Tee(trackers=(Memo(), Memo(), Quiet().build(Path(), 1, {}))).log(ROW)
    assert told == [ROW, ROW]


def test_numbers_for_people() -> None:
    assert (figure(12345), figure(0.123456), figure("x")) == ("12,345", "0.1235", "x")
    assert (seconds(1.5), seconds(0.0123)) == ("1.50 s", "12.3 ms")
    assert (num_bytes(10), num_bytes(2048), num_bytes(3 * 2**30)) == ("10 B", "2.0 KiB", "3.0 GiB")
    stdout().print(picture({"nodes": 3}))


def drawn(facts: dict, capsys: pytest.CaptureFixture) -> list[str]:
    stdout().print(picture(facts))
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_the_picture_of_a_plan(capsys: pytest.CaptureFixture) -> None:
    layer = {"mode": "halo", "how": "bfloat16, overlap edges"}
    facts: dict = {"strategy": "graph_parallel", "model": "gcn", "dataset": "sbm", "nodes": 3000, "edges": 50000}
    facts |= {"ranks": 2, "threads": 1, "transport": "gloo", "cut_share": 0.125, "alpha": 0.85}
    part = {"nodes": 1500, "edges": 25000, "halo_rows": 7, "train_nodes": 900}
    facts |= {"parts": [{"part": i, **part} for i in range(2)], "halo_from": [[0, 1300], [1250, 0]]}
    facts["mesh"] = [{"ranks": [0, 1], "layers": [0, 4]}]
    facts["layers"] = [layer | {"in": 64, "out": 32}] * 3 + [layer | {"in": 32, "out": 8}]
    lines = drawn(facts, capsys)
    assert lines[0] == "graph_parallel gcn sbm  3,000 nodes  50,000 edges  2 ranks x 1 thread over gloo"
    assert lines[1] == "layers: 64 -halo-> 32 (3 layers) -halo-> 8  (bfloat16, overlap edges)"
    assert lines[2].split() == ["part", "nodes", "edges", "train", "halo", "from", "0", "1"]
    first, second = (line.split() for line in lines[3:5])
    assert first == ["0", "1,500", "25,000", "900", ".", "1,300"]
    assert second == ["1", "1,500", "25,000", "900", "1,250", "."]
    assert lines[5:] == ["cut share 0.125  alpha 0.85"]


def test_a_picture_stays_small_and_shows_stages(capsys: pytest.CaptureFixture) -> None:
    many = 64
    facts = {
        "strategy": "hybrid",
        "ranks": many,
        "parts": [{"part": i, "nodes": 10} for i in range(many)],
        "halo_from": [[int(i != j) for j in range(many)] for i in range(many)],
        "mesh": [{"ranks": [0, 1], "layers": [0, 2]}, {"ranks": [2, 3], "layers": [2, 3]}],
    }
    lines = drawn(facts, capsys)
    assert len(lines) <= 15
    assert lines[1] == "stage 0: ranks 0 1, layers 0 to 1; stage 1: ranks 2 3, layers 2 to 2"
    assert lines[-1].split() == ["...", "64", "parts"]


def test_a_warning_on_a_full_disk_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:

    def full(text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys.stderr, "write", full)
    console.complain("wandb stopped")


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
