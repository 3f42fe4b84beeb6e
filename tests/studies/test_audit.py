"""Numbers that README.md, experiments/README.md and docs/guide/compare.md quote are those of the raw lines."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT

EXPERIMENTS = ROOT / "experiments"


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("experiments_audit", EXPERIMENTS / "audit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_quoted_number_is_its_cell(audit: Any) -> None:
    """Of the tables in README.md or in a page beside it, which are held to the lines by test_experiments.py."""
    every = audit.quoted()
    assert len(every) > 100
    tables = {
        study: audit.lines_of(
            "\n".join(page.read_text(encoding="utf-8") for page in (EXPERIMENTS / study).glob("*.md"))
        )
        for study in {quote.cell["study"] for quote in every}
    }
    problems = [(quote, audit.difference(quote, tables[quote.cell["study"]])) for quote in every]
    assert [(quote, problem) for quote, problem in problems if problem is not None] == []


def test_fifty_numbers_drawn_at_random_are_recomputed_from_the_lines() -> None:
    script = [sys.executable, str(EXPERIMENTS / "audit.py")]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "50 of 50 match"


def test_a_number_that_is_not_its_cell_is_wrong(audit: Any) -> None:
    quote = next(quote for quote in audit.quoted() if quote.cell["study"] == "sar_memory")
    tables = audit.lines_of((EXPERIMENTS / "sar_memory" / "README.md").read_text(encoding="utf-8"))
    assert audit.difference(quote, tables) is None
    assert audit.difference(quote._replace(shown="0.39"), tables) == "the lines have 0.38"
    elsewhere = quote._replace(cell={**quote.cell, "row": {"model": "none"}})
    assert audit.difference(elsewhere, tables).startswith("0 lines are")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('in = "README.md"\ntext = "a sentence {1.0} that is not there"\nof = [{}]', "README.md does not say"),
        ('in = "README.md"\ntext = "{0.36} GiB ({6.92} without)"\nof = [{}]', "2 numbers and 1 cells"),
    ],
)
def test_a_text_that_has_changed_is_told(audit: Any, tmp_path: Path, entry: str, message: str) -> None:
    file = tmp_path / "quoted.toml"
    file.write_text(f"[[quoted]]\n{entry}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        audit.quoted(file)
