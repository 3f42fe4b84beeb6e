"""Run folders and data that somebody else made: no code runs, no file outside is touched, no reader waits for ever."""

from __future__ import annotations

import contextlib
import gzip
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import gnnpar
from checkpoints import train
from composing import settings_of
from gnnpar.cli.main import run
from gnnpar.cli.predict import checked_pairs
from gnnpar.config.compose import compose
from gnnpar.data import ogb
from gnnpar.data.files import fingerprint
from gnnpar.data.given import _of_arrays
from gnnpar.data.pyg import PyGDataset
from gnnpar.data.saved import PT
from gnnpar.files import JsonDict, file_hash, read_checked_json, write_checked_json
from gnnpar.folds.edge_data import Schema
from gnnpar.partition.chunking import Range, chunk
from gnnpar.placement import Placement, Plan
from gnnpar.settings import ConfigError
from gnnpar.track.jsonl import read_rows
from gnnpar.training.checkpoint import files as checkpoint

CORA = [f"ind.cora.{part}" for part in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")]


def test_two_predictions_of_a_run_share_no_file(trained: Path, tmp_path: Path) -> None:
    """Both wrote one partial file, and the first to end named a mixture."""
    other = tmp_path / ".out.npy.partial"
    other.write_text("of another prediction")
    assert run("predict", [str(trained), "strategy=single", "comm=threads", "--out", str(tmp_path / "out.npy")]) == 0
    assert other.read_text() == "of another prediction"
    assert {path.name for path in tmp_path.iterdir()} == {other.name, "out.npy"}


class Code:
    """A pickle of it runs code."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("place", ["data_dir", "cache"])
def test_raw_files_of_a_dataset_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Those of a cache are read where nothing is processed yet."""
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    root = tmp_path if place == "data_dir" else tmp_path / "cache" / "pyg" / "cora-downloaded"
    raw = root / "Cora" / "raw"
    raw.mkdir(parents=True)
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph"):
        (raw / f"ind.cora.{part}").write_bytes(pickle.dumps(Code(tmp_path / "ran")))
    (raw / "ind.cora.test.index").write_text("0\n")
    with pytest.raises(ValueError, match=r"cannot be read \(UnpicklingError: it names .*, which is no array\)"):
        PyGDataset(name="cora").load(tmp_path, 0)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["data.pt", "pre_transform.pt", "pre_filter.pt"])
def test_a_cache_that_pyg_reads_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """PyG unpickles its notes of transforms, and what torch refuses for a class that one could allow."""
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    raw = tmp_path / "Cora" / "raw"
    raw.mkdir(parents=True)
    for file in CORA:
        (raw / file).write_bytes(b"")
    root = tmp_path / "cache" / "pyg" / f"cora-{fingerprint(raw, CORA)}" / "Cora"
    shutil.copytree(raw, root / "raw")
    (root / "processed").mkdir()
    content = {"data.pt": (Data(x=torch.ones(2, 2)).to_dict(), None, Data)}
    for file, what in (content | {name: Code(tmp_path / "ran")}).items():
        torch.save(what, root / "processed" / file)
    with contextlib.suppress(ValueError):  # a graph without edges, or the file
        PyGDataset(name="cora").load(tmp_path, 0)
    assert not (tmp_path / "ran").exists()


def ogb_files(folder: Path, **changed: str) -> None:
    """ogbn-arxiv with 40 nodes, as OGB unpacks it. `changed`: the text of a file, by its name with _ for -."""
    lists = {"node_feat": "1,0\n" * 40, "node_label": "0\n1\n" * 20, "edge": "0,1\n1,2\n2,0\n"}
    lists |= {"num_node_list": "40\n", "num_edge_list": "3\n", "train": "0\n", "valid": "1\n", "test": "2\n"} | changed
    for file in ogb.required_files("ogbn_arxiv"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        content = lists[Path(file).name.removesuffix(".csv.gz").replace("-", "_")]
        (folder / file).write_bytes(gzip.compress(content.encode()))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"train": "0\n40\n"}, "the split train names nodes 0 to 40, but there are 0 to 39"),
        ({"train": "-1\n"}, "the split train names nodes -1 to -1, but there are 0 to 39"),
        ({"train": "0.5\n"}, r"the files in .*/ogbn_arxiv cannot be read \(ValueError"),
        ({"edge": "0,1\n1,x\n2,0\n"}, r"the files in .*/ogbn_arxiv cannot be read \(ValueError"),
        (
            {"num_node_list": f"{10**15}\n"},
            r".*they say 1000000000000000 nodes and 3 edges, and have features of 40 and",
        ),
        ({"num_edge_list": "4\n"}, r".*they say 40 nodes and 4 edges, and have features of 40 and 3 edges\)\.$"),
        ({"edge": "0,1,2\n1,2,0\n2,0,0\n"}, r"edge_index must have shape \[2, edges\], got \[3, 3\]"),
    ],
)
def test_files_of_ogb_that_disagree_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], line: str
) -> None:
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    ogb_files(tmp_path / "ogbn_arxiv", **changed)
    with pytest.raises(ValueError, match=f"^dataset ogbn_arxiv: {line}"):
        ogb.OGBDataset(name="ogbn_arxiv").load(tmp_path, 0)


@pytest.mark.parametrize("command", ["train", "check"])
def test_yaml_that_is_none_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "broken.yaml").write_text("a: [1\nb: {")
    monkeypatch.chdir(tmp_path)
    assert run(command, ["model=broken", *(["strategy=single", "epochs=1"] if command == "train" else [])]) == 2
    said = capsys.readouterr().err
    assert "model/broken.yaml is no YAML: " in said and "in line 2; correct it" in said and "Traceback" not in said


def test_a_cache_of_ogb_holds_arrays_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OGB itself unpickles what it has saved."""
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    ogb_files(tmp_path / "ogbn_arxiv")
    assert ogb.OGBDataset(name="ogbn_arxiv").load(tmp_path, 0).y.tolist() == [0, 1] * 20
    (labels,) = (tmp_path / "cache" / "ogb_arrays").glob("*/y.npy")
    np.save(labels, np.array([Code(tmp_path / "ran")], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="of the cache cannot be read"):
        ogb.OGBDataset(name="ogbn_arxiv").load(tmp_path, 0)
    assert not (tmp_path / "ran").exists()


def header(shape: str) -> bytes:
    """Of a .npy file."""
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    "content",
    {
        "nothing": b"",
        "a zip": b"PK\x03\x04",
        "too large": header("(99999999999999999999, 2)"),
        "negative": header("(-4, 2)"),
        "a truth": header("(True, 2)") + bytes(64),
        "no end": header("(4, 2"),
        "beyond memory": header("(10000000000000, 2)"),
        "a pipe": None,
        "an archive": None,
    }.items(),
    ids=lambda item: item[0],
)
def test_what_is_no_array_is_one_line(tmp_path: Path, content: tuple[str, bytes | None]) -> None:
    """numpy raised EOFError, OverflowError, MemoryError, TokenError, ..., gave an archive, or waited for a writer."""
    file, trained = tmp_path / "pairs.npy", settings_of("task=link")
    if content[0] == "a pipe":
        os.mkfifo(file)
    elif content[0] == "an archive":
        np.savez(tmp_path / "pairs.npz", np.zeros((2, 2)))
        (tmp_path / "pairs.npz").rename(file)
    else:
        file.write_bytes(content[1] or b"")
    with pytest.raises(ValueError, match=r"pairs\.npy cannot be read \(.+\); give a \.npy$"):
        checked_pairs(file, trained)


def test_a_resume_beyond_the_epochs_that_are_asked_for_is_refused(tmp_path: Path) -> None:
    """result.json said 1 epoch, and had the figures of 2."""
    assert train(tmp_path / "run", "strategy=single", "epochs=2").exit_code == 0
    outcome = train(tmp_path / "other", "strategy=single", "epochs=1", f"resume={tmp_path / 'run'}")
    assert outcome.exit_code == 1
    assert "has 2 epochs behind it, and epochs=1: set epochs=2 or more" in str(outcome.error)


@pytest.mark.parametrize("which", ["part_of", "chunk_of"])
def test_a_part_or_chunk_beyond_memory_is_one_line(which: str) -> None:
    arrays = {"part_of": torch.zeros(4, dtype=torch.int64), "chunk_of": torch.zeros(4, dtype=torch.int64)}
    arrays[which][0] = 1 << 60
    plan = Plan(Placement(((0,),), arrays["part_of"], arrays["chunk_of"], (range(2),)))
    with pytest.raises(
        ValueError, match=f"the plan cannot run: {which} (goes from 0 to|has the chunk) 1152921504606846976"
    ):
        plan.verify()


def test_a_flipped_bit_in_cached_chunks_is_noticed(tmp_path: Path) -> None:
    dataset = compose(["debug=tiny"]).dataset.load(None, 0)
    part_of, lines = torch.arange(dataset.num_nodes) % 2, []
    made = chunk(dataset, part_of, 4, by=Range(), cache=tmp_path)
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[-4] ^= 1  # another chunk that is there
    file.write_bytes(bytes(data))
    assert torch.equal(chunk(dataset, part_of, 4, by=Range(), cache=tmp_path, say=lines.append), made)
    assert lines[0] == f"the cached chunking {file} is corrupt: making it again"


def test_a_row_repeated_beyond_memory_is_refused(tmp_path: Path) -> None:
    x = torch.zeros(1, 1).expand(1 << 30, 1 << 20)
    torch.save(Data(x=x, y=torch.zeros(3), edge_index=torch.zeros(2, 0, dtype=torch.int64)), tmp_path / "my.pt")
    with pytest.raises(ValueError, match="needs 4,194,304 GiB at least"):
        PT(path=str(tmp_path / "my.pt")).load(None, 0)


def test_features_that_numpy_has_not_are_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path))
    edges = torch.tensor(np.array([[0, 1, 2, 3], [1, 2, 3, 0]]))
    data = Data(x=torch.ones(4, 2).bfloat16(), y=torch.arange(4) % 2, edge_index=edges)
    for name, split in (("train", [1, 1, 0, 0]), ("val", [0, 0, 1, 0]), ("test", [0, 0, 0, 1])):
        data[f"{name}_mask"] = torch.tensor(split).bool()
    run = gnnpar.train("gcn", data, strategy="single", folder=tmp_path / "run", epochs=1, threads_per_rank=1)
    assert run.result["epochs_done"] == 1


def test_what_is_no_file_is_not_replaced_by_one(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before there is anything to wait for: a prediction, a plan, a page."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("device").symlink_to(os.devnull)
    Path("folder").mkdir()
    with monkeypatch.context() as alone:
        alone.setattr("gnnpar.launch.launch.launch", None)
        for name in ("pipe", "device", "folder"):
            assert run("predict", [str(trained), "strategy=single", "--out", name]) == 2
    assert run("compare", [str(trained.parents[1]), "--html", "pipe"]) == 2
    assert run("plan", ["model=gcn", "dataset=sbm", "world_size=2", "--trace", "pipe"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "cannot be written" in line]
    assert [line.endswith(("it is a folder; name a file", "or socket; name a file")) for line in lines] == [True] * 5
    assert Path("pipe").is_fifo() and Path("device").is_symlink() and Path("folder").is_dir()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "s"
    assert (
        run("partition", ["dataset=sbm", "dataset.num_nodes=200", "partition=range", "world_size=2", f"out={out}"]) == 0
    )
    return out


ESCAPED = (
    r"early_stopping.patience=$\{oc.create\:$\{oc.select\:$\{oc.env\:GNNPAR_JOBS_AT_ONCE\,resume\}\,\\\{_targ$\{oc.env\:NOPE\,et_\}"
    r"\\\:\ subprocess.Popen\\\,\ args\\\:\ touch\ PWNED\\\,\ shell\\\:\ true\\\}\}\}"
)
"""A number that becomes a class, when a job runs and not while it is planned."""


@pytest.mark.parametrize(
    ("strategy", "key", "value"),
    [("minibatch", "walk_length", 10**9), ("minibatch", "coverage", 10**9), ("bns", "rate", 1e-300)],
)
def test_a_number_that_would_run_for_days_or_draws_nothing_is_refused(strategy: str, key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"strategy.{key}={value:g}|strategy.{key}={value}"):
        compose([f"strategy={strategy}", f"strategy.{key}={value}"])


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '[[], [["a", "b", "c"]], null]',
        '[[[[], 1]], [["a", "b", "c"]], null]',
        '[[["a", 1]], [["a", "b", "a"]], {}]',
        '[[["a", 1]], [["a", "b", ["a"]]], null]',
        '[[["a", 1], ["a", 1]], [["a", "b", "a"]], null]',
    ],
)
def test_types_of_nodes_that_a_file_spells_wrong_are_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"does not list the types|a type without a name of its own"):
        Schema.of(text)


def test_a_folder_that_is_no_checkpoint_hides_none(tmp_path: Path, trained: Path) -> None:
    shutil.copytree(trained.parents[1], tmp_path / "run")
    good = checkpoint.folders(tmp_path / "run")
    (tmp_path / "run" / checkpoint.FOLDER / "epoch-\u00b2").mkdir()  # a digit to str.isdigit, no number to int
    assert checkpoint.folders(tmp_path / "run") == good != []


def test_numbers_of_other_widths_and_orders_are_read_and_masked_ones_are_not() -> None:
    edges = np.array([[0, 1], [1, 2]], dtype=">i8")
    x = np.arange(6).reshape(3, 2)
    for dtype in (">f4", np.longdouble):
        found = _of_arrays({"x": x.astype(dtype), "y": np.arange(3), "edge_index": edges})
        assert found.x is not None and torch.equal(found.x.double(), torch.from_numpy(x).double())
        assert found.edge_index is not None and torch.equal(found.edge_index, torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(ValueError, match="x has masked entries; fill them"):
        _of_arrays({"x": np.ma.masked_array(x, mask=x > 2), "y": np.arange(3), "edge_index": edges})


def weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[JsonDict, JsonDict], None]:
    return lambda manifest, tree: tree["model"].update({name: change(w) for name, w in tree["model"].items()})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert train(folder, "strategy=single", "epochs=1").exit_code == 0
    return next((folder / "checkpoint").iterdir())


def forged(trained: Path, tmp_path: Path, change: Callable[[JsonDict, JsonDict], None]) -> Path:
    """A copy of a checkpoint, changed, its checksums made again."""
    folder = tmp_path / trained.name
    shutil.copytree(trained, folder)
    manifest, file = read_checked_json(folder / "manifest.json"), folder / "rank-0.pt"
    tree = torch.load(file, weights_only=True)
    change(manifest, tree)
    torch.save(tree, file)
    manifest["files"]["rank-0.pt"] = {"nbytes": file.stat().st_size, "sha256": file_hash(file)}
    write_checked_json(folder / "manifest.json", manifest)
    return folder


def test_weights_that_are_not_finite_are_no_model(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no good checkpoint: .* has entries that are not finite"):
        gnnpar.load(forged(trained, tmp_path, weights(lambda w: w * torch.nan)))


def test_a_class_of_gnnpar_that_is_no_model_is_a_line(trained: Path, tmp_path: Path) -> None:
    def change(manifest: JsonDict, tree: JsonDict) -> None:
        manifest["run"]["settings"]["model"] = {"_target_": "gnnpar.settings.Host"}

    with pytest.raises(ValueError, match=r"model: gnnpar\.settings\.Host has no build, which a model needs"):
        gnnpar.load(forged(trained, tmp_path, change))


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "[1, NaN]", "1e999"])
def test_rows_with_numbers_that_are_none_end_before_them(tmp_path: Path, value: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        f'{{"epoch": 0, "metric/val": 0.5}}\n{{"epoch": 1, "metric/val": {value}}}\n'
    )
    assert [row["epoch"] for row in read_rows(tmp_path)] == [0]
