"""A go of bench_peers measures: it reads no committed line, continues where it was stopped, and begins anew."""

import importlib
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conftest import ROOT

FOLDER = ROOT / "experiments" / "bench_peers"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    monkeypatch.setenv("GNNPAR_DATA", "data")  # which is not there
    before = set(sys.modules)
    yield importlib.import_module("bench_peers.run")
    for name in (set(sys.modules) - before) & {"bench_peers.run", "bench_peers.ours", "epochs", "records"}:
        del sys.modules[name]


def test_a_go_measures_continues_and_begins_anew(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.OUT == ROOT / "outputs" / "bench_peers"
    calls: list[str] = []

    def measure(name: str, *_: object) -> list[dict[str, Any]]:
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return [{"cell": name, "go": len(calls)}]

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "has", lambda *_: True)
    monkeypatch.chdir(tmp_path)  # without data/debian
    cells = ["gcn | 1 thread", "gcn | rmat"]
    monkeypatch.setattr(bench, "OUT", tmp_path / "new")
    out = tmp_path / "new" / "results.jsonl"
    go = partial(bench.run, bench.Files(FOLDER), cells=(*cells, "gat | debian"))
    with pytest.raises(KeyboardInterrupt):
        go()
    go()
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"cell": cells[0], "go": 1},
        {"cell": cells[1], "go": 3},
    ]
    go()
    assert calls == [*cells, cells[1], *cells]
    said = capsys.readouterr().out
    assert f"2 of 2 cells are measured now -> {out}" in said and "1 of 2 cells are measured now" in said
    assert "data/debian/debian.npz is not there: the cells of debian are left out" in said
