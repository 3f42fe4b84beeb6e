"""What a twenty-second attack found, on the mends of the twenty-first: places that are full, links in folders of
libraries, states of the program around."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Run, environment

TINY = ("dataset=sbm", "dataset.num_nodes=60", "strategy=single", "epochs=1")


def test_wandb_writes_through_no_link(tmp_path: Path, run_cli: Run) -> None:
    """With WANDB_RESUME=auto it notes the id of a run in a file of the run's folder, which was a link."""
    (tmp_path / "run" / "wandb").mkdir(parents=True)
    (precious := tmp_path / "precious").write_text("mine")
    (tmp_path / "run" / "wandb" / "wandb-resume.json").symlink_to(precious)
    offline = ["tracker=wandb", "tracker.mode=offline", f"hydra.run.dir={tmp_path}/run"]
    done = run_cli("train", *TINY, *offline, WANDB_RESUME="auto", WANDB_CONFIG_DIR=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert precious.read_text() == "mine"
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize("hard", [28, 4096])
def test_few_open_files_are_more_or_refused(tmp_path: Path, hard: int) -> None:
    """Ranks ended in tracebacks under ulimit -n 28; a limit that may be raised is."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (28, hard))

    ranks = ("strategy=graph_parallel", "world_size=2", "threads_per_rank=1")
    done = subprocess.run(
        [sys.executable, "-m", "gnnpar", "train", *TINY, *ranks],
        cwd=tmp_path,
        env=environment(),
        preexec_fn=limit,  # of one thread
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    line = (
        "gnnpar: a rank of 2 has 80 files open at once, and the limit is 28: raise it (ulimit -n), or start fewer ranks"
    )
    assert (done.returncode, line in done.stderr) == ((2, True) if hard == 28 else (0, False)), done.stderr
    assert "Traceback" not in done.stderr


def test_what_torch_cannot_read_of_the_environment_is_one_line(run_cli: Run) -> None:
    done = run_cli("train", *TINY, TORCH_LOGS="garbage")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("gnnpar: TORCH_LOGS=garbage: Invalid log settings: garbage")
