"""result.json is a pure function of the header, the plan and the rows, and follows its schema whatever happened."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from checkpoints import result, train
from composing import settings_of
from gnnpar.comm.world import Links, World
from gnnpar.config.compose import compose
from gnnpar.launch.launch import world_of
from gnnpar.report.fairness import differences, unequal_accuracy
from gnnpar.report.runs import configuration_of
from gnnpar.track import keys
from gnnpar.training.loop import Progress, memory_epoch
from gnnpar.training.meter import merge
from gnnpar.training.result import result as results
from gnnpar.training.result.record import agreed_on, remarks
from gnnpar.training.result.result import KERNELS, header
from gnnpar_kernels import dispatch

SCHEMA = json.loads(results.schema_path().read_text())
WORLD = World(how="processes", size=2, local_size=2, threads_per_rank=1, cores=2, device="cpu", backend="gloo")


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return header(compose(["epochs=10", "target=0.6"]), WORLD)


def row(epoch: int, *, timed: int = 1, **values: Any) -> dict[str, Any]:
    """A row as rank 0 logs it: two ranks, the second slower."""
    phases = dict.fromkeys(keys.PHASES, 0.1)
    rank = {"bytes": {"forward": 100, "reduce": 20}, "metadata": 4, "messages": 2, "cpu": 0.5, "peak_rss": 7}
    rank |= {"layer_bytes": {0: 70, 2: 30}}
    rank |= {"phases": phases, "comm_total": 0.3}
    slow = 0.7 + epoch / 100
    merged = merge([rank | {"seconds": 0.2}, rank | {"seconds": slow}])
    base = {"epoch": epoch, "loss/train": 2.0 - epoch / 10, "optim/lr": 0.01, "time/timed": timed}
    so_far = {"time/train_seconds": float(epoch + 1), "comm/total_bytes_so_far": 240 * (epoch + 1)}
    return base | merged | so_far | {key.replace("__", "/"): value for key, value in values.items()}


def evaluated(epoch: int, val: float | None) -> dict[str, Any]:
    return row(epoch) | {"metric/name": "accuracy", "metric/train": 1.0, "metric/val": val, "metric/test": 0.4}


def build(known: dict, rows: list, status: Any = "completed", error: str | None = None) -> dict[str, Any]:
    plan = {"hashes": {"graph": "g", "split": "s", "partition": "p"}}
    built = results.build_result(known, plan, rows, status, error) | {"load": {"before": 0.0, "after": 0.1}}
    jsonschema.validate(built, SCHEMA)
    return built


def test_the_links_of_a_paced_run_are_facts_and_its_counters_a_mean() -> None:
    links = ((None, 0.5), (None, None))
    shaped = Links(host_gbps=(1.0, 2.0), link_gbps=links, host_of=(0, 1))
    facts = header(compose(["epochs=10"]), replace(WORLD, links=shaped))
    built = build(facts, [row(epoch, comm__wire_bytes=1000 + epoch) for epoch in range(8)])
    assert built["provenance"] == "paced"
    assert built["paced"]["rates"]["host_gbps"] == [1.0, 2.0]
    assert built["paced"]["rates"]["link_gbps"] == [[None, 0.5], [None, None]]
    assert built["paced"]["wire_bytes_per_epoch"] == 1006
    assert built["paced"]["burst_share"] == 1.0, "two idle links pass all of 1006 bytes"
    rows = [row(epoch, comm__wire_bytes=2 * 2**20) for epoch in range(8)]
    assert build(facts, rows)["paced"]["burst_share"] == 0.25
    assert build(facts, [])["paced"]["wire_bytes_per_epoch"] is None
    slower = header(compose(["epochs=10"]), replace(WORLD, links=replace(shaped, host_gbps=(1.0, 1.0))))
    assert slower["config_hash"] != facts["config_hash"], "a sweep over rates is a sweep"


def test_memory_is_that_of_the_plan_that_a_run_ended_with(known: dict) -> None:
    """The first plan's peak is not compared with what was predicted of the second."""
    told = {"epoch": 10, "before": "sar", "predicted_seconds": 1.0, "measured_seconds": 2.0, "why": "slow"}
    said = {"label": "gnnpipe", "epoch_seconds": 1.0, "peak_bytes": [70, 80], "replanned": told}
    rows = [row(epoch) for epoch in range(20)]
    for epoch, peak in ((5, 200), (15, 100)):
        rows[epoch] |= {"memory/peak_bytes": [peak, peak], "memory/live_bytes": {"parameters": [1, 1]}}
    built = results.build_result(known, {"predicted": said, "hashes": {}}, rows, "completed", None)
    assert built["memory_bytes"]["peak"] == [100, 100]
    assert built["predicted"]["peak_error"] == pytest.approx(0.25)


def test_figures_leave_out_warm_up_and_probes(known: dict) -> None:
    rows = [row(epoch, timed=int(epoch != 6)) for epoch in range(10)]
    built = build(known, rows)
    assert built["epoch_seconds"]["num_epochs"] == 4
    assert built["epoch_seconds"]["median"] == pytest.approx(0.775)
    assert built["bytes_per_epoch"]["total"] == 240
    assert built["bytes_per_epoch"]["forward"] == 200
    assert built["bytes_per_epoch"]["metadata"] == 8
    assert built["bytes_by_layer"] == [140, 0, 60]
    assert built["cpu_seconds"] == [0.5, 0.5]
    assert built["loss"] == {"first": 2.0, "last": pytest.approx(1.1)}


def test_short_runs_use_all_epochs_and_say_so(known: dict) -> None:
    built = build(known, [row(epoch, timed=int(epoch != 1)) for epoch in range(3)])
    assert (built["epoch_seconds"]["warmup_epochs"], built["epoch_seconds"]["num_epochs"]) == (0, 2)
    built = build(known, [row(0, timed=0)])
    assert built["epoch_seconds"]["num_epochs"] == 1


def test_times_are_of_the_slowest_rank() -> None:
    merged = row(0)
    assert (merged["time/epoch_seconds"], merged["time/slowest_rank"]) == (0.7, 1)


def test_best_validation_and_time_to_target(known: dict) -> None:
    rows = [row(0), evaluated(1, 0.5), evaluated(2, 0.8), evaluated(3, 0.8), evaluated(4, 0.7)]
    built = build(known, rows)
    assert built["metric"]["best_epoch"] == 2
    assert (built["metric"]["best_val"], built["metric"]["val"]) == (0.8, 0.7)
    assert built["time_to_target"] == {"target": 0.6, "seconds": 3.0, "bytes": 720}
    assert build(known, rows[:2])["time_to_target"]["seconds"] is None
    assert build(known, [evaluated(0, None)])["metric"]["name"] == "accuracy"


@pytest.mark.parametrize("status", ["failed", "interrupted", "skipped"])
def test_a_run_without_a_single_epoch_still_has_a_result(known: dict, status: str) -> None:
    built = build(known, [], status, "rank 1: killed by SIGKILL")
    assert built["epoch_seconds"]["median"] is None
    assert built["error"] == "rank 1: killed by SIGKILL"
    results.build_result(known, None, [], "failed", "x")


def test_fidelity_over_probes(known: dict) -> None:
    def probed(epoch: int, cosine: float | None) -> dict[str, Any]:
        layers = {"layers.0": [cosine, 0.1]}
        worst = {"fidelity/worst_layer": f"layers.{epoch}", "fidelity/worst_relative_error": 0.1 + epoch}
        probe = {"fidelity/cosine": cosine, "fidelity/relative_error": 0.1, "fidelity/layers": layers}
        return row(epoch) | probe | worst

    built = build(known, [probed(0, 1.0), row(1), probed(2, 0.5), probed(3, None)])
    assert built["fidelity"]["probes"] == 2
    assert built["fidelity"]["cosine"] == {"min": 0.5, "mean": 0.75, "last": 0.5}
    assert built["fidelity"]["worst"] == {"layer": "layers.2", "relative_error": 2.1, "epoch": 2}


def test_the_file_is_replaced_whole(known: dict, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(0)) + "\n" + '{"epoch"')
    written = results.write_result(tmp_path, known, "interrupted", "interrupted by a signal")
    assert json.loads((tmp_path / "result.json").read_text()) == written
    assert written["epochs_done"] == 1
    assert not list(tmp_path.glob("*.partial"))


def test_early_stopping() -> None:
    settings = compose(["early_stopping.patience=2", "early_stopping.min_delta=0.1"])
    progress = Progress()
    vals = [0.5, 0.55, 0.7, 0.75, None, 0.79]
    assert [progress.stops(val, settings) for val in vals] == [False, False, False, False, False, True]
    assert not any(Progress().stops(0.1, compose([])) for _ in range(9))
    with pytest.raises(
        ValueError, match=r"early_stopping.patience=2: the metric of the validation split is not defined"
    ):
        Progress().stops(None, settings)


def test_the_profiled_epoch_comes_after_the_warm_up() -> None:
    assert [memory_epoch(n) for n in (1, 2, 3, 6, 7, 100)] == [-1, -1, 1, 4, 5, 5]


def test_oversubscription_counts_the_threads_of_a_host() -> None:
    assert not WORLD.oversubscribed
    assert replace(WORLD, threads_per_rank=2).oversubscribed
    assert replace(WORLD, jobs_at_once=2).oversubscribed


@pytest.mark.parametrize(("percent", "said"), [(0.0, False), (100.0, True)])
def test_a_busy_machine_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch, percent: float, said: bool) -> None:
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: percent)
    lines = list(remarks(compose([]), WORLD))
    assert any(line.startswith("busy machine: other programs keep ") for line in lines) == said
    assert not any("busy" in line for line in remarks(compose([]), replace(WORLD, jobs_at_once=2)))


def test_jobs_that_a_sweep_runs_beside_each_other_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = compose(["strategy=single", "topology.cores=2", "threads_per_rank=1"])
    assert not world_of(settings).oversubscribed
    monkeypatch.setenv("GNNPAR_JOBS_AT_ONCE", "3")
    assert header(settings, world_of(settings))["oversubscribed"]


def test_forced_kernels_are_part_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KERNELS == dispatch.VARIABLE
    plain = agreed_on(settings_of())
    train(tmp_path / "plain", "epochs=1")
    monkeypatch.setenv(KERNELS, "naive")
    train(tmp_path / "naive", "epochs=1")
    assert {name for name, value in agreed_on(settings_of()).items() if plain[name] != value} == {KERNELS}
    plain_run, naive_run = result(tmp_path / "plain"), result(tmp_path / "naive")
    assert configuration_of(plain_run) != configuration_of(naive_run)
    assert "kernels" in differences(plain_run, naive_run) and "kernels" not in unequal_accuracy(plain_run, naive_run)
