"""The comparison: cells equal result.json, ratios only between equals; its dashboard, built offline."""

import csv
import io
import json
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from conftest import Run
from gnnpar.cli import compare, dashboard
from gnnpar.cli.dashboard import SECTIONS, TABLE, of_study, panels_for, place_of, run
from gnnpar.comm.world import Links
from gnnpar.report import runs as reading
from gnnpar.report.comparison import table_rows
from gnnpar.settings import ConfigError
from gnnpar.track.keys import BYTE_PHASES, KEYS, PHASES
from gnnpar.track.wandb import AXES, CURVES, GIGABYTES, LINK, curves_over_cost, flat
from gnnpar.training.result.result import epoch_time
from planted_runs import Plant


def rows(folder: Path, *, baseline: str = "single", allow_unfair: bool = False) -> list[dict[str, Any]]:
    return table_rows(reading.collect([folder]), baseline=baseline, allow_unfair=allow_unfair)


def test_ratios_are_against_the_fastest_fair_baseline_of_the_same_seed(plant: Plant, tmp_path: Path) -> None:
    plant("0", epoch=4.0)
    plant("1", epoch=3.0, threads_per_rank=1)
    plant("2", epoch=1.0, seed=1)
    plant("10", epoch=2.0, strategy="graph_parallel", world_size=2)
    found = rows(tmp_path)
    assert [Path(row["folder"]).name for row in found] == ["0", "1", "2", "10"]
    assert [row["ratio"] for row in found] == [0.75, 1.0, 1.0, 1.5]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hashes__graph": "other"}, "graph"),
        ({"hashes__split": "other"}, "split"),
        ({"settings__model__hidden": 7}, "model settings"),
        ({"settings__precision": "fp64"}, "precision"),
        ({"epochs": 7}, "epochs"),
        ({"settings__eval_every": 7}, "eval_every"),
        ({"settings__first_layer": "cached"}, "first_layer"),
        ({"settings__row_order": "metis"}, "row_order"),
        ({"provenance": "emulated"}, "provenance"),
        ({"provenance": "emulated", "transport": "threads"}, "provenance"),
        ({"seed": 9, "hardware": "another machine"}, "hardware, seed"),
    ],
)
def test_runs_that_differ_form_no_ratio(plant: Plant, tmp_path: Path, changes: dict, why: str) -> None:
    plant("0")
    plant("1", strategy="graph_parallel", **changes)
    (_, row) = rows(tmp_path)
    assert row["ratio"] is None
    assert sorted(row["why_no_ratio"].removeprefix("single differs in ").split(", ")) == sorted(why.split(", "))
    (_, row) = rows(tmp_path, allow_unfair=True)
    assert (row["ratio"], row["why_no_ratio"]) == (1.0, "unfair")


def test_failed_runs_are_rows_without_a_ratio(plant: Plant, tmp_path: Path) -> None:
    plant("0")
    plant("1", epoch=None, strategy="sar", status="failed", error="rank 1: killed by SIGKILL")
    plant("2", epoch=0.5, strategy="sar", status="interrupted")
    found = rows(tmp_path)
    assert [row["status"] for row in found] == ["completed", "failed", "interrupted"]
    assert [row["ratio"] for row in found] == [1.0, None, None]
    assert found[1]["error"] == "rank 1: killed by SIGKILL"


def test_the_baseline_can_be_chosen_and_can_be_missing(plant: Plant, tmp_path: Path) -> None:
    plant("0", epoch=4.0)
    plant("1", epoch=2.0, strategy="graph_parallel")
    assert [row["ratio"] for row in rows(tmp_path, baseline="graph_parallel")] == [0.5, 1.0]
    assert rows(tmp_path, baseline="sar")[0]["why_no_ratio"] == "no completed run of sar"


def paced(gbps: float) -> dict[str, Any]:
    """What launch=paced changes in a result."""
    links = Links(host_gbps=(gbps, gbps), host_of=(0, 1)).facts() | {"wire_bytes_per_epoch": None, "burst_share": None}
    return {"provenance": "paced", "transport": "gloo", "paced": links, "world_size": 2}


def test_runs_over_unequal_links_form_no_ratio_but_one_rank_is_fair_beside_any(
    plant: Plant, tmp_path: Path, capsys
) -> None:
    plant("0")
    plant("1", strategy="graph_parallel", **paced(1.0))
    plant("2", strategy="graph_parallel", epoch=2.0, **paced(0.5))
    plant("3", strategy="adaqp", epoch=0.5, **paced(0.5))
    assert [row["ratio"] for row in rows(tmp_path)] == [1.0, 1.0, 0.5, 2.0]
    assert [row["ratio"] for row in rows(tmp_path, baseline="graph_parallel")] == [1.0, 1.0, 1.0, 4.0]
    shutil.rmtree(tmp_path / "2")
    assert rows(tmp_path, baseline="graph_parallel")[-1]["why_no_ratio"] == "graph_parallel differs in link rates"
    compare.run([str(tmp_path)])
    assert "paced 2 x 0.5 Gbit/s" in capsys.readouterr().out


def test_the_table_stamps_greys_and_explains(plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plant("0")
    plant("1", strategy="graph_parallel", seed=5)
    plant("2", strategy="graph_parallel", oversubscribed=True)
    plant("3", epoch=None, strategy="[odd]", status="failed", error="rank 0: ValueError: [x]")
    assert compare.run([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "UNFAIR" not in out
    assert "(900.0 ms)" in out
    assert "no ratio for graph_parallel/gcn: single differs in seed" in out
    assert "[odd]/gcn failed: rank 0: ValueError: [x]" in out
    assert compare.run([str(tmp_path), "--allow-unfair"]) == 0
    out = capsys.readouterr().out
    assert "UNFAIR" in out
    assert "1.00?" in out


def test_csv_and_json_hold_the_same_cells(plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    result = plant("0", epoch=0.123456789)
    compare.run([str(tmp_path), "--json"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    compare.run([str(tmp_path), "--csv"])
    (line,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert {k: "" if v is None else str(v) for k, v in row.items()} == line
    assert row["epoch_seconds"] == epoch_time(result)
    assert row["bytes_per_epoch"] == result["bytes_per_epoch"]["total"]
    assert row["memory_peak_bytes"] == max(result["memory_bytes"]["peak"])
    assert (row["val"], row["test"]) == (result["metric"]["val"], result["metric"]["test"])


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no result\.json below"):
        reading.collect([tmp_path])
    with pytest.raises(ConfigError, match="is no folder"):
        reading.collect([tmp_path / "nowhere"])


def test_a_sweep_ends_in_one_table(run_here: Run, tmp_path: Path) -> None:
    """2 strategies x 2 models; every cell equals its result.json; a run counted twice is one row."""
    swept = ("strategy=single,graph_parallel", "model=gcn,gat", "seed=3", "comm=threads", "debug=tiny")
    sweep = run_here("train", "-m", *swept, "threads_per_rank=1", "tracker=jsonl", "hydra.sweep.dir=sweep")
    assert (sweep.returncode, sweep.stderr) == (0, "")
    found = json.loads(run_here("compare", "sweep", "sweep/0", "--json").stdout)["rows"]
    assert len(found) == 4
    for row in found:
        result = json.loads((tmp_path / row["folder"] / "result.json").read_text())
        for name in ("strategy", "model", "seed", "world_size", "status", "provenance"):
            assert row[name] == result[name]
        assert row["epoch_seconds"] == epoch_time(result)
        assert row["bytes_per_epoch"] == result["bytes_per_epoch"]["total"]
        assert row["test"] == result["metric"]["test"]
    assert {row["ratio"] for row in found if row["strategy"] == "single"} == {1.0}
    assert {row["why_no_ratio"] for row in found if row["strategy"] != "single"} == {"single differs in provenance"}


def test_runs_of_one_strategy_are_told_apart_by_what_differs() -> None:
    def result(codec: str, overlap: str, strategy: str = "graph_parallel") -> dict:
        own = {"_target_": f"gnnpar.codecs.codec.{codec}", "bits": 4}
        settings = {"strategy": {"_target_": "a.B", "codec": own, "overlap": overlap}}
        return {"strategy": strategy, "model": "gcn", "dataset": "sbm", "settings": settings}

    runs = [result("Identity", "edges"), result("Drop", "edges"), result("Drop", "none", "other")]
    names = [of_strategy for of_strategy, _ in reading.distinguishing_settings(runs)]
    assert names == ["codec=identity", "codec=drop", ""]
    runs[1] = result("Drop", "none")
    assert reading.distinguishing_settings(runs)[1][0] == "codec=drop overlap=none"


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
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # no server answers
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
        assert not any(metric.startswith("fidelity/") for metric in shown)  # no run has probes
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
