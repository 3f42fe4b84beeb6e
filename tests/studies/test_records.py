"""Raw lines of studies come back byte for byte, whatever ends a study or its packing; the repository stays light."""

import lzma
import random
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT


@pytest.fixture
def records(module: Callable[..., Any]) -> Any:
    return module("records")


def rows(first: int, last: int) -> list[dict[str, Any]]:
    more = {"none": None, "unit": "\u00b5s"}
    return [{"block": i, "loss": random.Random(i).random(), "more": more} for i in range(first, last)]


@pytest.fixture
def file(records: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a study whose parts hold few lines."""
    monkeypatch.setattr(records, "PART_BYTES", 1000)
    return tmp_path / "results.jsonl"


def test_packed_lines_are_the_lines_and_appending_goes_on(records: Any, file: Path) -> None:
    assert records.read(file) == []
    records.append(file, rows(0, 40))
    text = file.read_bytes()
    records.pack(file)
    assert not file.exists()
    assert len(records.parts(file)) > 2
    assert records.read(file) == rows(0, 40)
    before = [part.read_bytes() for part in records.parts(file)]
    records.append(file, rows(40, 60))
    assert file.read_bytes().startswith(text)
    assert records.read(file) == rows(0, 60)
    records.pack(file)
    assert records.read(file) == rows(0, 60)
    assert [part.read_bytes() for part in records.parts(file)][: len(before) - 1] == before[:-1]
    assert {each.suffix for each in file.parent.iterdir()} == {".xz"}


def test_fewer_lines_leave_no_part_of_the_former(records: Any, file: Path) -> None:
    records.append(file, rows(0, 40))
    records.pack(file)
    records.replace(file, rows(50, 53))
    assert records.read(file) == rows(50, 53)
    records.pack(file)
    assert records.read(file) == rows(50, 53)
    assert len(list(file.parent.iterdir())) == 1


def test_new_lines_of_a_changed_checkout_are_not_packed(records: Any, file: Path) -> None:
    records.append(file, [{"block": 0, "result": {"commit": "0123abc+"}}])
    with pytest.raises(SystemExit, match="1 new lines are of a checkout with changes; commit them and measure again"):
        records.pack(file)
    (file.parent / f"{file.name}.1.xz").write_bytes(lzma.compress(file.read_bytes()))
    records.append(file, [{"block": 1, "result": {"commit": "0123abc"}}])
    records.pack(file)
    assert len(records.read(file)) == 2


def test_lines_of_changed_checkouts_become_no_more(records: Any) -> None:
    found = Counter(
        part.parent.name
        for part in (ROOT / "experiments").glob("*/*.jsonl.*.xz")
        for line in lzma.decompress(part.read_bytes()).splitlines()
        if records.CHANGED.search(line)
    )
    assert found == {
        "adaqp_accuracy": 150,
        "adaqp_throughput": 576,
        "gnnpipe_convergence": 576,
        "sar_out_of_core": 3,
        "sar_speed": 32,
        "strong_scaling": 33,
    }


@pytest.mark.parametrize("after", range(4))
def test_packing_that_is_stopped_can_be_repeated(
    records: Any, file: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Stopped after so many changes of the folder, old parts beside new ones: the plain file still counts."""
    records.append(file, rows(0, 40))
    records.pack(file)
    records.replace(file, rows(7, 40))
    left = [after]

    def until_stopped(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return change(*arguments)

        return changed

    with monkeypatch.context() as stopped:
        stopped.setattr(Path, "replace", until_stopped(Path.replace))
        stopped.setattr(Path, "unlink", until_stopped(Path.unlink))
        with pytest.raises(KeyboardInterrupt):
            records.pack(file)
    assert records.read(file) == rows(7, 40)
    records.pack(file)
    assert records.read(file) == rows(7, 40)


def test_two_studies_that_unpack_at_once_lose_nothing(
    records: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one unpacks and appends while this one unpacks."""
    records.append(file, rows(0, 5))
    records.pack(file)
    link = records.os.link

    def later(source: Path, target: Path) -> None:
        monkeypatch.setattr(records.os, "link", link)
        with monkeypatch.context() as other:
            other.setattr(records.os, "getpid", lambda: 1)
            records.append(file, rows(5, 6))
        link(source, target)

    monkeypatch.setattr(records.os, "link", later)
    records.append(file, rows(6, 7))
    assert records.read(file) == rows(0, 7)


def test_a_study_that_runs_is_not_packed_away(records: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records.append(file, rows(0, 3))
    compress = records.lzma.compress

    def slow(data: bytes, **options: Any) -> bytes:
        records.append(file, rows(3, 4))
        return compress(data, **options)

    monkeypatch.setattr(records.lzma, "compress", slow)
    with pytest.raises(SystemExit, match="appended while it was packed"):
        records.pack(file)
    assert records.read(file) == rows(0, 4)


def test_a_part_above_the_limit_is_refused(records: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LIMIT_BYTES", 100)
    records.append(file, rows(0, 9))
    with pytest.raises(SystemExit, match="the limit is 100"):
        records.pack(file)
    assert records.read(file) == rows(0, 9)


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing says which files are tracked")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_tracked_file_is_above_the_limit_and_lines_are_packed(records: Any) -> None:
    sizes = {file.relative_to(ROOT): file.stat().st_size for file in tracked()}
    assert {file: size for file, size in sizes.items() if size > records.LIMIT_BYTES} == {}
    studies = {file: size for file, size in sizes.items() if file.parts[0] == "experiments"}
    assert [file for file in studies if file.suffix == ".jsonl"] == []
    assert sum(studies.values()) < 8_000_000


def test_committed_parts_are_whole(records: Any) -> None:
    """Every part belongs to lines that can be read, and no number is missing."""
    found = sorted((ROOT / "experiments").glob("*/*.xz"))
    names = {file.with_name(file.name.rsplit(".", 2)[0]) for file in found}
    assert sorted(part for name in names for part in records.parts(name)) == found
    assert all(records.read(name) for name in names)
