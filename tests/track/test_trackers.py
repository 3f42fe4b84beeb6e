"""metrics.jsonl survives a kill, only known names are written, and the terminal output is what it should be."""

import errno
import json
import sys
import threading
from pathlib import Path

import pytest

from gnnpar.track import console, keys
from gnnpar.track.console import Bar, Console, Lines, figure, num_bytes, picture, progress_lines, seconds, stdout
from gnnpar.track.jsonl import Jsonl, missing_epochs, read_rows
from gnnpar.track.tracker import Null, Quiet, Tee

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
