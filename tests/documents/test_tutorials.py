"""Every block of every tutorial and of the quickstart runs, in an empty folder, and says what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import ROOT, Run
from gnnpar.paths import GROUP
from tutorial_steps import Command, blocks, commands, missing

FOLDER = ROOT / "docs" / "tutorials"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "README.md")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs" / "quickstart.md"], ids=lambda page: page.stem)
def test_every_block_runs(run_python: Run, page: Path) -> None:
    assert len(blocks(page)) >= 2
    done = run_python(str(ROOT / "tests" / "tutorial_steps.py"), str(page), timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_strategy_of_ones_own_takes_less_than_190_lines() -> None:
    files = [block for block in blocks(FOLDER / "own_strategy.md") if block.title]
    ours = ["lazy.py", "strategy/lazy.yaml", "few.py", "strategy/few.yaml", "pyproject.toml"]
    assert [block.title for block in files] == ours
    assert f'[project.entry-points."{GROUP}"]' in files[-1].text
    assert sum(block.text.count("\n") for block in files) < 190


def test_the_list_of_tutorials_is_whole() -> None:
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"({page.name})" not in listed] == []


def test_a_promise_that_is_not_kept_is_noticed() -> None:
    first, second = commands("$ gnnpar a\n2 of 2 cases pass\n$ gnnpar b\nexit 2\n")
    assert (first, second) == (Command("gnnpar a", ("2 of 2 cases pass",), 0), Command("gnnpar b", (), 2))
    assert missing(first, "title\n36 of 36 cases pass  \n") == []
    assert missing(first, "2 of 2 laws hold\n") == ["2 of 2 cases pass"]
