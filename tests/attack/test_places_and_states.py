"""What a twenty-second attack found, on the mends of the twenty-first: places that are full, links in folders of
libraries, states of the program around."""

from __future__ import annotations

from pathlib import Path

from conftest import Run

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
