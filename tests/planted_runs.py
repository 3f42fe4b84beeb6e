"""Run folders made from one real result: what a test plants is all that differs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Plant = Callable[..., dict[str, Any]]


def real_run(folder: Path, *overrides: str) -> dict[str, Any]:
    """A result of a run of a second, with its files, in `folder`."""
    from gnnpar.cli.train import run_training
    from gnnpar.config.compose import compose

    folder.mkdir(parents=True, exist_ok=True)
    common = ["debug=tiny", "threads_per_rank=1", "tracker=jsonl", f"data_dir={folder}"]
    assert run_training(compose([*common, *overrides]), folder).exit_code == 0
    return json.loads((folder / "result.json").read_text())


def plant(
    template: dict[str, Any], folder: Path, *, epoch: float | None = 1.0, curve: Sequence[float] = (), **changes: Any
) -> dict[str, Any]:
    """A changed copy. epoch: seconds; curve: validation by epoch, each of a second and 100 bytes."""
    result = copy.deepcopy(template)
    result["load"] = {"before": 0.5, "after": 0.5}
    result["epoch_seconds"] |= {"median": epoch and 0.9 * epoch, "mean": epoch}
    for path, value in changes.items():
        node: Any = result
        *parents, last = path.split("__")
        for parent in parents:
            node = node[parent]
        node[last] = value
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result))
    rows = [
        {"epoch": i, "metric/val": val, "time/train_seconds": i + 1.0, "comm/total_bytes_so_far": 100 * (i + 1)}
        for i, val in enumerate(curve)
    ]
    if rows:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return result


OURS: dict[str, Any] = {"strategy": "graph_parallel", "world_size": 2, "transport": "gloo"}
DROP = {"exactness": ["sampled"], "settings__strategy": {"codec": {"_target_": "gnnpar.codecs.codec.Drop"}}}


def accurate(percent: float) -> dict[str, Any]:
    """What a test accuracy changes in a result."""
    return {"metric__test_at_best_val": percent / 100, "metric__best_val": percent / 100}
