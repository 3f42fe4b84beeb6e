"""One thread, fixed seeds and poisoned memory for every test; `run_cli` runs `gnnpar` the way a user does."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any Triton kernel is imported

settings.register_profile("untimed", deadline=None)  # how long one example takes says how busy the machine is
settings.load_profile("untimed")

ROOT = Path(__file__).parents[1]
CACHE = Path(tempfile.gettempdir()) / "gnnpar-tests"  # partitions are named by content: nothing goes stale


def pytest_xdist_auto_num_workers() -> int:
    """-n auto: one more than there are cores, for tests that wait for processes of theirs."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all cases of a test with `quick(n)` as slow but n. These n have as many values of the parameters as n cases
    can have."""
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for left in cases.values():
        marker, seen = left[0].get_closest_marker("quick"), set[str]()
        if marker is None:
            continue
        for _ in range(min(len(left), marker.args[0])):
            values = [{f"{name}={value!r}" for name, value in case.callspec.params.items()} for case in left]
            best = max(range(len(left)), key=lambda i: len(values[i] - seen))
            seen |= values[best]
            left.pop(best)
        for case in left:
            case.add_marker("slow")


def pytest_collection_finish() -> None:
    """Collections skip what imports left, a million objects: every training asks for two of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """The same for what the modules before have imported and keep."""
    pytest_collection_finish()


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    """Single-threaded, seeded, and with NaN in every torch.empty."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    poison: Any = torch.utils.deterministic
    filled = poison.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    poison.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    poison.fill_uninitialized_memory = filled


def environment() -> dict[str, str]:
    """The environment of a `gnnpar` process: this checkout's sources first, no settings of the caller."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    ours = ("GNNPAR_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "GLOO_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return kept | {"PYTHONPATH": paths, "COLUMNS": "200", "GNNPAR_CACHE": str(CACHE)}


@pytest.fixture(scope="session")
def shaped_links() -> None:
    """Skips where launch=paced cannot work: no root, no iproute2, no such kernel."""
    from gnnpar.launch.emulated.paced import trial

    if (said := trial()).startswith("no: "):
        pytest.skip(f"launch=paced {said.removeprefix('no: ')}")


Run = Callable[..., subprocess.CompletedProcess[str]]
Refused = Callable[..., str]


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in tmp_path, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run_python(tmp_path: Path) -> Run:
    """python(*arguments) in a process and a folder of its own; `env` adds variables."""

    def run(
        *arguments: str, cwd: Path = tmp_path, timeout: float = 200, stdin: str | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        command, variables = [sys.executable, *arguments], environment() | env
        return subprocess.run(
            command, cwd=cwd, env=variables, input=stdin, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run


@pytest.fixture
def run_cli(run_python: Run) -> Run:
    """gnnpar(*arguments) in a folder of its own; the completed process."""
    return partial(run_python, "-m", "gnnpar", timeout=120)


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The same in this process, which has imported everything: 3 seconds sooner, where the process is not the point."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv("GNNPAR_CACHE", str(CACHE))

    def run(*arguments: str, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        from gnnpar.__main__ import main

        monkeypatch.chdir(cwd)
        capsys.readouterr()
        try:
            code = main(list(arguments))
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    yield run
    of_test = [name for name, it in sys.modules.items() if str(vars(it).get("__file__")).startswith(f"{tmp_path}/")]
    for name in of_test:  # the next test may have a module of the same name in its own folder
        del sys.modules[name]


@pytest.fixture
def refused(run_here: Run) -> Refused:
    """refused(line, *command): it ends with exit code 2 and one line that holds `line`; stderr."""

    def refuse(line: str, *command: str, code: int = 2) -> str:
        done = run_here(*command)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
        assert done.stderr.startswith("gnnpar: ") and line in done.stderr
        return done.stderr

    return refuse


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six epochs of GCN on one device, a run of a second."""
    from checkpoints import train

    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train(folder, "strategy=single", "epochs=6").exit_code == 0
    return folder


@pytest.fixture
def finished(trained_once: Path, tmp_path: Path) -> Path:
    """A copy of it, tmp_path/run."""
    return Path(shutil.copytree(trained_once, tmp_path / "run"))


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of a run of a second, from which others are planted."""
    from planted_runs import real_run

    return real_run(tmp_path_factory.mktemp("run"), "strategy=single")


@pytest.fixture
def plant(template: dict[str, Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """plant(name, epoch=..., curve=..., changes) below tmp_path; numbers its folders where no name is given."""
    import planted_runs

    def one(name: str = "", **changes: Any) -> dict[str, Any]:
        name = name or str(len(list(tmp_path.iterdir())))
        return planted_runs.plant(template, tmp_path / name, **changes)

    return one
