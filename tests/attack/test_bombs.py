"""Small files whose tuples have no end, or are too deep for Python: refused before torch reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import ADAPTIVE, last, train
from gnnpar.files import read_checked_json, write_checked_json
from gnnpar.training.checkpoint.state import read_tree, write_tree

ONE = b"K\x01q\x00"  # the number 1, memo 0


def deep(levels: int = 400_000) -> bytes:
    return ONE + b"\x85" * levels


@pytest.mark.parametrize(
    ("flaw", "line"), [("step", "is no count"), ("engine", "another state than this strategy leaves")]
)
def test_a_state_that_cannot_be_gone_on_from_is_a_line(tmp_path: Path, flaw: str, line: str) -> None:
    made = ("strategy=adaqp", "world_size=2", *ADAPTIVE)
    train(tmp_path / "run", *made, "epochs=3")
    folder = last(tmp_path / "run").folder
    manifest = read_checked_json(folder / "manifest.json")
    for rank in (0, 1):
        file = folder / f"rank-{rank}.pt"
        tree = read_tree(file, torch.device("cpu"))
        if flaw == "step":
            next(iter(tree["optimizer"]["state"].values()))["step"] = torch.tensor(-3.0)
        else:
            tree["engine"] = {"codecs": [{"codes": 3}] * 9}
        manifest["files"][file.name] = write_tree(file, tree)
    write_checked_json(folder / "manifest.json", manifest)
    outcome = train(tmp_path / "next", *made, "epochs=5", f"resume={tmp_path / 'run'}")
    assert outcome.status == "failed"
    assert line in str(outcome.error)
