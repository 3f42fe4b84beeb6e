"""Temporary files of a command: in a folder of its own, which nobody can foresee."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

from gnnpar import scratch
from gnnpar.cli.main import run
from gnnpar.durable import WriteError
from gnnpar.scratch import give_back_environment, own_temporary_files


def probe(monkeypatch: pytest.MonkeyPatch, found: dict[str, str]) -> None:
    """In the place of `gnnpar cite`."""
    command = ModuleType("gnnpar.cli.cite")

    def execute(argv: list[str]) -> int:
        child = [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"]
        found["own"], found["variable"] = tempfile.gettempdir(), os.environ["TMPDIR"]
        found["child"] = subprocess.check_output(child, text=True).strip()
        found["mode"] = oct(stat.S_IMODE(Path(found["own"]).stat().st_mode))
        return 0

    command.run = execute  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "gnnpar.cli.cite", command)


def test_a_command_and_its_processes_have_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    found: dict[str, str] = {}
    probe(monkeypatch, found)
    assert run("cite", []) == 0
    assert found["own"] == found["variable"] == found["child"]
    assert Path(found["own"]).parent == tmp_path
    assert found["mode"] == "0o700"
    assert not list(tmp_path.iterdir())
    assert os.environ["TMPDIR"] == str(tmp_path)


def test_jobs_of_a_scheduler_get_the_folder_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with own_temporary_files():
        own = tempfile.gettempdir()
        give_back_environment()
        assert os.environ["TMPDIR"] == str(tmp_path)
        assert tempfile.gettempdir() == own
    monkeypatch.delenv("TMPDIR")
    with own_temporary_files():
        assert "TMPDIR" in os.environ
        give_back_environment()
        assert "TMPDIR" not in os.environ


def test_where_a_place_is_full_the_next_one_is_taken_and_else_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full /tmp left TMPDIR as it was, and code of PyG's layers in it, where others could write."""
    made, full = tempfile.mkdtemp, [tmp_path / "full"]
    for name in ("full", "cache"):
        (tmp_path / name).mkdir(mode=0o700)

    def make(*, prefix: str, dir: Path) -> str:  # tempfile's name
        if dir in full:
            raise OSError(28, "No space left on device")
        return made(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with own_temporary_files():
        assert Path(tempfile.gettempdir()).parent == tmp_path / "cache"
    monkeypatch.setattr(scratch, "safe_places", lambda: full)
    with (
        pytest.raises(
            WriteError, match=r"full cannot be written: no place takes temporary files \(last: No space left"
        ),
        own_temporary_files(),
    ):
        pass


def test_a_process_that_ends_without_leaving_its_blocks_leaves_no_folder(tmp_path: Path) -> None:
    code = """
    import os
    from gnnpar.scratch import own_temporary_files, remove_all
    with own_temporary_files():
        remove_all()
        os._exit(7)
    """
    env = os.environ | {"TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", dedent(code)], env=env, check=False).returncode == 7
    assert not list(tmp_path.iterdir())
