"""What a third attack found: attributes that hide tensors, plugins that nobody installed, structure from the wire."""

import json
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import cast

import pytest
import torch
import yaml

from gnnpar import paths, scratch, targets
from gnnpar.cli import ablate, new
from gnnpar.cli.main import run
from gnnpar.comm import Incoming, RowLike
from gnnpar.comm.exchange import fitting
from gnnpar.config.compose import compose
from gnnpar.config.replay import Replay
from gnnpar.config.study import read_study
from gnnpar.folder_lock import FILE
from gnnpar.folds.block import Block
from gnnpar.launch.forked import Ranks
from gnnpar.parallel.sequential.cuts import _Layout, _pack
from gnnpar.saved_tensors import load_saved
from gnnpar.settings import ConfigError

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """sys.path and modules as they were, afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mine", "evil", "plug"):
            del sys.modules[name]
    invalidate_caches()


def package(folder: Path, name: str, *, touch: Path) -> None:
    """A distribution that brings YAML, and whose import leaves a file."""
    (folder / f"{name}-1.dist-info").mkdir(parents=True)
    (folder / f"{name}-1.dist-info" / "METADATA").write_text(METADATA.format(name=name))
    (folder / f"{name}-1.dist-info" / "entry_points.txt").write_text(f"[gnnpar.conf]\n{name} = {name}.conf\n")
    (folder / name / "conf" / "model").mkdir(parents=True)
    (folder / name / "__init__.py").write_text(f"open({str(touch)!r}, 'w').close()\n")
    (folder / name / "conf" / "__init__.py").write_text("")
    (folder / name / "conf" / "model" / f"{name}.yaml").write_text(f"_target_: {name}.models.Net\n")


def test_a_distribution_of_the_working_directory_is_no_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, importing: None
) -> None:
    package(tmp_path, "evil", touch=tmp_path / "ran")
    (tmp_path / "mine.py").write_text("class Net: ...\n")
    monkeypatch.chdir(tmp_path)
    assert targets.locate("mine.Net")
    assert str(tmp_path) not in sys.path
    assert "evil" not in paths.plugin_packages()
    assert not [folder for folder in paths.installed_confs() if folder.is_relative_to(tmp_path)]
    assert not (tmp_path / "ran").exists()


LOOKING = """
from importlib import import_module

def look(name):
    return import_module(name)
"""


def test_who_looks_for_a_module_in_vain_does_not_find_it_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, importing: None
) -> None:
    """Modules of it import each other, also later; a library that asks for one that may be there does not get it."""
    site, here = tmp_path / "site", tmp_path / "here"
    site.mkdir()
    here.mkdir()
    (site / "evil_library.py").write_text(LOOKING)
    (here / "mine.py").write_text(LOOKING + "import mine_beside\nclass Net: ...\n")
    (here / "mine_beside.py").write_text("")
    (here / "mine_later.py").write_text("import evil_library\n")
    (here / "evil_optional.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    sys.path.append(str(site))
    monkeypatch.chdir(here)
    net = targets.locate("mine.Net")
    mine = sys.modules["mine"]
    assert mine.look("mine_later").evil_library is sys.modules["evil_library"]
    with pytest.raises(ModuleNotFoundError):
        sys.modules["evil_library"].look("evil_optional")
    with pytest.raises(ModuleNotFoundError):
        import_module("evil_optional")
    assert not (tmp_path / "ran").exists()
    del sys.modules["mine"], sys.modules["mine_beside"]
    assert import_module("mine").Net is not net  # by its name it is found again


def test_a_process_that_gnnpar_starts_unpickles_classes_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, importing: None
) -> None:
    (tmp_path / "mine.py").write_text(
        "def body(rank):\n    with open('ran', 'w') as file:\n        file.write(__name__)\n"
    )
    for trap in ("_winapi", "viztracer"):  # for which multiprocessing and joblib look in vain
        (tmp_path / f"{trap}.py").write_text(f"open({str(tmp_path / 'trapped')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    ranks = Ranks(1, cast(Callable[[int], None], targets.locate("mine.body")), fork=False)
    ranks.start()
    ended: dict[int, int] = {}
    while not ended:
        ended = ranks.wait(60)
    ranks.end()
    assert ended == {0: 0}
    assert (tmp_path / "ran").read_text() == "mine"
    assert not (tmp_path / "trapped").exists()


def test_a_file_names_of_a_plugin_what_its_yaml_names(tmp_path: Path, importing: None) -> None:
    package(tmp_path, "plug", touch=tmp_path / "imported")
    (tmp_path / "plug" / "models.py").write_text("class Net: ...\n")
    (tmp_path / "plug" / "danger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Net: ...\n")
    sys.path.append(str(tmp_path))
    invalidate_caches()
    targets.refuse_foreign({"_target_": "plug.models.Net"}, "a file", remedy="no")
    for other in ("plug.danger.Net", "plug.__main__.Net", "plug.models.Other"):
        with pytest.raises(ValueError, match="which is no class of gnnpar or of an installed plugin"):
            targets.refuse_foreign({"_target_": other}, "a file", remedy="no")
    assert not (tmp_path / "ran").exists()


def test_a_sparse_tensor_that_an_attribute_hides_is_found(tmp_path: Path) -> None:
    index = torch.tensor([[0, 1], [0, 10**12]])
    wrong = torch.sparse_coo_tensor(index, torch.ones(2), (2, 2), check_invariants=False)
    hidden: OrderedDict[str, object] = OrderedDict(x=wrong)
    torch.save({"data": hidden}, tmp_path / "plain.pt")
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        load_saved(tmp_path / "plain.pt")
    vars(hidden)["values"] = set
    torch.save({"data": hidden}, tmp_path / "hidden.pt")
    with pytest.raises(ValueError, match="OrderedDict has its own values in the place of a method"):
        load_saved(tmp_path / "hidden.pt")
    del vars(hidden)["values"]
    vars(hidden)["other"] = wrong
    hidden["x"] = torch.ones(1)
    torch.save({"data": hidden}, tmp_path / "beside.pt")
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        load_saved(tmp_path / "beside.pt")


def test_edges_of_a_peer_are_those_of_its_partition() -> None:
    dst, src = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 1, 2])
    block = Block.from_edges(dst, src, num_dst=3, num_src=3, compress=True)
    layout = _Layout(num_rows=3, num_columns=3, num_edges=4, edge_ids=False)
    sent = _pack(block)
    assert torch.equal(layout.unpack(sent.clone(), 1).indices, block.indices)
    for place, number in ((0, 1), (1, 900), (1, -3), (2, 2), (3, 5), (4, -1), (7, 3)):
        bad = sent.clone()
        bad.view(torch.int32)[place] = number
        with pytest.raises(ValueError, match="rank 1 has sent other edges than its partition has"):
            layout.unpack(bad, 1)


def test_rows_that_a_checkpoint_kept_are_as_many_as_are_due() -> None:
    like = RowLike.of([torch.ones(1, 4)])
    rows = {1: (torch.ones(3, 4),)}
    assert fitting(rows, {1: Incoming(3)}, like) == rows
    for other in ({1: (torch.ones(2, 4),)}, {1: (torch.ones(3, 5),)}, {1: ()}, {}):
        with pytest.raises(
            ValueError, match=r"rows of rank 1 that a checkpoint kept are \[.*, and \[\(3, 4\)\] are due"
        ):
            fitting(other, {1: Incoming(3)}, like)


@pytest.mark.parametrize("override", ["codec=bf16", "codec=uniform"])
def test_a_plan_and_a_codec_beside_it_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="the plan sets the strategy; leave one of them out"):
        compose(["plan=plan.json", override])


def test_names_of_a_plan_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"strategy": {"name": "sar"}, "setup": {"names": {"model": {"a": 1}}}}
    for data in ({"strategy": {"name": [1]}}, named):
        Path("plan.json").write_text(json.dumps(data))
        with pytest.raises(ConfigError, match=r"plan=plan\.json cannot be read: TypeError .* is no name"):
            compose(["plan=plan.json"])


@pytest.mark.parametrize(
    "value",
    [
        "!!bool x",
        "!!timestamp x",
        '!!int ""',
        "!!python/name:os.system x",
        "1:" + "0:" * 400 + "0.5",
        "[" * 30,
        "9" * 11_000,
    ],
    ids=str.__len__,
)
def test_a_study_of_odd_values_is_one_line(tmp_path: Path, value: str) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(f"factors: {{codec: [codec=bf16]}}\norder_seed: {value}\n")
    with pytest.raises(ConfigError, match=r"study\.yaml") as refused:
        read_study(file)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("override", ["strategy={host_dir: /x}", "tracker={entity: x}", "checkpoint={dir: /x}"])
def test_files_set_no_several_keys_at_once(tmp_path: Path, override: str) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({"factors": {"some": [override]}}))
    with pytest.raises(ConfigError, match="sets several keys at once: write an override a key, or --trust"):
        read_study(file)
    with pytest.raises(ConfigError, match="may run code of its own, read the environment or write elsewhere"):
        Replay(tmp_path / "sweep.json", ()).check_override(override)


def test_overrides_of_a_file_have_a_length() -> None:
    replay = Replay(Path("sweep.json"), ())
    replay.check_override("seed=0")
    with pytest.raises(ConfigError, match="type it again beside --resume"):
        replay.check_override("seed=" + ",".join(["1"] * 10_000))


@pytest.mark.parametrize("override", ["seed=" + "9" * 5_000, "seed=range(0," + "9" * 400 + ")"])
def test_numbers_beyond_those_of_python_are_one_line(tmp_path: Path, override: str) -> None:
    command = [sys.executable, "-P", "-m", "gnnpar", "train", "-m", override, "dataset=sbm"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2 and done.stderr.startswith("gnnpar: ") and done.stderr.count("\n") == 1


def test_names_that_are_no_folders_and_no_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("...yaml").write_text("factors: {codec: [codec=bf16]}\n")
    with pytest.raises(ConfigError, match=r"no folder can have the name \.\.; give --folder"):
        ablate.run(["...yaml"])
    for name in ("true", "none", "false"):
        with pytest.raises(ConfigError, match=f"{name} is a word of Python"):
            new.check_name("model", name)


def test_arguments_of_a_model_are_no_object_of_another_class() -> None:
    with pytest.raises(ConfigError, match=r"a Comm is none: remove its _target_"):
        compose(["model=pyg", "model.target=torch_geometric.nn.GCN", "+model.kwargs._target_=gnnpar.settings.Comm"])


def test_folders_of_others_keep_no_command_from_its_scratch_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "gnnpar-scratch-link").mkdir()
    (tmp_path / "gnnpar-scratch-link" / FILE).symlink_to("x" * 255 + "y")
    about_to_begin = tmp_path / "gnnpar-scratch-new"
    about_to_begin.mkdir()
    (about_to_begin / FILE).touch()
    killed = tmp_path / "gnnpar-scratch-killed"
    killed.mkdir()
    (killed / FILE).write_text('{"pid": 1, "host": "x", "born": 0, "since": 0, "job": "", "attempt": [0, 0]}')
    with scratch.scratch_folder() as folder:
        assert folder.parent == tmp_path and folder.is_dir()
    assert about_to_begin.is_dir()


@pytest.mark.parametrize(
    "option",
    [
        ["--experimental-rerun", "FILE"],
        ["--experimental-rerun=FILE"],
        ["--exp", "FILE"],
        ["--exp=FILE"],
        ["--config-path", "FILE"],
        ["-cd", "FILE"],
        ["-mexp"],
        ["--"],
    ],
)
@pytest.mark.parametrize("before", [[], ["-m", "seed=0,1"]])
def test_hydra_unpickles_no_file_of_a_run(
    option: list[str], before: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "config.pickle"
    file.write_bytes(pickle.dumps(Calling(str(tmp_path / "ran"))))
    monkeypatch.chdir(tmp_path)
    assert run("train", [*before, *(word.replace("FILE", str(file)) for word in option)]) == 2
    assert "there is no option -" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


class Calling:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.folder,)
