"""What a network, another user of the host, and files with many small parts could do: links that are laid where a run
will lie, locks and names that others hold first, counts beyond what a run has."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportReturnType=false

from __future__ import annotations

import copy
import grp
import io
import json
import os
import pickle
import pwd
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wandb
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch_geometric.data import Data

import gnnpar
from checkpoints import train
from conftest import environment
from gnnpar import compilers, durable
from gnnpar.cli.main import run
from gnnpar.comm.interfaces import MeetingError
from gnnpar.config.application import without_folders
from gnnpar.config.compose import compose, refuse_led_away
from gnnpar.config.jobs import Manifest, state_of
from gnnpar.config.replay import resumed
from gnnpar.config.study import read_study
from gnnpar.data import files
from gnnpar.data.array_pickle import load_arrays
from gnnpar.data.saved import PT
from gnnpar.durable import WriteError, read_json
from gnnpar.folder_lock import FILE, working_in
from gnnpar.launch import token
from gnnpar.launch.cpu_shares import missing
from gnnpar.launch.environment import check_rank, restarts_allowed, unpickles
from gnnpar.launch.launch import world_of
from gnnpar.launch.rendezvous import Member, _own_end, _Table, rendezvous
from gnnpar.parallel.sequential.cuts import _Layout
from gnnpar.parallel.sequential.paging import file_system
from gnnpar.report.runs import collect
from gnnpar.saved_tensors import load_saved
from gnnpar.scratch import scratch_folder
from gnnpar.settings import ConfigError
from gnnpar.track.wandb import load as load_wandb
from gnnpar.track.wandb import refuse_settings_of
from gnnpar.training.result.record import RunRecord
from gnnpar.training.result.result import fault, schema_path, valid_result
from gnnpar.training.result.started import note_start, restarts_before

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    assert train(folder, "strategy=single", "epochs=1").exit_code == 0
    return read_json(folder / "result.json")


# --- what a network, or a rank, sends


def test_a_record_beyond_any_record_is_not_read() -> None:
    """Small lists take thirty times their bytes: each rank was filled by what one stranger had put down."""
    store = HashStore()
    me = Member(rank=1, host="h", interface="lo", address="127.0.0.1", port=1)
    table = _Table(
        store, me, 2, "here", 1.0, agent=False, refuses=False, secret=lambda *_: b"s", given=True, begun_as={}
    )
    store.set("gnnpar/0/trouble", json.dumps({"line": "x", "more": [[]] * 10}))
    assert table._plain("trouble") is not None
    store.set("gnnpar/0/trouble", json.dumps({"line": "x", "more": [[]] * 100_000}))
    assert table._plain("trouble") is None


def test_rows_that_rise_only_where_differences_wrap_are_other_edges() -> None:
    most = 2**31 - 1
    layout = _Layout(num_rows=4, num_columns=3, num_edges=2, edge_ids=False)
    indptr = torch.tensor([0, most, -5, -2, 2], dtype=torch.int32)
    assert int(indptr.diff().min()) > 0
    sent = torch.cat([indptr, torch.zeros(2, dtype=torch.int32)]).view(torch.uint8)
    with pytest.raises(ValueError, match="rank 1 has sent other edges than its partition has"):
        layout.unpack(sent, 1)


def test_torchrun_that_made_up_its_id_meets_by_c10d() -> None:
    assert unpickles({"TORCHELASTIC_RUN_ID": "2f9a7d9e-3f52-4d0c-8f0a-8a4b1d7f2f10"})
    for told in ("none", "reddit", "", "2F9A7D9E3F524D0C8F0A8A4B1D7F2F10"):
        assert not unpickles({"TORCHELASTIC_RUN_ID": told})
    assert not unpickles({})


# --- results of runs


@pytest.mark.parametrize("place", ["metric", "epoch_seconds", "memory_bytes", "bytes_per_epoch", "seed"])
def test_a_result_that_is_none_by_its_schema_is_none_of_a_job(
    tmp_path: Path, result: dict[str, Any], place: str
) -> None:
    """A study, and a sweep that optuna steers, took its figures as they were."""
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert valid_result(tmp_path) == result and state_of(tmp_path)[0] == "done"
    (tmp_path / "result.json").write_text(json.dumps(result | {place: "a text"}))
    assert valid_result(tmp_path) is None and state_of(tmp_path)[0] == "missing"


def test_a_result_has_no_more_layers_and_ranks_than_there_can_be(tmp_path: Path, result: dict[str, Any]) -> None:
    """Each layer of a result became a line of the page: 6 MB of zeros took minutes and 4 GB."""
    for name in ("bytes_by_layer", "cpu_seconds"):
        many = copy.deepcopy(result) | {name: [0.0] * 1_000_000}
        began = time.process_time()
        assert fault(many).startswith(f"{name}: ")
        assert time.process_time() - began < 2
    (tmp_path / "result.json").write_text(json.dumps(result | {"bytes_by_layer": [0.0] * 20_000}))
    with pytest.raises(ConfigError, match="bytes_by_layer"):
        collect([tmp_path])


def test_lists_of_a_result_say_how_long_they_are_before_what_they_hold() -> None:
    """jsonschema asks in this order, and an item takes it twelve microseconds."""

    def lists(node: object) -> list[dict[str, Any]]:
        if isinstance(node, dict):
            return [node] * ("items" in node) + [each for child in node.values() for each in lists(child)]
        return [each for child in node for each in lists(child)] if isinstance(node, list) else []

    found = lists(read_json(schema_path()))
    assert len(found) > 8
    for each in found:
        assert list(each).index("maxItems") < list(each).index("items"), each


@pytest.mark.parametrize("second", ["0", "0/.", "./0", "0//"])
def test_jobs_of_a_sweep_share_no_folder(tmp_path: Path, second: str) -> None:
    jobs = [{"key": key, "folder": folder, "overrides": []} for key, folder in (("a", "0"), ("b", second))]
    (tmp_path / "sweep.json").write_text(json.dumps({"schema": 1, "argv": [], "jobs": jobs}))
    with pytest.raises(ConfigError, match="several jobs have the folder 0"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("text", ["{f}\n{f}", "base: [seed=1]\nbase: []\n{f}", "factors: {{a: [seed=1], a: [seed=2]}}"])
def test_a_study_says_nothing_twice(tmp_path: Path, text: str) -> None:
    """Of equal keys the last counted, and a factor was not run."""
    (tmp_path / "s.yaml").write_text(text.format(f="factors: {a: [codec=bf16]}"))
    with pytest.raises(ConfigError, match=r"it has \w+ twice; of the same keys only one would count"):
        read_study(tmp_path / "s.yaml")


def test_objects_of_a_pickle_are_as_many_as_a_graph_has(tmp_path: Path) -> None:
    """Two megabytes of empty objects took a gigabyte, and a minute."""
    torch.save([[] for _ in range(600_000)], tmp_path / "many.pt")
    began = time.process_time()
    with pytest.raises(ValueError, match="it makes its objects in more than 1,000,000 steps; keep numbers in tensors"):
        load_saved(tmp_path / "many.pt")
    assert time.process_time() - began < 30
    with pytest.raises(ValueError, match="in more than 4,000,000 steps"):
        load_arrays(io.BytesIO(pickle.dumps([(i % 7, 0) for i in range(1_500_000)], protocol=2)))


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("edge_type", torch.zeros(2, dtype=torch.uint32), "edge_type is torch.uint32; give whole numbers"),
        ("edge_type", torch.full((2,), torch.inf), "edge_type is torch.float32; give whole numbers"),
        ("y", torch.zeros(4, 0), r"labels are \[4, 0\], without a class|must have shape"),
    ],
)
def test_what_a_saved_graph_cannot_have_is_one_line(tmp_path: Path, field: str, value: torch.Tensor, line: str) -> None:
    fields = {"x": torch.ones(4, 2), "y": torch.tensor([0, 1, 0, 1]), "edge_index": torch.tensor([[0, 1], [1, 2]])}
    torch.save(Data(**(fields | {field: value})), tmp_path / "g.pt")
    task = "multi_label" if field == "y" else "auto"
    with pytest.raises(ValueError, match=line):
        PT(name="g", path=str(tmp_path / "g.pt"), task=task).load(None, seed=0)


# --- places of a host that others write to


def led_away(parent: str, target: Path) -> None:
    """Whatever day it becomes, its folder is a link."""
    Path(parent).mkdir()
    for day in (0, 86_400):
        (Path(parent) / time.strftime("%Y-%m-%d", time.localtime(time.time() + day))).symlink_to(target)


def test_a_sweep_writes_nothing_through_a_linked_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs").mkdir()
    led_away("multirun", tmp_path / "theirs")
    assert run("train", ["-m", "debug=tiny", "strategy=single", "seed=0,1"]) == 2
    assert "cannot be written: it is a symbolic link to" in capsys.readouterr().err
    assert not [each for each in (tmp_path / "theirs").rglob("*") if each.is_file()]


def test_runs_of_python_lie_behind_no_linked_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs").mkdir()
    for parent in ("outputs", "multirun"):
        led_away(parent, tmp_path / "theirs")
    for call in (gnnpar.train, gnnpar.sweep, gnnpar.distribute):
        with pytest.raises(WriteError, match="cannot be written: it is a symbolic link to"):
            call("gcn", "sbm", strategy="single")
    assert not list((tmp_path / "theirs").iterdir())


def test_runs_go_to_no_account_that_the_working_directory_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a study may not say whose they are."""
    monkeypatch.delenv("WANDB_ENTITY", raising=False)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nentity = them\nproject = p\n")
    with pytest.raises(ValueError, match="settings sets entity, and decides who gets your runs; put it into"):
        refuse_settings_of(tmp_path, entity=None)
    refuse_settings_of(tmp_path, entity="me")
    monkeypatch.setenv("WANDB_ENTITY", "me")
    refuse_settings_of(tmp_path, entity=None)


def test_of_two_files_of_a_dataset_none_is_taken_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("data/d", "d"):
        Path(folder).mkdir(parents=True)
        np.savez(f"{folder}/d.npz", x=np.zeros(1))
    with pytest.raises(ValueError, match=r"dataset d: there are two files d/d\.npz, .* and .*; say by dataset\.path"):
        files.find_file("d", "d/d.npz", Path("data"), example="")
    whole = str((tmp_path / "data/d/d.npz").absolute())
    assert files.find_file("d", whole, Path("data"), example="") == Path(whole)
    assert files.find_file("d", "d/d.npz", Path(), example="") == Path("d/d.npz")
    Path("d/d.npz").unlink()
    assert files.find_file("d", "d/d.npz", Path("data"), example="") == Path("data/d/d.npz")


def test_nobody_else_may_lock_what_a_run_has_locked(tmp_path: Path) -> None:
    with working_in(tmp_path, otherwise="", say=print):
        assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_user_without_a_home_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    monkeypatch.setattr(Path, "expanduser", lambda path: none())
    for name in ("XDG_CACHE_HOME", "GNNPAR_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    compilers.keep_torch_apart()
    assert "gnnpar-scratch-" in os.environ["TORCHINDUCTOR_CACHE_DIR"], "a new folder, gone afterwards"
    with pytest.raises(ValueError, match="this user has no home folder; set HOME, XDG_CACHE_HOME or GNNPAR_CACHE"):
        files.cache_root()


def test_the_compiler_of_torch_keeps_no_files_where_others_may_have_been_first(tmp_path: Path) -> None:
    """Of Python's entry points, and of what an export leaves; its folder in /tmp has a foreseeable name."""
    told = "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    env = {name: value for name, value in environment().items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    script = (ROOT / "src/gnnpar/templates/export/predict.txt").read_text().partition("\nFOLDER")[0]
    for code in ("import gnnpar; gnnpar.train; " + told, script + "\n" + told):
        (tmp_path / "it.py").write_text(code)
        done = subprocess.run(
            [sys.executable, "it.py"],
            cwd=tmp_path,
            env=env | {"TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith(str(tmp_path)) and "torchinductor_" not in done.stdout


@pytest.mark.parametrize("named", ["/opt/lib:", ":/opt/lib", "/opt/lib::/opt", ":"])
def test_an_empty_part_of_a_path_brings_no_module(tmp_path: Path, named: str) -> None:
    """Python puts the working directory there, before its own library; what it imports before gnnpar is imported."""
    for name in ("yaml", "hydra", "torch", "rich"):
        (tmp_path / f"{name}.py").write_text("open('RAN', 'w').close()\n")
    command = [sys.executable, "-P", "-m", "gnnpar", "train", "debug=tiny", "strategy=graph_parallel", "world_size=2"]
    env = environment() | {"PYTHONPATH": named}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "RAN").exists()


def test_results_that_are_unpickled_lie_where_nobody_else_puts_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who owned `multirun` put a folder of his in the place of a sweep's while it ran."""
    inside = tmp_path / "multirun" / "day" / "time"
    inside.mkdir(parents=True)
    durable.refuse_others(inside)
    inside.parent.chmod(0o777)
    with pytest.raises(WriteError, match=r"day cannot be written: others may rename .*; chmod \+t, or go-w"):
        durable.refuse_others(inside)
    inside.parent.chmod(0o1777)
    durable.refuse_others(inside)
    inside.parent.chmod(0o2775)
    monkeypatch.setattr(durable, "_is_private", lambda group: False)
    with pytest.raises(WriteError, match="day cannot be written: others may rename"):
        durable.refuse_others(inside)


def test_links_in_the_middle_of_a_chain_are_looked_at(tmp_path: Path) -> None:
    """mine -> theirs -> mine again: neither the path nor where it ends shows the one between."""
    places = [tmp_path / name for name in ("first", "second", "end")]
    places[2].mkdir()
    places[1].symlink_to("end")
    places[0].symlink_to(places[1])
    walked = list(durable._places_on_the_way(places[0] / ".." / "end"))
    assert walked[0] == Path("/") and all(place in walked for place in places)
    assert walked[-1] == places[2]
    durable.refuse_others(places[0])
    places[2].rmdir()
    places[2].symlink_to(places[0])
    with pytest.raises(WriteError, match="lead in a circle"):
        durable.refuse_others(places[0])


def test_a_group_is_private_by_its_name_and_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of members leaves out those whose primary group it is: `users` of a cluster looked private."""

    def private(name: str, *members: str, gid: int = 500, mine: int = 500, also: int = 501) -> bool:
        me, other = (pwd.struct_passwd((n, "x", 7, g, "", "", "")) for n, g in (("me", mine), ("other", also)))
        monkeypatch.setattr(durable.pwd, "getpwuid", lambda uid: me)
        monkeypatch.setattr(durable.pwd, "getpwall", lambda: [me, other])
        monkeypatch.setattr(durable.grp, "getgrgid", lambda gid: grp.struct_group((name, "x", gid, list(members))))
        return durable._is_private(gid)

    assert private("me") and private("me", "me") and private("root", gid=0)
    assert not private("users"), "whose members a directory need not list"
    assert not private("me", "other") and not private("me", also=500) and not private("me", mine=501)
    assert not private("root", "other", gid=0)
    folder = tmp_path / "listed"
    folder.mkdir(mode=0o770)
    folder.chmod(0o770)
    monkeypatch.setattr(durable, "_is_private", lambda group: True)
    durable.refuse_others(folder)
    monkeypatch.setattr(durable.os, "listxattr", lambda place: ["system.posix_acl_access"])
    with pytest.raises(WriteError, match="listed cannot be written: others may rename"):
        durable.refuse_others(folder)


def test_nobody_is_trusted_where_users_are_not_all_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, root of the host is shown as nobody; elsewhere nobody is whoever runs as nobody."""
    read, shown = Path.read_text, {"/proc/self/uid_map": "0 0 4294967295\n", "/proc/sys/kernel/overflowuid": "65534\n"}
    monkeypatch.setattr(Path, "read_text", lambda self, **k: shown.get(str(self)) or read(self, **k))
    assert durable._overflow_uid() == set()
    for mapped in ("0 1000 1\n", "0 1000 1\n1 100000 65536\n", "0 0 65536\n"):
        shown["/proc/self/uid_map"] = mapped
        assert durable._overflow_uid() == {65534}


def test_a_sweep_that_lost_its_jobs_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.json has lost jobs of this sweep: another program writes there"):
        Manifest(tmp_path).states(["a"])


@pytest.mark.parametrize("override", ["resume=/home/me/private", "++resume=other/run", "resume=auto,/home/me/private"])
def test_a_sweep_goes_on_from_no_run_that_its_file_names(tmp_path: Path, override: str) -> None:
    """Its weights and rows would be left in the folder of the sweep, which may be somebody else's."""
    jobs = [{"key": "k", "folder": "0", "overrides": ["seed=0"]}]
    for argv in (["resume=auto"], [override]):
        (tmp_path / "sweep.json").write_text(json.dumps({"schema": 1, "argv": argv, "jobs": jobs}))
        if argv == ["resume=auto"]:
            resumed(["--resume", str(tmp_path)])
        else:
            with pytest.raises(ConfigError, match="type it again beside --resume"):
                resumed(["--resume", str(tmp_path)])


@pytest.mark.parametrize("key", ["+codec@_global_.hydra.job.env_set", "codec@x_global_.hydra", "+codec@hydra.run"])
def test_a_study_puts_no_yaml_into_hydra(tmp_path: Path, key: str) -> None:
    """Hydra reads a package from its last `_global_` on."""
    (tmp_path / "s.yaml").write_text(f"factors: {{a: ['{key}=uniform']}}")
    with pytest.raises(ConfigError, match="may run code of its own"):
        read_study(tmp_path / "s.yaml")


def test_a_mount_whose_name_is_no_text_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users may mount file systems of their own, by any name."""
    read = Path.read_bytes
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda self, encoding=None, errors="strict": (
            b"tmpfs /\xff tmpfs rw 0 0\next4 / ext4 rw 0 0\n" if str(self).endswith("mounts") else read(self)
        ).decode(encoding or "utf-8", errors),
    )
    assert file_system(tmp_path) == "ext4"
    missing()


@pytest.fixture
def silent() -> Iterator[tuple[int, list[bytes]]]:
    """A port whose listener takes connections and gives each the first of these answers to whatever it asks."""
    answers = [b""]
    server = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                kept.append(server.accept()[0])
                kept[-1].sendall(answers[0])

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1], answers
    server.close()
    for each in kept:
        each.close()


@pytest.mark.parametrize("answer", [b"", b"\xff" * 64, b"HTTP/1.0 200 OK\r\n\r\n" * 9])
def test_what_listens_in_the_place_of_rank_0_holds_nobody(
    silent: tuple[int, list[bytes]], answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's client waits for an answer for ever, and takes a length of 2^60 at its word."""
    port, answers = silent
    answers[0] = answer
    monkeypatch.setattr("gnnpar.launch.rendezvous._MORE_SECONDS", 1.0)
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    began = time.monotonic()
    with pytest.raises(MeetingError, match=r"rank 1 on .*(does not answer as rank 0 would|does not reach|is gone)"):
        rendezvous(env | {"GNNPAR_TOKEN": "x" * 32}, about={}, patience=1.0)
    assert time.monotonic() - began < 20


@pytest.fixture
def link_of_others(tmp_path: Path) -> Path:
    """To a folder of this user's, which its owner may let lead elsewhere while a run lasts."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "outputs").symlink_to(tmp_path / "mine")
    try:
        os.lchown(tmp_path / "outputs", 54_321, 54_321)
    except PermissionError:
        pytest.skip("only root gives a link to another user")
    return tmp_path / "outputs"


def test_runs_lie_behind_no_link_of_another_user(
    link_of_others: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(link_of_others.parent)
    with pytest.raises(WriteError, match="outputs cannot be written: it is a symbolic link of another user"):
        refuse_led_away(Path("outputs/day/time"), [])
    with pytest.raises(WriteError, match="outputs cannot be written: it is a symbolic link of another user"):
        gnnpar.train("gcn", "sbm", strategy="single")
    with pytest.raises(WriteError, match="outputs cannot be written: it belongs to another user"):
        durable.refuse_others(Path("outputs"))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")  # ranks of torchrun get a folder that looks typed
    with pytest.raises(WriteError, match="outputs cannot be written: it is a symbolic link of another user"):
        without_folders(["debug=tiny"], rank=0)
    link_of_others.rename("multirun")
    Path("study.yaml").write_text("base: [debug=tiny]\nfactors: {lr: [optim.lr=0.1]}\n")
    for command, argv in (("ablate", ["study.yaml"]), ("train", ["-m", "debug=tiny", "seed=1,2"])):
        assert run(command, argv) == 2
        assert "multirun cannot be written: it is a symbolic link of another user" in capsys.readouterr().err
    assert not list((link_of_others.parent / "mine").iterdir())


def test_a_folder_of_a_cache_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyG opened a file in it by its name, and unpickled it."""
    (tmp_path / "processed").mkdir()

    def unlisted(folder: Path, *, onerror: Callable[[OSError], None]) -> list[tuple[str, list[str], list[str]]]:
        onerror(PermissionError(13, "Permission denied", str(folder / "processed")))
        return []

    monkeypatch.setattr(os, "walk", unlisted)
    with pytest.raises(ValueError, match=r"processed cannot be listed \(Permission denied\)"):
        files.plain_files(tmp_path)


# --- what torchrun's store, in which anybody writes, decides


def test_hosts_of_torchrun_have_ranks() -> None:
    """A stranger's words in its store made one host train alone, and say that all was done."""
    env = {"RANK": "0", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for size, here in ((1, 1), (2, 2), (4, 4)):
        with pytest.raises(ConfigError, match=f"WORLD_SIZE={size}, but torchrun has 2 hosts and {here} ranks on this"):
            check_rank(env | {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(here)})
    check_rank(env | {"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "4"})
    check_rank(env | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"})


def test_a_run_goes_on_from_no_run_of_another_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the count in torchrun's store, a stranger made a new run report the results of the one in its folder."""
    settings, agents = {"optim.lr": "0.01", "seed": "1"}, ["a 7 1000", "b 8 2000"]
    assert restarts_before(tmp_path, settings, agents) is None, "of a start that was not noted"
    note_start(tmp_path, settings, agents)
    assert restarts_before(tmp_path, settings, agents) == 0
    assert restarts_before(tmp_path, settings, agents[::-1]) == 0, "rank 0 may be on another host then"
    assert restarts_before(tmp_path, settings | {"seed": "7"}, agents) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")  # says nothing: an id may be given again
    assert restarts_before(tmp_path, settings, ["a 9 3000", "b 10 4000"]) is None
    (tmp_path / ".started").write_text('{"by": ["job-7"]}')  # of before
    assert restarts_before(tmp_path, settings, agents) is None


def test_restarts_are_counted_by_what_the_start_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by torchrun's store, where a stranger made a run that was started again begin anew."""
    settings = compose(["dataset=sbm", "dataset.num_nodes=60"])

    def started(agents: list[str]) -> int:
        record = RunRecord(settings, replace(world_of(settings), how="joined"), tmp_path)
        record.before_start(agents, restartable=restarts_allowed(os.environ))
        return record.header["restarts"]

    def completed() -> None:
        RunRecord(settings, world_of(settings), tmp_path)._write("completed", "")

    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    (saved := tmp_path / "checkpoint" / "epoch-000001").mkdir(parents=True)
    assert started(["a 7 1000", "b 8 2000"]) == 0
    saved.mkdir(parents=True, exist_ok=True)
    assert [started(["b 8 2000", "a 7 1000"]), started(["b 8 2000", "c 9 3000"]), started(["c 9 3000"])] == [1, 2, 3]
    assert saved.exists()
    assert started(["d 10 4000"]) == 0
    assert not saved.exists(), "another start's"
    completed()
    assert started(["d 10 4000"]) == 0, "two runs of one process"
    completed()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert started(["d 10 4000"]) == 1
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS")
    assert started(["d 10 4000"]) == 0


@pytest.mark.parametrize("master", ["00", "0.0", "0x0", "::0.0.0.0", "0:0:0:0:0:0:0:0"])
def test_all_interfaces_by_another_spelling_are_refused(master: str) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": master, "MASTER_PORT": "29511"}
    with pytest.raises(MeetingError, match="stands for all interfaces"):
        rendezvous(env | {"GNNPAR_TOKEN": "x" * 32}, about={}, patience=1.0)


def test_ranks_on_one_host_keep_gloo_there() -> None:
    """It takes the interface of the host's name otherwise, which others reach."""
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    _own_end(env, "127.0.0.1", 29_512, several=False)
    assert env["GLOO_SOCKET_IFNAME"] == "lo"


def test_wandb_that_listens_at_a_port_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a folder for its socket wandb's process takes a port, and sends the API key to any user who connects."""
    ended: list[str] = []
    monkeypatch.setattr(wandb, "setup", lambda settings: monkeypatch.setenv("WANDB_SERVICE", "3-1-tcp-localhost-4000"))
    monkeypatch.setattr(wandb, "teardown", lambda: ended.append("it"))
    with pytest.raises(ValueError, match="it has no folder for its socket, and listens at a port for all users"):
        load_wandb(entity=None)
    assert set(ended) == {"it"}


def test_rank_0_answers_with_its_own_secret(tmp_path: Path) -> None:
    """And not with what lies by then in the file that it has left."""
    file = tmp_path / ".meeting"
    token.leave(file)
    mine = file.read_bytes()
    file.write_bytes(b"a" * 64)
    copy = token.answer(file, "0" * 16, mine)
    assert token.secret_of({}, str(copy), "0" * 16) == mine


def test_a_scratch_folder_is_removed_and_no_other_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis").touch()
    with scratch_folder() as scratch:
        scratch.rename(tmp_path / "away")
        (tmp_path / "results").rename(scratch)
    assert (scratch / "thesis").exists()
    with scratch_folder() as scratch:
        assert scratch.is_dir() and scratch.parent == tmp_path
    assert not scratch.exists()


def test_a_scratch_folder_lies_where_others_cannot_rename_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "all").chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "all"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    with scratch_folder() as scratch:
        assert scratch.parent == tmp_path / "own"
