"""tracker=wandb: what is kept offline equals what the run wrote, and an absent server is one line."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import pytest

from conftest import Run
from gnnpar import train
from gnnpar.track import keys
from gnnpar.track import wandb as mirror
from gnnpar.track.console import Lines
from gnnpar.track.jsonl import read_rows


@dataclass(frozen=True)
class OfflineRun:
    """The records of one .wandb file, by type, in order."""

    records: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record[kind] for record in self.records if record["type"] == kind]

    @property
    def run(self) -> dict[str, Any]:
        (record,) = self.of("run")
        return record

    @property
    def config(self) -> dict[str, Any]:
        return self.run["config"]["update"]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """History of the epochs, without what wandb and the tables of epoch 0 add."""
        items = [record["item"] for record in self.of("history") if "epoch" in record["item"]]
        return [{k: v for k, v in item.items() if not k.startswith(("_", "tables/"))} for item in items]

    @property
    def summary(self) -> dict[str, Any]:
        """The last value of everything, nested names joined by dots."""
        merged: dict[str, Any] = {}
        for record in self.of("summary"):
            merged |= record["update"]
        return merged

    @property
    def step_metrics(self) -> dict[str, str]:
        return {m["name"]: m["step_metric"] for m in self.of("metric") if "step_metric" in m}

    def artifact(self, kind: str) -> bytes:
        """The content of the one file of the one artifact of a type."""
        (found,) = (record for record in self.of("artifact") if record["type"] == kind)
        (entry,) = found["manifest"]["contents"]
        return Path(entry["local_path"]).read_bytes()

    def tables(self) -> dict[str, Any]:
        """Name -> the table, of what was logged as one."""
        contents = [
            entry
            for record in self.of("artifact")
            if record["type"] == "run_table"
            for entry in record["manifest"]["contents"]
        ]
        return {
            entry["path"].removesuffix(".table.json"): json.loads(Path(entry["local_path"]).read_text())
            for entry in contents
        }


def read_run(folder: Path) -> OfflineRun:
    """The one offline run under a run folder."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return OfflineRun([json.loads(line) for line in done.stdout.splitlines()])


BUCKET = {
    "id": "b",
    "name": "run",
    "displayName": "run",
    "description": None,
    "config": None,
    "sweepName": None,
    "historyLineCount": 0,
    "project": {"id": "p", "name": "gnnpar", "entity": {"id": "e", "name": "me"}},
}
ANSWERS = {
    "Viewer": {"viewer": {"id": "1", "entity": "me", "username": "me", "email": "", "flags": "{}"}},
    "UpsertBucket": {"upsertBucket": {"bucket": BUCKET, "inserted": True}},
    "ServerFeaturesQuery": {"serverInfo": {"features": []}},
}


class Server:
    """`history`: the rows received. `exit_codes`: how runs ended. `hang`: set it, and nothing is answered any more."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.exit_codes: list[int] = []
        self.hang, self.over = threading.Event(), threading.Event()
        self.url = ""

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("file_stream"):
            sent = json.loads(body)
            lines = sent.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.history += map(json.loads, lines)
            self.exit_codes += [sent["exitcode"]] if sent.get("complete") else []
            return {}
        if not path.startswith("/graphql"):
            return {}
        operation = re.search(r"(?:query|mutation)\s+(\w+)", json.loads(body)["query"])
        data = ANSWERS.get(operation[1]) if operation else None
        return {"data": data} if data else {"data": None, "errors": [{"message": "not here"}]}


@contextmanager
def serve() -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if server.hang.is_set():
                server.over.wait()
                return
            data = json.dumps(server.answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        listener.daemon_threads, listener.block_on_close = True, False
        server.url = f"http://127.0.0.1:{listener.server_port}"
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.over.set()
            listener.shutdown()


TINY = ("dataset.num_nodes=400", "dataset.avg_degree=8", "threads_per_rank=1", "hydra.run.dir=run")
OFFLINE = ("tracker=wandb", "tracker.mode=offline")
KEY = "0123456789abcdef" * 2 + "feedbeef"


@pytest.fixture
def gnnpar(run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`gnnpar` that knows nobody's wandb account and keeps wandb's files in the test's folder."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    return run_cli


def online(url: str) -> dict[str, str]:
    return {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY}


def load(folder: Path, name: str = "result.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def test_an_offline_run_is_the_run(gnnpar: Run, tmp_path: Path) -> None:
    job = ("model=gat", "world_size=2", "epochs=9", "eval_every=4", "fidelity_every=4", "trace=true", *TINY)
    done = gnnpar("train", *job, *OFFLINE, "tracker.tags=[mine]", "tracker.group=study", WANDB_API_KEY=KEY)
    assert (done.returncode, done.stderr) == (0, "")
    assert KEY not in done.stdout
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) > 5
    assert [file for file in written if KEY.encode() in file.read_bytes()] == []
    kept, result, plan = read_run(tmp_path / "run"), load(tmp_path / "run"), load(tmp_path / "run", "plan.json")
    assert "wandb: kept offline; upload with: wandb sync run/wandb/offline-run-" in done.stdout

    rows = read_rows(tmp_path / "run")
    assert kept.epochs == [mirror.flat(row) | mirror.curves_over_cost(row) for row in rows]
    assert kept.epochs[3]["against_gigabytes/metric/val"] == rows[3]["metric/val"]
    assert kept.epochs[3][mirror.GIGABYTES] * 1e9 == pytest.approx(rows[3]["comm/total_bytes_so_far"])
    memory = {"memory/peak_bytes/rank_0", "memory/peak_bytes/rank_1", "memory/live_bytes/parameters"}
    assert memory <= set(kept.epochs[5])
    probed = [kept.epochs[4][f"fidelity/layers/layers_1/{name}"] for name in ("cosine", "relative_error")]
    assert probed == rows[4]["fidelity/layers"]["layers.1"]
    axes = kept.step_metrics
    assert (axes["loss/train"], axes["against_seconds/loss/train"]) == ("epoch", "time/train_seconds")
    assert axes["against_gigabytes/loss/train"] == mirror.GIGABYTES

    assert (kept.run["run_group"], kept.run["job_type"], kept.run["project"]) == ("study", "graph_parallel", "gnnpar")
    assert {"mine", "gat", "sbm", "2 ranks", "exact", "measured"} <= set(kept.run["tags"])
    assert kept.config["strategy"]["name"] == "graph_parallel"
    assert kept.config["optim"]["lr"] == result["settings"]["optim"]["lr"]
    assert (kept.config["epochs"], kept.config["run"]["commit"]) == (9, result["commit"])
    assert kept.config["plan"]["statistics"] == plan["statistics"]
    assert kept.config["plan"]["hashes"]["partition"] == result["hashes"]["partition"]

    summary = kept.summary
    assert summary["result"] == {name: value for name, value in result.items() if name != "settings"}
    assert (summary["status"], kept.of("exit")[-1]["exit_code"]) == ("completed", 0)

    link = load(tmp_path / "run", "wandb.json")
    assert (link["id"], link["group"], link["mode"]) == (kept.run["run_id"], "study", "offline")
    assert (tmp_path / "run" / link["path"] / f"run-{link['id']}.wandb").exists()
    assert kept.artifact("plan") == (tmp_path / "run" / "plan.json").read_bytes()
    assert kept.artifact("result") == (tmp_path / "run" / "result.json").read_bytes()
    assert kept.artifact("trace") == (tmp_path / "run" / "trace.json").read_bytes()
    tables = kept.tables()
    assert [row[1] for row in tables["tables/partition"]["data"]] == plan["statistics"]["nodes"]
    assert {row[0]: row[1] for row in tables["tables/units"]["data"]}.items() >= {
        k: v.unit for k, v in keys.KEYS.items()
    }.items()
    bars = dict(tables["charts/seconds_per_epoch_table"]["data"])
    assert bars == pytest.approx({k: v for k, v in result["breakdown_seconds"].items() if k != "comm_total"})
    assert dict(tables["charts/bytes_per_epoch_table"]["data"])["forward"] == result["bytes_per_epoch"]["forward"]


@pytest.mark.slow  # processes that start: 15 s
def test_a_sweep_is_a_run_a_job_in_one_group_also_where_jobs_fail(gnnpar: Run, tmp_path: Path) -> None:
    swept = ("strategy=single,graph_parallel", "optim.lr=0.01,1e18", "hydra.sweep.dir=multirun/monday/noon")
    done = gnnpar("train", "-m", *swept, "comm=threads", "epochs=8", *OFFLINE, *TINY[:3])
    assert done.returncode == 1
    folders = [tmp_path / "multirun/monday/noon" / str(job) for job in range(4)]
    kept, results = [read_run(folder) for folder in folders], [load(folder) for folder in folders]
    assert {run.run["run_group"] for run in kept} == {"monday/noon"}
    assert [run.run["job_type"] for run in kept] == ["single", "single", "graph_parallel", "graph_parallel"]
    assert [run.config["optim"]["lr"] for run in kept] == [0.01, 1e18, 0.01, 1e18]
    assert len({run.run["run_id"] for run in kept}) == 4
    assert [run.of("exit")[-1]["exit_code"] for run in kept] == [0, 1, 0, 1]
    for run, folder, result in zip(kept, folders, results, strict=True):
        assert len(run.epochs) == len(read_rows(folder)) == result["epochs_done"]
        assert json.loads(run.artifact("result")) | {"load": None} == result | {"load": None}
        assert (run.summary["status"], run.summary["error"]) == (result["status"], result["error"])
    assert "the loss is" in kept[3].summary["error"]


@pytest.mark.slow
def test_an_online_run_arrives(gnnpar: Run, tmp_path: Path) -> None:
    with serve() as server:
        done = gnnpar("train", "strategy=single", "epochs=4", *TINY, "tracker=wandb", **online(server.url))
    assert (done.returncode, done.stderr) == (0, "")
    assert "wandb sync" not in done.stdout
    received = [row for row in server.history if "epoch" in row]
    for row, expected in zip(received, read_rows(tmp_path / "run"), strict=True):
        assert row.items() >= {k: v for k, v in expected.items() if not isinstance(v, (list, dict))}.items()
    assert server.exit_codes == [0]


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_server_that_stops_answering_is_waited_for_at_the_end_and_briefly(gnnpar: Run, tmp_path: Path) -> None:
    with serve() as server:
        threading.Thread(target=hang_after_first_epochs, args=(server, tmp_path / "run" / "metrics.jsonl")).start()
        job = ("strategy=single", "epochs=400", *TINY, "tracker=wandb", "tracker.upload_seconds=4")
        done = gnnpar("train", *job, **online(server.url))
        ended = time.time()
    assert done.returncode == 0
    assert server.hang.is_set()
    (line,) = done.stderr.splitlines()
    assert line.startswith("gnnpar: wandb stopped (")
    assert "upload what wandb has with: wandb sync run/wandb/run-" in line
    assert load(tmp_path / "run")["epochs_done"] == 400
    assert ended - (tmp_path / "run" / "result.json").stat().st_mtime < 15


def hang_after_first_epochs(server: Server, metrics: Path) -> None:
    for _ in range(1200):
        if metrics.exists() and metrics.stat().st_size > 4000:
            break
        time.sleep(0.05)
    server.hang.set()


@pytest.mark.fault
def test_a_server_that_never_answers_is_one_line_and_an_offline_run(gnnpar: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        job = (
            "tracker=wandb",
            "tracker.mode=online",
            "tracker.connect_seconds=1",
            "strategy=single",
            "epochs=5",
            *TINY,
        )
        done = gnnpar("train", *job, **online(f"http://127.0.0.1:{silent.getsockname()[1]}"))
    ended = time.time()
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("gnnpar: wandb cannot be reached (Timed out")
    assert line.endswith("; this run is kept offline")
    folder, path = tmp_path / "run", done.stdout.partition("wandb sync ")[2].split()[0]
    assert list((tmp_path / path).glob("run-*.wandb"))
    assert not list((folder / "wandb").glob("run-*"))  # nothing is left of the attempt
    kept = read_run(folder)
    assert kept.epochs == [mirror.flat(row) | mirror.curves_over_cost(row) for row in read_rows(folder)]
    assert load(folder)["status"] == "completed"
    assert (tmp_path / path).stat().st_mtime - (folder / "plan.json").stat().st_mtime < 20
    assert ended - (folder / "result.json").stat().st_mtime < 10  # 20 s more with wandb's own error reporting


ALONE = """
import json
from pathlib import Path
from gnnpar.track.wandb import Mirror, Wandb
job = json.loads(Path("job.json").read_text())
mirror = Mirror(Wandb(connect_seconds=1), Path("."), job)
mirror.start({"parts": [{"part": 0, "nodes": 3}]})
mirror.log({"epoch": 0, "loss/train": 1.5, "comm/total_bytes_so_far": 10**9})
mirror.close()
"""
JOB = {"strategy": "single", "model": "gcn", "dataset": "sbm", "world_size": 1, "seed": 0, "provenance": "measured"}
JOB |= {"exactness": ["exact"], "study": "", "names": {}, "resolved": {"epochs": 1}}


@pytest.mark.fault
@pytest.mark.parametrize(
    ("env", "why"),
    [
        (online("http://127.0.0.1:9"), "connection refused"),
        ({}, "no API key; set WANDB_API_KEY or call wandb login"),
    ],
)
@pytest.mark.usefixtures("gnnpar")
def test_without_a_server_or_a_key_a_run_is_kept_offline(
    env: dict[str, str], why: str, run_python: Run, tmp_path: Path
) -> None:
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    (tmp_path / "plan.json").write_text("{}")
    done = run_python("-c", ALONE, **env)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("gnnpar: wandb cannot be reached (")
    assert why in line
    kept = read_run(tmp_path)
    assert [row["loss/train"] for row in kept.epochs] == [1.5]
    assert kept.epochs[0][mirror.GIGABYTES] == 1.0
    assert kept.of("exit")[-1]["exit_code"] == 1  # the run did not complete


OPENED = """
import sys
from pathlib import Path
from gnnpar.config.compose import compose
from gnnpar.launch import launch, processes
from gnnpar.training import loop
for mode in ("disabled", "offline", "online"):
    compose(["tracker=wandb", f"tracker.mode={mode}"]).tracker.build(Path("."), 1, {})
print("wandb" in sys.modules)
"""


@pytest.mark.slow
def test_wandb_is_imported_when_a_run_is_opened_and_not_before(run_python: Run) -> None:
    assert run_python("-c", OPENED).stdout.split() == ["False"]


def test_disabled_is_the_terminal_alone(tmp_path: Path) -> None:
    assert isinstance(mirror.Wandb(mode="disabled").build(tmp_path, 1, {}), Lines)


class Broken:
    """A wandb run that fails at the second epoch."""

    offline = False

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.settings: Any = type("Settings", (), {"sync_dir": "somewhere"})

    def log(self, row: dict, **options: Any) -> None:
        if self.rows:
            raise BrokenPipeError("the service is gone\nin two lines")
        self.rows.append(row)


def test_trouble_on_the_way_is_one_line_and_then_silence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tracker, run = mirror.Mirror(mirror.Wandb(), tmp_path, {}), Broken()
    tracker._run = run
    for epoch in range(3):
        tracker.log({"epoch": epoch, "loss/train": 1.0, "comm/total_bytes_so_far": 0})
    tracker.close({"status": "completed"})
    assert [row["epoch"] for row in run.rows] == [0]
    captured = capsys.readouterr()
    assert captured.err == (
        "gnnpar: wandb stopped (the service is gone); metrics.jsonl has everything; "
        "upload what wandb has with: wandb sync somewhere\n"
    )
    assert captured.out == ""


def test_without_a_working_wandb_training_has_no_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def absent() -> NoReturn:
        raise ModuleNotFoundError("No module named 'wandb'")

    monkeypatch.setattr(mirror, "load", absent)
    tracker = mirror.Mirror(mirror.Wandb(mode="offline"), tmp_path, {})
    tracker.start({})
    tracker.log({"epoch": 0})
    tracker.close({"status": "completed"})
    captured = capsys.readouterr()
    assert captured.err == "gnnpar: wandb cannot be used (No module named 'wandb'); metrics.jsonl has everything\n"
    assert captured.out == ""


def test_wandb_that_never_starts_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never = threading.Event()
    monkeypatch.setattr(mirror, "_START_SECONDS", 0.2)
    monkeypatch.setattr(mirror, "load", never.wait)
    assert mirror.open_run(mirror.Wandb(), tmp_path, {}) is None
    assert "wandb cannot be used (no answer within 0.2 s)" in capsys.readouterr().err
    never.set()


@pytest.mark.slow
def test_second_run_of_one_process_has_a_mirror_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        train("gcn", "sbm", strategy="single", epochs=1, tracker="wandb", folder=f"run{number}")
        (kept,) = (tmp_path / f"run{number}" / "wandb").glob("offline-run-*/run-*.wandb")
        deadline = time.monotonic() + 30  # wandb's process writes the file after finish() has returned
        while kept.stat().st_size <= 1000:
            assert time.monotonic() < deadline
            time.sleep(0.05)
