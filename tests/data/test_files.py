"""Raw files are found, processed in the cache and never downloaded; what is nowhere is one clear line, at once."""

import gzip
import io
import os
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import scipy.sparse
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from data.samples import shared
from gnnpar.data import files, ogb, pyg
from gnnpar.data.pyg import PyGDataset

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def offline(monkeypatch):
    """No server answers, whatever machine the tests run on."""

    def no_answer(request: urllib.request.Request, timeout: float) -> None:
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(urllib.request, "urlopen", no_answer)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """served(content, length=...): every address sends this content; the addresses that are asked for."""

    def serve(content: bytes, length: int | None = None) -> list[str]:
        asked: list[str] = []

        class Answer(io.BytesIO):
            headers: ClassVar = {"Content-Length": str(len(content) if length is None else length)}

        def answer(request: urllib.request.Request, timeout: float) -> Answer:
            asked.append(request.full_url)
            return Answer(content)

        monkeypatch.setattr(urllib.request, "urlopen", answer)
        return asked

    return serve


NAMES = ["cora", "computers", "physics", "tolokers", "flickr", "reddit", "yelp", "amazon_products"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["missing", "empty", None])
def test_a_dataset_that_is_nowhere_is_one_line(name, place, tmp_path, offline, capfd):
    (tmp_path / "empty").mkdir()
    config = instantiate(OmegaConf.load(ROOT / "conf" / "dataset" / f"{name}.yaml"))
    line = rf"^dataset {name}: .* cannot be reached; put (it|them) into \S+/raw/\.$"
    with pytest.raises(ValueError, match=line) as caught:
        config.load(place and tmp_path / place, 0)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert not list((tmp_path / "cache").rglob("*.pt"))


def test_only_the_files_that_are_missing_are_asked_for(tmp_path, offline):
    (tmp_path / "Reddit" / "raw").mkdir(parents=True)
    (tmp_path / "Reddit" / "raw" / "reddit_data.npz").touch()
    line = r"^dataset reddit: reddit_graph.npz: not in .*; put it into .*/Reddit/raw/\.$"
    with pytest.raises(ValueError, match=line):
        PyGDataset(name="reddit").load(tmp_path, 0)


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "computers" / "raw").mkdir(parents=True)
    (tmp_path / "computers" / "raw" / "amazon_electronics_computers.npz").write_bytes(b"no npz")
    with pytest.raises(ValueError, match=r"dataset computers: the files in .* cannot be read"):
        PyGDataset(name="computers").load(tmp_path, 0)
    assert not [path for path in (tmp_path / "cache" / "pyg").iterdir() if path.is_dir()]  # nothing half done stays


@pytest.mark.parametrize("folder", ["cora", "CORA", "Cora"])
def test_folders_are_found_in_any_case(tmp_path, folder):
    (tmp_path / folder).mkdir()
    assert files.find_folder(tmp_path, "Cora") == tmp_path / folder


def test_processing_leaves_data_dir_alone_and_follows_changed_files(tmp_path):
    data_dir = tmp_path / "data"
    raw = data_dir / "computers" / "raw"
    raw.mkdir(parents=True)

    def write(nodes: int) -> None:
        """A path graph in the layout of the Amazon files, ten classes."""
        path = scipy.sparse.eye_array(nodes, k=1, format="csr")
        x = scipy.sparse.csr_array(np.eye(1, 3, dtype=np.float32).repeat(nodes, 0))
        matrices = {"adj": path, "attr": x}
        parts = ("data", "indices", "indptr", "shape")
        arrays: dict = {f"{key}_{part}": getattr(matrices[key], part) for key in matrices for part in parts}
        np.savez(raw / "amazon_electronics_computers.npz", labels=np.arange(nodes) % 10, **arrays)

    config = PyGDataset(name="computers", split="random")
    write(60)
    raw.chmod(0o555)
    assert config.load(data_dir, 0).num_edges == 60 + 2 * 59
    assert [path.name for path in raw.iterdir()] == ["amazon_electronics_computers.npz"]
    raw.chmod(0o755)
    write(70)
    assert config.load(data_dir, 0).num_nodes == 70


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match=r"cannot write to the cache folder .* set GNNPAR_CACHE"):
        files.cached_folder("pyg/x", lambda root: None)


@pytest.mark.fault
def test_two_runs_at_once_process_once(tmp_path):
    """Two processes ask for the same cache folder: one builds it, the other waits; both see it whole."""
    script = (
        "import sys, time; from pathlib import Path; from gnnpar.data.files import cached_folder\n"
        "def build(root):\n"
        "    (root / 'a').write_text('1'); time.sleep(1); (root / 'b').write_text('2')\n"
        "    open(sys.argv[1], 'a').write('built ')\n"
        "folder = cached_folder('pyg/both', build)\n"
        "assert (folder / 'a').read_text() + (folder / 'b').read_text() == '12'\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    runs = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "log")], env=env) for _ in range(2)]
    assert [run.wait(timeout=120) for run in runs] == [0, 0]
    assert (tmp_path / "log").read_text() == "built "


@pytest.mark.parametrize(("name", "why"), [("arxiv", "cannot be reached"), ("products", "larger than 1 GB, which is")])
def test_ogb_says_what_it_needs(tmp_path, offline, name, why):
    config = instantiate(OmegaConf.load(ROOT / "conf" / "dataset" / f"ogbn_{name}.yaml"))
    with pytest.raises(ValueError, match=rf"{why}.*; put them into .*/ogbn_{name}/\.$"):
        config.load(tmp_path, 0)


def test_ogb_comes_over_https_and_is_read_once(tmp_path: Path, served: Callable[..., list[str]]) -> None:
    """Of what the archive holds beside its files, nothing is unpacked. Edges of products are meant both ways."""
    content = {"edge": "0,1\n1,2\n3,4\n", "node-feat": "1,2\n" * 50, "node-label": "0\n1\n1\n39\n2\n" * 10}
    content |= {"num-node-list": "50\n", "num-edge-list": "3\n", "train": "0\n2\n", "valid": "1\n", "test": "3\n"}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("arxiv/../../outside", "x")
        for file in ogb._SOURCES["ogbn_arxiv"].files:
            text = content[Path(file).name.removesuffix(".csv.gz")]
            archive.writestr(f"arxiv/{file}", gzip.compress(text.encode()))

    asked = served(packed.getvalue())
    config = ogb.OGBDataset(name="ogbn_arxiv", symmetrize=True)
    first, second = config.load(None, 0), config.load(None, 0)
    assert asked == ["https://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip"]
    assert first.graph_hash == second.graph_hash and first.num_classes == 40
    assert sorted(map(tuple, first.edge_index.T.tolist()))[:4] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert first.edge_index.shape == (2, 6 + 50)
    assert [mask.nonzero().flatten().tolist() for mask in (first.train_mask, first.val_mask)] == [[0, 2], [1]]
    made = sorted(file.name for file in (tmp_path / "cache" / "ogb_arrays" / "ogbn_arxiv-downloaded").rglob("*"))
    assert made == [f"{name}.npy" for name in ("edge_index", "test", "train", "valid", "x", "y")]
    os.rename(tmp_path / "cache" / "ogb_arrays" / "ogbn_arxiv-downloaded", tmp_path / "away")
    raw = tmp_path / "data" / "ogbn_products"
    for file in ogb._SOURCES["ogbn_products"].files:
        (raw / file).parent.mkdir(parents=True, exist_ok=True)
        (raw / file).write_bytes(gzip.compress(content[Path(file).name.removesuffix(".csv.gz")].encode()))
    products = ogb.OGBDataset(name="ogbn_products").load(tmp_path / "data", 0)
    assert torch.equal(products.edge_index, first.edge_index) and products.num_classes == 47


def test_real_files_load_silently_and_the_same_twice(capfd):
    config = instantiate(OmegaConf.load(ROOT / "conf" / "dataset" / "cora.yaml"))
    first, second = (config.load(shared("Cora"), seed) for seed in (0, 1))
    assert capfd.readouterr() == ("", "")
    assert (first.graph_hash, first.split_hash) == (second.graph_hash, second.split_hash)


def test_a_file_that_is_replaced_by_one_of_its_size_and_time_is_another(tmp_path: Path) -> None:
    """As tar, rsync and git leave it."""
    first, second = tmp_path / "raw.npz", tmp_path / "new.npz"
    first.write_bytes(b"a" * 10)
    second.write_bytes(b"b" * 10)
    before, stat = files.fingerprint(tmp_path, ["raw.npz"]), first.stat()
    assert files.fingerprint(tmp_path, ["raw.npz"]) == before
    os.utime(second, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second.replace(first)
    assert files.fingerprint(tmp_path, ["raw.npz"]) != before
    replaced = files.fingerprint(tmp_path, ["raw.npz"])
    first.write_bytes(b"c" * 10)
    os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert files.fingerprint(tmp_path, ["raw.npz"]) not in (before, replaced)


def test_downloads_have_names_of_their_own(tmp_path: Path, served: Callable[..., list[str]]) -> None:
    asked = served(b'<a href="../../../../elsewhere">' + b"x" * 100)
    addresses = pyg._SOURCES["cora"].addresses()
    files.fetch({name: addresses[name] for name in ("ind.cora.x", "ind.cora.y")}, tmp_path / "raw")
    assert [file.name for file in sorted(tmp_path.rglob("*")) if file.is_file()] == ["ind.cora.x", "ind.cora.y"]
    assert asked[0] == "https://github.com/kimiyoung/planetoid/raw/master/data/ind.cora.x"


def test_a_download_that_is_cut_off_is_not_taken_for_the_file(tmp_path: Path, served: Callable[..., list[str]]) -> None:
    served(b"x" * 50, length=100)
    with pytest.raises(ValueError, match=r"ind\.cora\.x is incomplete: 50 of 100 bytes were received; try again"):
        files.fetch({"ind.cora.x": "https://a.b/ind.cora.x"}, tmp_path / "raw")
    assert not list((tmp_path / "raw").iterdir())


def test_an_archive_gives_the_files_that_are_asked_for(tmp_path: Path, served: Callable[..., list[str]]) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in ("reddit_data.npz", "../outside", "reddit_graph.npz"):
            archive.writestr(name, name)
    served(packed.getvalue())
    files.fetch(pyg._SOURCES["reddit"].addresses(), tmp_path / "raw")
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["raw", "reddit_data.npz", "reddit_graph.npz"]


def test_every_dataset_has_addresses() -> None:
    for source in pyg._SOURCES.values():
        addresses = source.addresses()
        assert tuple(addresses) == source.files
        assert all(address.startswith("https://") for address in addresses.values())


def ogb_files(folder: Path, **changed: str) -> None:
    """Write ogbn-arxiv with 40 nodes, as OGB unpacks it. `changed`: texts by file name, with _ for -."""
    lists = {"node_feat": "1,0\n" * 40, "node_label": "0\n1\n" * 20, "edge": "0,1\n1,2\n2,0\n"}
    lists |= {"num_node_list": "40\n", "num_edge_list": "3\n", "train": "0\n", "valid": "1\n", "test": "2\n"} | changed
    for file in ogb._SOURCES["ogbn_arxiv"].files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        content = lists[Path(file).name.removesuffix(".csv.gz").replace("-", "_")]
        (folder / file).write_bytes(gzip.compress(content.encode()))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"train": "0\n40\n"}, "the split train names nodes 0 to 40, but there are 0 to 39"),
        ({"edge": "0,1\n1,x\n2,0\n"}, r"the files in .*/ogbn_arxiv cannot be read \(ValueError"),
        ({"num_edge_list": "4\n"}, r".*they say 40 nodes and 4 edges, and have features of 40 and 3 edges\); compare"),
        ({"edge": "0,1,2\n1,2,0\n2,0,0\n"}, r"edge_index must have shape \[2, edges\], got \[3, 3\]"),
    ],
)
def test_ogb_files_that_disagree_are_one_line(tmp_path: Path, changed: dict[str, str], line: str) -> None:
    ogb_files(tmp_path / "ogbn_arxiv", **changed)
    with pytest.raises(ValueError, match=f"^dataset ogbn_arxiv: {line}"):
        ogb.OGBDataset(name="ogbn_arxiv").load(tmp_path, 0)


def test_two_files_of_a_dataset_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("data/d", "d"):
        Path(folder).mkdir(parents=True)
        np.savez(f"{folder}/d.npz", x=np.zeros(1))
    with pytest.raises(ValueError, match=r"dataset d: there are two files d/d\.npz, .* and .*; say by dataset\.path"):
        files.find_path("d", "d/d.npz", Path("data"), example="")
    whole = str((tmp_path / "data/d/d.npz").absolute())
    assert files.find_path("d", whole, Path("data"), example="") == Path(whole)
    Path("d/d.npz").unlink()
    assert files.find_path("d", "d/d.npz", Path("data"), example="") == Path("data/d/d.npz")


def test_user_without_a_home_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    monkeypatch.setattr(Path, "expanduser", lambda path: none())
    for name in ("XDG_CACHE_HOME", "GNNPAR_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="this user has no home folder; set HOME, XDG_CACHE_HOME or GNNPAR_CACHE"):
        files.cache_root()
