"""Examples, tutorials and the quickstart run; examples equal themselves as PyG runs them."""

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
from gnnpar.paths import GROUP
from gnnpar.verify.conformance import check
from outcomes import assert_passed
from tutorial_steps import Command, blocks, commands, missing

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


TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = sorted(page for page in TUTORIALS.glob("*.md") if page.name != "README.md")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs" / "quickstart.md"], ids=lambda page: page.stem)
def test_every_block_runs(run_python: Run, page: Path) -> None:
    assert len(blocks(page)) >= 2
    done = run_python(str(ROOT / "tests" / "tutorial_steps.py"), str(page), timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_strategy_of_ones_own_takes_less_than_190_lines() -> None:
    files = [block for block in blocks(TUTORIALS / "own_strategy.md") if block.title]
    ours = ["lazy.py", "strategy/lazy.yaml", "few.py", "strategy/few.yaml", "pyproject.toml"]
    assert [block.title for block in files] == ours
    assert f'[project.entry-points."{GROUP}"]' in files[-1].text
    assert sum(block.text.count("\n") for block in files) < 190


def test_the_list_of_tutorials_is_whole() -> None:
    listed = (TUTORIALS / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"({page.name})" not in listed] == []


def test_a_promise_that_is_not_kept_is_noticed() -> None:
    first, second = commands("$ gnnpar a\n2 of 2 cases pass\n$ gnnpar b\nexit 2\n")
    assert (first, second) == (Command("gnnpar a", ("2 of 2 cases pass",), 0), Command("gnnpar b", (), 2))
    assert missing(first, "title\n36 of 36 cases pass  \n") == []
    assert missing(first, "2 of 2 laws hold\n") == ["2 of 2 cases pass"]
