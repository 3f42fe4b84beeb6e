"""The workspace and the report of a sweep, built offline: every key of a panel is in the runs' history."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from gnnpar.cli import dashboard
from gnnpar.cli.dashboard import SECTIONS, TABLE, of_study, panels_for, place_of, run
from gnnpar.settings import ConfigError
from gnnpar.track.keys import BYTE_PHASES, KEYS, PHASES
from gnnpar.track.wandb import AXES, CURVES, GIGABYTES, LINK, curves_over_cost, flat
from planted_runs import Plant

STRATEGIES = ("single", "graph_parallel", "adaqp", "sar", "gnnpipe")
ROW: dict[str, Any] = {  # as metrics.jsonl has it, of two ranks, without a probe
    "epoch": 0,
    **{"loss/train": 1.0, "metric/val": 0.5, "metric/test": 0.5},
    **{"time/timed": 1, "time/epoch_seconds": 0.1, "time/train_seconds": 0.1, "time/comm_total_seconds": 0.0},
    **{f"time/{phase}_seconds": 0.0 for phase in PHASES},
    **{"comm/total_bytes": 10, "comm/total_bytes_so_far": 10, "comm/messages": 2},
    **{f"comm/{phase}_bytes": 0 for phase in BYTE_PHASES},
    **{"memory/peak_bytes": [3, 4], "memory/live_bytes": {"halo": 1, "features": 2}},
}
DERIVED = {GIGABYTES, *(f"{axis}/{curve}" for axis in AXES for curve in CURVES)}


@pytest.fixture
def sweep(tmp_path: Path, plant: Plant) -> Path:
    """Five strategies by three seeds of two ranks, as tracker=wandb leaves them."""
    link = {"id": "x", "entity": None, "project": "gnnpar", "group": "monday/noon", "mode": "offline", "path": ""}
    changes: dict[str, Any] = {
        "world_size": 2,
        "bytes_per_epoch__total": 2048,
        "memory_bytes__peak": [3, 4],
        "epochs": 2,
    }
    changes |= {"epoch_seconds__median": 0.25, "epoch_seconds__mean": 0.3}
    changes |= {
        f"metric__{name}": value for name, value in {"val": 0.5, "test": 0.5, "test_at_best_val": 0.625}.items()
    }
    for i, (strategy, seed) in enumerate(product(STRATEGIES, range(3))):
        plant(str(i), strategy=strategy, seed=seed, **changes)
        (tmp_path / str(i) / LINK).write_text(json.dumps(link))
        rows = [json.dumps(ROW | {"epoch": epoch}) + "\n" for epoch in range(2)]
        (tmp_path / str(i) / "metrics.jsonl").write_text("".join(rows))
    return tmp_path


def configs(node: Any) -> Iterator[dict[str, Any]]:
    """Every panel's configuration in a specification."""
    if isinstance(node, dict):
        if "viewType" in node:
            yield node["config"]
        for value in node.values():
            yield from configs(value)
    elif isinstance(node, list):
        for value in node:
            yield from configs(value)


def test_every_key_of_a_panel_is_in_the_history(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb_workspaces", reason="the [dashboard] extra is not installed")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody is asked
    out = sweep / "dashboard.json"
    assert run([str(sweep), "--out", str(out)]) == 0
    with pytest.raises(ConfigError, match="--save: needs the owner of the project"):
        run([str(sweep), "--save"])
    made = json.loads(out.read_text())
    logged = set(flat(ROW) | curves_over_cost(ROW))
    count = sum(map(len, panels_for(logged).values()))
    for name in ("workspace", "report"):
        found = list(configs(made[name]))
        assert len(found) == count > 20
        shown = {metric for config in found for metric in config["metrics"]}
        assert shown <= logged
        assert {"against_gigabytes/loss/train", "memory/peak_bytes/rank_1", "time/exposed_wire_seconds"} <= shown
        assert {config.get("xAxis", "epoch") for config in found} == {"epoch", *AXES.values()}
        assert not any(metric.startswith("fidelity/") for metric in shown)  # nobody probed
        assert "monday/noon" in json.dumps(made[name])
    page = json.dumps(made["report"])
    assert f"| {' | '.join(TABLE)} |" in page
    assert page.count("| 250.0 ms | 2.0 KiB | 0.6250 |") == 15


def test_panels_speak_of_metrics_that_exist() -> None:
    wanted = {metric.removesuffix("/*") for panels in SECTIONS.values() for panel in panels for metric in panel.y}
    assert wanted <= set(KEYS) | DERIVED
    assert {panel.x for panels in SECTIONS.values() for panel in panels} <= set(KEYS) | DERIVED
    assert panels_for([]) == {}
    assert panels_for(["fidelity/cosine"]) == {}  # no epoch to draw it against


def test_dashboard_without_a_study_is_one_line(sweep: Path) -> None:
    folders = sorted(sweep.iterdir())
    link = json.loads((folders[0] / LINK).read_text())
    (folders[0] / LINK).write_text(json.dumps(link | {"group": "tuesday"}))
    with pytest.raises(ConfigError, match="the runs are of 2 studies"):
        place_of(folders, "")
    (folders[0] / LINK).write_text(json.dumps(link | {"group": None}))
    with pytest.raises(ConfigError, match="the runs have no group"):
        place_of(folders[:1], "")
    (folders[0] / LINK).unlink()
    with pytest.raises(ConfigError, match="has no wandb run; train with tracker=wandb"):
        place_of(folders, "")


def test_server_that_refuses_a_dashboard_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Thing:
        url = "x"

        def save(self) -> None:
            raise ConnectionError("no route")

    assert dashboard.save({"workspace": Thing()}) == 1
    assert "workspace cannot be saved (" in capsys.readouterr().err


def test_study_name_that_wandb_cannot_filter_by_is_refused() -> None:
    pytest.importorskip("wandb_workspaces")
    for name in ("lr=0.1", "it's", "a\\nb", "a\nb"):
        with pytest.raises(ValueError, match="cannot be in the name of a group that wandb filters by"):
            of_study(name)
    assert of_study("a study, 2")
