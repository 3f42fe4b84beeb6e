"""Files of a run, of shards and of datasets, mutated: each is read as what it says, or refused in one line."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

import gnnpar
from attack.fuzzing import Counts, Silent, attempt, changed, damaged, json_text
from attack.inputs import graph, hetero
from checkpoints import train
from gnnpar.cli.compare import export
from gnnpar.cli.partition import run as partition
from gnnpar.codecs.adaptive.links import Profile, nominal
from gnnpar.config.inputs import with_inputs
from gnnpar.config.jobs import Job, jobs_below, snapshot
from gnnpar.config.study import read_study
from gnnpar.data.dataset import MATRICES
from gnnpar.data.folder import Folder
from gnnpar.data.npz import NPZ
from gnnpar.data.saved import PT
from gnnpar.files import LOCK, FolderInUse, checksum, file_hash, working_in
from gnnpar.partition.manifest import read_manifest
from gnnpar.partition.partition import read_cached, write_cached
from gnnpar.partition.read import open_part
from gnnpar.placement import Plan
from gnnpar.planner.calibrate import Calibration, read_calibration
from gnnpar.pricing.rates import NOMINAL
from gnnpar.report.comparison import compare
from gnnpar.report.curves import curve_of
from gnnpar.report.runs import collect
from gnnpar.report.targets import reached
from gnnpar.track.jsonl import Jsonl, read_rows
from gnnpar.track.text import printable
from gnnpar.training.checkpoint import files as checkpoint

CHECKPOINT = "checkpoint/epoch-000002"
STUDY = (
    "factors:\n  codec: [codec=bf16, codec=drop]\n  width: [model.hidden=8, model.hidden=16]\nmode: grid\nseeds: 2\n"
)
FEW, MANY = 12, 500  # cases of a target, in make test and in make test-all


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a plan, a checkpoint and a profile; a sweep of it; shards; a dataset of each kind of file."""
    return make_folder(tmp_path_factory.mktemp("attack"))


def make_folder(top: Path) -> Path:
    run = top / "run"
    assert train(run, "strategy=graph_parallel", "world_size=2", "epochs=2").exit_code == 0
    (run / "profile.json").write_text(json.dumps(nominal(2).as_json()))
    Job(top, "run", "k", ("seed=1", "model=gcn"), pid=1, born=1.0, host="h", started=1.0).save()
    (top / "study.yaml").write_text(STUDY)
    arrays = graph()
    np.savez(top / "graph.npz", **arrays)
    weighted = ["dataset=npz", f"dataset.path={top / 'graph.npz'}", "world_size=2", f"out={top / 'shards'}"]
    assert partition(weighted) == 0
    rng = np.random.default_rng(1)
    of_edges = {"edge_type": np.arange(120) % 4, "edge_attr": rng.random((120, 3), dtype=np.float32)}
    more: dict[str, Any] = arrays | of_edges | {"y": rng.standard_normal((40, 2))}
    np.savez(top / "typed.npz", **more)
    typed = [f"dataset.path={top / 'typed.npz'}", "dataset.task=regression", "dataset.self_loops=false"]
    assert partition(["dataset=npz", *typed, "world_size=2", f"out={top / 'typed'}"]) == 0
    torch.save(hetero(random.Random(4)), top / "hetero.pt")
    np.savez_compressed(top / "packed.npz", **arrays)
    torch.save(Data(**{key: torch.from_numpy(array) for key, array in arrays.items()}), top / "graph.pt")
    parts = torch.arange(40) % 3
    for name in ("partition", "chunking"):
        write_cached(top / "cache" / f"{name}.part", parts, name, print)
    measured = Calibration(2, 1, replace(NOMINAL, undrop=1e-9), (1e-9, 5e-5))
    (top / "cache" / "calibration.json").write_text(json.dumps(measured.as_json()))
    (top / "locked").mkdir()
    (top / "locked" / LOCK).write_text("process 1 of elsewhere since 2020-01-01 00:00:00")
    (top / "graph").mkdir()
    (arrays["src"], arrays["dst"]) = arrays.pop("edge_index")
    for name, array in arrays.items():
        np.save(top / "graph" / f"{name}.npy", array)
    return top


Reader = Callable[[Path], object]


def read_plan(top: Path) -> None:
    file = top / "run/plan.json"
    with_inputs({"plan": str(file), "strategy": {}, "model": {}}, {}, [f"plan={file}"])
    Plan.load(file).verify()


def read_result(top: Path) -> None:
    compared = compare(collect([top / "run"]), baseline="graph_parallel")
    for form in ("json", "csv", "markdown", "latex"):
        text = export(compared, form, asked=True, group=True)
        if "\x1b" in text or "\u202e" in text:
            raise Silent("a control character of a result reaches the terminal")


def read_metrics(top: Path) -> None:
    run = top / "run"
    curve_of(run)
    reached(run, {"metric": {"name": "accuracy"}}, 0.5)
    Jsonl(top, source=run, epochs_done=1).close()
    if any(not isinstance(row["epoch"], int) for row in read_rows(run)):
        raise Silent("a row of no epoch")


def read_sweep(top: Path) -> None:
    snapshot(jobs_below(top))


def read_checkpoint(top: Path) -> None:
    found = checkpoint.read(top / "run" / CHECKPOINT)
    for rank in range(len(found.manifest["files"])):
        found.rank(rank, torch.device("cpu"))


def load_checkpoint(top: Path) -> None:
    gnnpar.load(top / "run" / CHECKPOINT)


def read_shards(top: Path, name: str = "shards") -> None:
    """Kernels read where indices and types of edges say."""
    shards = top / name
    manifest = read_manifest(shards)
    for part in range(min(manifest.parts, 4)):
        shard = open_part(shards, manifest, part, edge_ids=manifest.edge_ids)
        for block in (shard.inner, *shard.halo.values()):
            if block.num_edges and not 0 <= int(block.indices.min()) <= int(block.indices.max()) < block.num_src:
                raise Silent("an index of no row")
            kinds = block.edges.type
            if kinds is not None and not bool(((kinds >= 0) & (kinds < shard.edge_sizes.types)).all()):
                raise Silent("an edge of no type")


def read_cache(top: Path, name: str) -> None:
    """Whatever is accepted is whole and in its bounds."""
    lines: list[str] = []
    file = top / name
    found = read_cached(file, 40, 3, file.stem, lines.append)
    if found is None and len(lines) != 1:
        raise Silent("a cache that is made again without a line")
    if found is not None and hashlib.sha256(file.read_bytes()[32:]).digest() != file.read_bytes()[:32]:
        raise Silent("another content under the checksum of the first")
    if found is not None and not 0 <= int(found.min()) <= int(found.max()) < 3:
        raise Silent("a part or chunk that is not there")


def read_costs(top: Path) -> None:
    """Whatever is accepted can be priced with."""
    calibration = read_calibration(top / "cache/calibration.json").shared(4, 2)
    rates = calibration.rates
    for seconds in (rates.gather_seconds(1e6), rates.code_seconds(4, 1e6), *rates.visit_seconds("halo"), rates.kernel):
        if not seconds >= 0:
            raise Silent("a cost that is none")


def take_lock(top: Path) -> None:
    """A folder whose lock anybody may have written is taken, or refused in one line."""
    try:
        with working_in(top / "locked", otherwise="", say=lambda line: None):
            pass
    except FolderInUse as refused:
        raise ValueError(printable(" ".join(str(refused).split()))) from refused


@contextlib.contextmanager
def patched(module: Any, name: str, value: object) -> Iterator[None]:  # Any: a module
    before = vars(module)[name]
    vars(module)[name] = value
    try:
        yield
    finally:
        vars(module)[name] = before


def read_dataset(top: Path, name: str) -> None:
    """Whatever is accepted can be trained on."""
    kind = {".npz": NPZ, ".pt": PT}.get(Path(name).suffix, Folder)
    typed = name == "hetero.pt"  # loops that are added would have no type
    config = kind(path=str(top / name), self_loops=not typed, split="random" if typed else "public")
    data = config.load(None, seed=0)
    classes = data.y.shape[1] if data.task in MATRICES else data.num_classes
    if data.task not in MATRICES and not -1 <= int(data.y.min()) <= int(data.y.max()) < data.num_classes:
        raise Silent("a label of no class")
    if data.num_edges and not 0 <= int(data.edge_index.min()) <= int(data.edge_index.max()) < data.num_nodes:
        raise Silent("an edge of no node")
    if data.edge_weight is not None and not bool(torch.isfinite(data.edge_weight).all()):
        raise Silent("a weight that is not finite")
    if not bool(torch.isfinite(data.x).all()) or not bool(data.train_mask.any()) or classes < 1:
        raise Silent("features, split or classes that cannot be trained on")


READERS: dict[str, Reader] = {
    "run/plan.json": read_plan,
    "run/result.json": read_result,
    "run/metrics.jsonl": read_metrics,
    "run/profile.json": lambda top: Profile.read(top / "run/profile.json", 2),
    "run/job.json": read_sweep,
    "study.yaml": lambda top: (study := read_study(top / "study.yaml")).jobs(study.variants()),
    f"run/{CHECKPOINT}/manifest.json": load_checkpoint,
    f"run/{CHECKPOINT}/rank-0.pt": read_checkpoint,
    f"run/{CHECKPOINT}/rank-1.pt": load_checkpoint,
    "shards/manifest.json": read_shards,
    "shards/part-0/in_degree.npy": read_shards,
    "shards/part-0/inner.indptr.npy": read_shards,
    "shards/part-0/inner.indices.npy": read_shards,
    "shards/part-1/halo-0.indices.npy": read_shards,
    "shards/part-0/y.npy": read_shards,
    "shards/part-0/in_weight.npy": read_shards,
    "shards/part-1/inner.weights.npy": read_shards,
    "typed/manifest.json": partial(read_shards, name="typed"),
    "typed/part-0/inner.types.npy": partial(read_shards, name="typed"),
    "typed/part-0/edge_attr.npy": partial(read_shards, name="typed"),
    "typed/part-1/inner.edge_ids.npy": partial(read_shards, name="typed"),
    "typed/part-1/y.npy": partial(read_shards, name="typed"),
    "graph.npz": partial(read_dataset, name="graph.npz"),
    "packed.npz": partial(read_dataset, name="packed.npz"),
    "graph.pt": partial(read_dataset, name="graph.pt"),
    "hetero.pt": partial(read_dataset, name="hetero.pt"),
    "cache/partition.part": partial(read_cache, name="cache/partition.part"),
    "cache/chunking.part": partial(read_cache, name="cache/chunking.part"),
    "cache/calibration.json": read_costs,
    "graph/y.npy": partial(read_dataset, name="graph"),
    "graph/src.npy": partial(read_dataset, name="graph"),
    "graph/edge_weight.npy": partial(read_dataset, name="graph"),
    "graph/x.npy": partial(read_dataset, name="graph"),
}

HASHED = ("shards/part-", "typed/part-", f"run/{CHECKPOINT}/rank-")
"""Files whose checksums stand in a manifest."""


def mutated(name: str, whole: bytes, number: int) -> bytes:
    """The bytes of case `number`: damaged, or another content that is well formed."""
    rng = random.Random(f"{name}/{number}")
    if rng.random() < 0.4 or name.endswith(("study.yaml", ".npz", "hetero.pt")):
        return damaged(whole, rng)
    if name.endswith(".npy"):
        return npy(array_changed(np.load(io.BytesIO(whole)), rng))
    if name.endswith(".part"):
        content = np.frombuffer(whole[32:], dtype=np.int32)
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            content = array_changed(content, rng).astype(np.int32, copy=False).tobytes()
        return hashlib.sha256(content).digest() + content
    if name == "graph.pt":
        out = io.BytesIO()
        torch.save(data_changed(rng), out)
        return out.getvalue()
    if name.endswith(".pt"):
        out = io.BytesIO()
        torch.save(pt_changed(torch.load(io.BytesIO(whole), weights_only=True), rng), out)
        return out.getvalue()
    if name.endswith(".jsonl"):
        lines = whole.decode().splitlines()
        at = rng.randrange(len(lines))
        lines[at] = json_text(changed(json.loads(lines[at]), rng))
        return "\n".join(lines).encode("utf-8", "surrogatepass")
    tree = json.loads(whole)
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = changed(tree, rng)
    return json_text(tree).encode("utf-8", "surrogatepass")


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def array_changed(array: np.ndarray, rng: random.Random) -> np.ndarray:
    """Values, shape or type of an array."""
    kind = rng.randrange(8)
    if kind == 0:
        return array.astype(rng.choice(["u8", ">i8", "f2", "c8", "U4", "b1", "f8", "i2", "O"]), copy=True)
    if kind == 1:
        return array.reshape(rng.choice([(-1, 1), (1, -1), (-1,)]))
    if kind == 2:
        return array[: rng.randrange(len(array) + 1)]
    if kind == 3:
        return np.concatenate([array, array])
    array = array.copy()
    flat = array.reshape(-1)
    for _ in range(rng.choice((1, 2, 10))):
        value = rng.choice([0, 1, -1, -2, 2, 10**9, 2**31 - 1, 2**62, 40, math.nan, math.inf])
        with np.errstate(all="ignore"):
            flat[rng.randrange(len(flat))] = np.array(value).astype(array.dtype)
    return array


def pt_changed(tree: Any, rng: random.Random) -> Any:
    """A checkpoint of a rank with a part lost, or of another kind."""
    tree = dict(tree)
    key = rng.choice(list(tree))
    kind = rng.randrange(4)
    if kind == 0:
        del tree[key]
    elif kind == 1:
        tree[key] = rng.choice([None, 1, "x", [], {}, torch.zeros(3)])
    else:
        model = dict(tree["model"])
        name = rng.choice(list(model))
        model[name] = rng.choice([None, torch.zeros(1), model[name].double(), model[name][:1], "x"])
        tree["model"] = model
    return tree


def data_changed(rng: random.Random) -> object:
    """A saved Data with a tensor of another kind, or something else."""
    fields: dict[str, Any] = {key: torch.from_numpy(array) for key, array in graph().items()}
    if rng.random() < 0.1:
        return rng.choice([fields, [Data(**fields)] * 2, None, 3, "x", HeteroData(), Data(), fields["x"]])
    key = rng.choice(list(fields))
    tensor = fields[key]
    kind = rng.randrange(6)
    if kind == 0:
        fields[key] = tensor.to(rng.choice([torch.float16, torch.bfloat16, torch.uint8, torch.bool, torch.complex64]))
    elif kind == 1:
        fields[key] = tensor.flatten()[:1].expand(rng.choice([1 << 20, 1 << 40]), rng.choice([1, 1 << 20]))
    elif kind == 2:
        fields[key] = tensor.to_sparse() if rng.random() < 0.5 else tensor[..., :0]
    elif kind == 3:
        fields[rng.choice([key, "adj_t", "edge_weight", "node_type", "x.y", ""])] = rng.choice([None, "x", 3, [], {}])
    elif kind == 4:
        fields[key] = tensor.to("meta") if rng.random() < 0.3 else tensor.mT if tensor.ndim > 1 else tensor[None]
    else:
        flat = tensor.clone().flatten()
        with contextlib.suppress(RuntimeError):  # a value that this type has not
            flat[rng.randrange(len(flat))] = rng.choice([-1, -2, 40, 2**31, 2**62])
        fields[key] = flat.view(tensor.shape)
    return Data(**{name: value for name, value in fields.items() if name.isidentifier()})


def hashed_again(top: Path, name: str) -> None:
    """Write the checksum of a changed file of shards into the manifest: another program may have made it."""
    file = top / name
    if name.startswith(("shards/part", "typed/part")):
        folder, _, within = name.partition("/")
        manifest = top / folder / "manifest.json"
        tree = json.loads(manifest.read_text())
        facts = tree["files"][within]
        facts |= {"sha256": file_hash(file), "nbytes": file.stat().st_size}
        with contextlib.suppress(Exception):  # numpy raises a dozen kinds
            array = np.load(file, allow_pickle=False)
            facts |= {"shape": list(array.shape), "dtype": array.dtype.str}
        del tree["checksum"]
        manifest.write_text(json.dumps(tree | {"checksum": checksum(tree)}))


def fuzz(top: Path, name: str, numbers: range, counts: Counts) -> None:
    """Cases of one file; it and its manifest are as before afterwards."""
    file = top / name
    manifests = (top / "shards/manifest.json", top / "typed/manifest.json", file.parent / "manifest.json")
    beside = [path for path in manifests if path.exists() and path != file]
    kept = {path: path.read_bytes() for path in (file, *beside)}
    for number in numbers:
        rng = random.Random(f"hashes/{name}/{number}")
        file.write_bytes(mutated(name, kept[file], number))
        again = rng.random() < 0.7
        if again:
            hashed_again(top, name)
        ending, what = attempt(lambda: READERS[name](top))
        if ending == "accepted" and not again and name.startswith(HASHED) and file.read_bytes() != kept[file]:
            ending, what = "silent", "another content under the checksum of the first"
        counts.add(f"{name} {number}", ending, what)
        for path, whole in kept.items():
            path.write_bytes(whole)


@pytest.mark.parametrize("name", READERS)
def test_every_file_is_read_as_it_is_written(folder: Path, name: str) -> None:
    ending = "refused" if name.startswith("locked/") else "accepted"
    assert attempt(lambda: READERS[name](folder))[0] == ending


@pytest.mark.parametrize("name", READERS)
def test_a_mutated_file_is_read_or_refused_in_one_line(folder: Path, name: str) -> None:
    counts = Counts()
    fuzz(folder, name, range(FEW), counts)
    assert not counts.findings, "\n".join(counts.findings)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_mutated_files_are_read_or_refused_in_one_line(folder: Path, name: str) -> None:
    counts = Counts()
    fuzz(folder, name, range(FEW, MANY), counts)
    assert not counts.findings, "\n".join(counts.findings[:20])
