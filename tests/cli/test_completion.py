"""Completion: what a word may become, in Python and in a real shell; and where it is installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment
from gnnpar.cli import completion
from gnnpar.cli.main import COMMANDS
from gnnpar.settings import ConfigError


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gnnpar st", ["study", "status"]),
        ("gnnpar train model=ga", ["gat", "gatv2"]),
        ("gnnpar train -m model=gcn,gat", ["gat", "gatv2"]),
        ("gnnpar train strategy=sar strategy.log", ["strategy.logical_parts="]),
        ("gnnpar train strategy=single strategy.log", []),
        ("gnnpar train early_stopping.p", ["early_stopping.patience="]),
        ("gnnpar compare --allow", ["--allow-unfair"]),
        ("gnnpar plan --no", ["--no-measure"]),
        ("gnnpar compare out", []),  # folders are the shell's own
        ("gnnpar trian x", []),
    ],
)
def test_last_word_is_completed(line: str, expected: list[str]) -> None:
    assert completion.complete(line) == expected


@pytest.mark.parametrize("word", ["model={}/secret", "../..{}=secret"])
def test_only_files_of_a_group_are_read(tmp_path: Path, word: str) -> None:
    (tmp_path / "secret.yaml").write_text("password: 1\n")
    away = "../" * 20 + str(tmp_path)
    assert "epochs=" in (offered := completion.complete(f"gnnpar train {word.format(away)} "))
    assert not [key for key in offered if "password" in key]


def test_every_command_and_group_is_offered() -> None:
    assert set(COMMANDS) < set(completion.complete("gnnpar "))
    assert {"strategy=", "model=", "epochs=", "optim.lr="} < set(completion.complete("gnnpar train "))


def test_bash_completes(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    script = completion.SCRIPT + f'gnnpar() {{ "{sys.executable}" -m gnnpar "$@"; }}\n'
    script += 'COMP_LINE="gnnpar train model=sa"; COMP_POINT=${#COMP_LINE}; _gnnpar; echo "${COMPREPLY[*]}"\n'
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert done.stdout.split() == ["sage", "sage_max"]


def test_completion_installed_twice_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/bash")
    (tmp_path / ".bashrc").write_text("alias a=b")
    for _ in range(2):
        completion.install(tmp_path)
    script = tmp_path / ".local" / "share" / "gnnpar" / "completion.sh"
    assert script.read_text() == completion.SCRIPT
    assert (tmp_path / ".bashrc").read_text() == f"alias a=b\n. {script}\n"
    monkeypatch.setenv("SHELL", "/bin/fish")
    with pytest.raises(ConfigError, match="for bash and zsh, and SHELL is fish"):
        completion.install(tmp_path)


def test_completion_offers_plain_names_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = completion.complete("gnnpar train model=g")
    (tmp_path / "model").mkdir()
    for name in ("gown", "g$(touch ran)", "g;ls", "g\x1b[2J"):
        (tmp_path / "model" / f"{name}.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert sorted(completion.complete("gnnpar train model=g")) == sorted([*before, "gown"])
