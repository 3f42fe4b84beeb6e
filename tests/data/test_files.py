"""Raw files are found, processed in the cache and never downloaded twice; YAML fits its class; wordnet is read."""

import gzip
import io
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
import scipy.sparse
import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter

import gnnpar
from conftest import ROOT
from data.samples import shared
from gnnpar.cli.main import run
from gnnpar.data import files, ogb, pyg
from gnnpar.data.pyg import PyGDataset
from gnnpar.data.rmat import RMAT
from gnnpar.data.synthetic import SBM
from gnnpar.data.typed import TypedSBM
from gnnpar.data.wordnet import POINTERS, WordNet
from outcomes import refused


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
    with refused(line):
        config.load(place and tmp_path / place, 0)
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
    content = {"edge": "0,1\n1,2\n3,4\n", "node_feat": "1,2\n" * 50, "node_label": "0\n1\n1\n39\n2\n" * 10}
    content |= {"num_node_list": "50\n", "train": "0\n2\n", "test": "3\n"}
    ogb_files(tmp_path / "served" / "arxiv", **content)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("arxiv/../../outside", "x")
        for file in ogb._SOURCES["ogbn_arxiv"].files:
            archive.write(tmp_path / "served" / "arxiv" / file, f"arxiv/{file}")
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
    ogb_files(tmp_path / "data" / "ogbn_products", **content)
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
    """Write a dataset of 40 nodes, as OGB unpacks it. `changed`: texts by file name, with _ for -."""
    lists = {"node_feat": "1,0\n" * 40, "node_label": "0\n1\n" * 20, "edge": "0,1\n1,2\n2,0\n"}
    lists |= {"num_node_list": "40\n", "num_edge_list": "3\n", "train": "0\n", "valid": "1\n", "test": "2\n"} | changed
    for file in ogb._SOURCES["ogbn_products" if folder.name == "ogbn_products" else "ogbn_arxiv"].files:
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


CONF = ROOT / "conf" / "dataset"
FILES = sorted(CONF.glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_yaml_lists_the_fields_of_its_class(file):
    yaml = OmegaConf.load(file)
    assert isinstance(yaml, DictConfig)
    cls = get_class(yaml["_target_"])
    assert set(yaml) == {"_target_", *(field.name for field in fields(cls))}
    config = instantiate(yaml)
    assert config.name == file.stem
    plain = {key: value for key, value in yaml.items() if key != "_target_"}
    assert TypeAdapter(cls).validate_python(plain, strict=False) == config


def test_every_known_dataset_has_a_yaml():
    names = get_args(ogb.OGBDataset.__annotations__["name"])
    assert all(ogb._SOURCES[name].files for name in names)
    drawn = ("sbm", "sbm_reddit", "sbm_products", "sbm_verdict")
    assert {file.stem for file in FILES} >= {*pyg._SOURCES, *names, *drawn, "npz"}


@pytest.mark.parametrize(
    ("name", "config"), [("sbm", SBM()), ("rmat", RMAT()), ("sbm_typed", TypedSBM()), ("wordnet", WordNet())]
)
def test_yaml_and_class_agree_on_the_default(name, config):
    assert instantiate(OmegaConf.load(CONF / f"{name}.yaml")) == config


# name, folder, nodes, directed edges without loops, features, classes, task, train/val/test
SIZES = [
    ("cora", "Cora", 2708, 10556, 1433, 7, "single_label", (140, 500, 1000)),
    ("citeseer", "CiteSeer", 3327, 9104, 3703, 6, "single_label", (120, 500, 1000)),
    ("computers", "Computers", 13752, 491722, 767, 10, "single_label", (200, 300, 13252)),
    pytest.param("cs", "CS", 18333, 163788, 6805, 15, "single_label", (300, 450, 17583), marks=pytest.mark.slow),
    ("tolokers", "tolokers", 11758, 1038000, 10, 2, "binary", (5879, 2939, 2940)),
    ("squirrel", "Squirrel", 5201, 396706, 2089, 5, "single_label", (2496, 1664, 1041)),
    ("blogcatalog", "BlogCatalog", 10312, 667966, 10312, 39, "multi_label", (6187, 2062, 2063)),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "folder", "nodes", "edges", "features", "classes", "task", "split"), SIZES)
def test_sizes(name, folder, nodes, edges, features, classes, task, split, tmp_path, monkeypatch):
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path))
    data = instantiate(OmegaConf.load(CONF / f"{name}.yaml")).load(shared(folder), 0)
    assert (data.num_nodes, data.num_features, data.num_classes, data.task) == (nodes, features, classes, task)
    assert data.num_edges == edges + nodes  # one loop per node
    assert tuple(int(m.sum()) for m in (data.train_mask, data.val_mask, data.test_mask)) == split
    assert torch.equal(torch.bincount(data.edge_index[0], minlength=nodes), data.in_degree)  # undirected
    assert bool((data.in_degree >= 1).all())
    if data.task == "single_label":
        assert torch.bincount(data.y, minlength=classes).min() > 0


def test_public_splits_differ_by_number(tmp_path, monkeypatch):
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path))
    yaml = OmegaConf.load(CONF / "tolokers.yaml")
    hashes = {instantiate(yaml, split_index=k).load(shared("tolokers"), 0).split_hash for k in range(10)}
    assert len(hashes) == 10
    with pytest.raises(ValueError, match="has 10 splits"):
        instantiate(yaml, split_index=10).load(shared("tolokers"), 0)


LICENCE = "  1 This software and database is being provided to you, the LICENSEE, by\n"


def synset(offset: int, lexicographer: int, kind: str, gloss: str, *pointers: str, words: int = 1) -> str:
    names = " ".join(f"word{i} 0" for i in range(words))
    ends = "".join(f" {pointer}" for pointer in pointers)
    frames = " 01 + 02 00" if kind == "v" else ""
    head = f"{offset:08} {lexicographer:02} {kind} {words:02x} {names} {len(pointers):03}"
    return f"{head}{ends}{frames} | {gloss}  \n"


def dictionary(folder: Path, *more: str) -> Path:
    """46 synsets: a chain of 36 nouns, 8 verbs, an adjective with a satellite, no adverb but `more`."""
    nouns = [
        synset(
            100 + i,
            5 if i % 2 else 18,
            "n",
            "an animal\x85 that runs" if i % 2 else "a person; who works | rests",
            *([f"@ {99 + i:08} n 0000"] if i else ["+ 00000200 v 0101", "! 00000300 a 0101"]),
            *([f"~ {101 + i:08} n 0000"] if i < 35 else []),
            words=17 if i == 3 else 1,
        )
        for i in range(36)
    ]
    verbs = [synset(200 + i, 38, "v", "move \xe9 fast") for i in range(8)]
    adjectives = [
        synset(300, 0, "a", "quick", "& 00000301 s 0000", "^ 00000301 s 0000"),
        synset(301, 0, "s", "rather quick", "& 00000300 a 0000"),
    ]
    for name, lines in (("noun", nouns), ("verb", verbs), ("adj", adjectives), ("adv", more)):
        (folder / f"data.{name}").write_text(LICENCE + "".join(lines), encoding="latin-1")
    return folder


def test_the_command_builds_it_and_prints_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("data", ["wordnet", f"dataset.path={dictionary(tmp_path)}", "dataset.self_loops=false"]) == 0
    lines = capsys.readouterr().out.splitlines()
    edges = 70 + 2 + 2  # of the chain, from its first noun, between adjectives
    assert lines[0] == f"wordnet: 46 nodes, {edges} edges, 45 classes"
    assert re.fullmatch(r"256 features; 9 training, 9 validation, 28 test nodes", lines[1])
    assert run("data", ["nothing"]) == 2


def test_synsets_are_nodes_and_pointers_edges(tmp_path: Path) -> None:
    data = WordNet(path=str(dictionary(tmp_path)), self_loops=False, num_features=16).load(None, 0)
    assert (data.num_nodes, data.num_classes, data.edges.type) == (46, 45, None)
    assert data.y.tolist() == [18, 5] * 18 + [38] * 8 + [0] * 2
    pairs = {(i, j) for i in range(36) for j in (i - 1, i + 1) if 0 <= j < 36}
    assert set(zip(*data.edge_index.tolist(), strict=True)) == pairs | {(0, 36), (0, 44), (44, 45), (45, 44)}
    words = ["a", "an", "animal", "person", "rests", "runs", "that", "who", "works", "fast", "move", "quick", "rather"]
    has = [{"a", "person", "who", "works", "rests"}, {"an", "animal", "that", "runs"}] * 18
    has += [{"move", "fast"}] * 8 + [{"quick"}, {"rather", "quick"}]
    expected = [[float(word in gloss) for word in words] + [0.0] * 3 for gloss in has]
    torch.testing.assert_close(data.x, torch.tensor(expected))
    assert [int(mask.sum()) for mask in (data.train_mask, data.val_mask, data.test_mask)] == [9, 9, 28]


def test_pointers_of_two_kinds_are_two_typed_edges(tmp_path: Path) -> None:
    data = WordNet(path=str(dictionary(tmp_path)), types=True).load(None, 0)
    assert data.edges.type is not None
    assert data.edge_sizes.types == len(POINTERS) == 26
    found = {
        (*pair, POINTERS[kind]) for *pair, kind in zip(*data.edge_index.tolist(), data.edges.type.tolist(), strict=True)
    }
    assert {(44, 45, "&"), (44, 45, "^"), (45, 44, "&"), (0, 36, "+"), (0, 1, "~"), (1, 0, "@")} <= found
    assert len(found) == data.num_edges == 75


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (synset(400, 45, "r", "late"), "data.adv: line 2 is not of the format"),
        ("00000400 02 r\n", "data.adv: line 2 is not of the format"),
        (synset(400, 2, "r", "late", "! 00000999 r 0101"), r"a pointer has \('r', '00000999'\)"),
        (synset(400, 2, "r", "late", "? 00000400 r 0101"), r"a pointer has '\?'"),
    ],
)
def test_malformed_files_are_one_line(tmp_path: Path, line: str, told: str) -> None:
    with refused(told):
        WordNet(path=str(dictionary(tmp_path, line)), types=True).load(None, 0)


def test_a_dictionary_that_is_not_installed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnpar.data.wordnet.INSTALLED", tmp_path / "usr")
    with pytest.raises(ValueError, match=r"^dataset=wordnet: data\.noun, .* not found in .*/wordnet nor .*/usr\."):
        WordNet().load(tmp_path, 0)
    dictionary(tmp_path).joinpath("data.adv").unlink()
    with pytest.raises(ValueError, match=r"Fix: apt install wordnet-base, or dataset\.path=FOLDER\.$"):
        WordNet(path=str(tmp_path)).load(None, 0)


@pytest.mark.parametrize(("model", "typed"), [("sage", False), ("rgcn", True)])
def test_it_trains_with_and_without_types(tmp_path: Path, model: Any, typed: bool) -> None:
    (tmp_path / "wordnet").mkdir()
    dictionary(tmp_path / "wordnet")
    given: dict[str, Any] = {"data_dir": tmp_path, "epochs": 1, "folder": tmp_path / "run"}
    run = gnnpar.train(model, "wordnet", dataset={"types": typed}, **given)
    assert 0 <= run.result["metric"]["best_val"] <= 1
