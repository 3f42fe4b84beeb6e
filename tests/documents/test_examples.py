"""Every script in examples/ runs, its loss falls, and its model equals itself as PyG runs it, on one rank and two."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from conftest import ROOT, Run, environment
from gnnpar.models.pyg.model import PyG
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.verify.conformance import check
from outcomes import assert_passed

FOLDER = ROOT / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
NAMES = [script.stem for script in SCRIPTS]


def losses(text: str) -> tuple[int, float, float]:
    """(ranks, first loss, last loss) of what a script printed."""
    found = re.search(r"(\d+) ranks, loss (\S+) -> (\S+), test", text)
    assert found, text
    return int(found[1]), float(found[2]), float(found[3])


@pytest.mark.parametrize("name", NAMES)
def test_a_script_runs_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    ranks, first, last = losses(capsys.readouterr().out)
    assert ranks == 1
    assert last < first


def test_a_script_runs_on_two_ranks(run_python: Run) -> None:
    done = run_python("-m", "torch.distributed.run", "--nproc-per-node", "2", str(FOLDER / "transformer.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    ranks, first, last = losses(done.stdout)
    assert ranks == 2
    assert last < first


def test_the_notebook_trains_under_four_strategies_and_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    book = nbformat.read(FOLDER / "compare.ipynb", as_version=4)
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output.get("data", {}) for cell in book.cells for output in cell.get("outputs", [])]
    (table,) = [data["text/html"] for data in shown if "text/html" in data]
    for strategy in ("single", "graph_parallel", "sar", "adaqp"):
        assert f"<td>{strategy}</td>" in table
    assert sum("image/png" in data for data in shown) == 1
    assert any("torch.Size([647, 4])" in data.get("text/plain", "") for data in shown)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_equals_itself_as_pyg_runs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module(name)
    cases = check(GraphParallel(), {name: PyG(target=f"{name}.Net")}, worlds=(2,))
    assert [case.reference for case in cases] == ["PyG", "single device"]
    assert_passed(cases)


def test_the_list_of_examples_is_whole() -> None:
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}.py`" not in listed] == []
