"""A strategy of one's own folder that is no Strategy is refused in one line, at start-up, by every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Run
from gnnpar.cli import new

COMMANDS = {"train": ("comm=threads", "world_size=2", "epochs=1"), "check": ("--worlds=2", "model=gcn"), "estimate": ()}
CAPABILITIES = "    capabilities = Capabilities(cached_first_layer=False)"


def written(folder: Path, name: str, before: str, after: str) -> None:
    """The scaffold, one line of it changed."""
    module = new.write("strategy", name, folder)[0]
    text = module.read_text()
    assert before in text
    module.write_text(text.replace(before, after))


@pytest.mark.parametrize("command", COMMANDS)
def test_strategy_without_a_member_is_refused_with_its_name(run_here: Run, tmp_path: Path, command: str) -> None:
    written(tmp_path, f"lacking_{command}", "def describe", "def told")
    done = run_here(command, f"strategy=lacking_{command}", *COMMANDS[command])
    line = f"strategy=lacking_{command}: lacking_{command}.Lacking{command.capitalize()} has no describe"
    assert done.returncode == 2
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("result.json"))  # no rank has started


def test_strategy_with_an_unknown_capability_is_refused(run_here: Run, tmp_path: Path) -> None:
    written(tmp_path, "unknown", CAPABILITIES, "    capabilities = Capabilities(max_rank=2)")
    done = run_here("train", "strategy=unknown", *COMMANDS["train"])
    assert done.returncode == 2
    assert "unexpected keyword argument 'max_rank'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_exact_limit_that_is_not_exact_is_refused(run_here: Run, tmp_path: Path) -> None:
    describe = "    def describe("
    written(tmp_path, "inexact", describe, f"    def exact_limit(self):\n        return self\n\n{describe}")
    done = run_here("check", "strategy=inexact", "codec=bf16", "model=gcn", "--worlds=2")
    assert done.returncode == 2
    assert "exact_limit() of Inexact is rounded" in done.stderr


def test_first_layer_that_cannot_be_cached_is_refused(run_here: Run, tmp_path: Path) -> None:
    done = run_here("train", "strategy=gnnpipe", "first_layer=cached", *COMMANDS["train"])
    assert done.returncode == 2
    assert "first_layer=cached is for strategies without chunks or batches: set first_layer=live" in done.stderr
