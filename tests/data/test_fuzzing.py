"""Fuzzed graphs: an accepted graph can be trained on, by every reader; others are refused in one line."""

import contextlib
import io
import random
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from data.samples import hetero, sources
from gnnpar.data.dataset import MATRICES, Dataset
from gnnpar.data.folder import Folder
from gnnpar.data.npz import NPZ
from gnnpar.data.preprocess import prepare
from gnnpar.data.saved import PT, raw_graph

Arrays = dict[str, Any]  # Any: as numpy types the arrays of an archive
Case = Callable[[int, Path], object]

TYPES = ("i8", "i4", "u8", "u4", "u2", "u1", "f8", "f4", "f2", "b1", "c8", "O", "U3", ">i4", "m8[s]")
NUMBERS = (0, 1, -1, 2, 3, 39, 40, 41, 255, 10**9, 2**31, 2**40, 2**62, 0.5, 1e300, float("nan"), float("inf"), -np.inf)
DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int8, torch.int32, torch.bool)
OTHER_VALUES = (None, "x", 3, -1, 0, True, 2.5, [], {}, [1, 2], 10**12, float("nan"), {"a": 1})
OPTIONS: dict[str, list[Any]] = {
    "split": ["public", "random", "per_class"],
    "normalize": ["none", "row", "standard"],
    "task": ["auto", "single_label", "binary", "multi_label", "regression"],
    "symmetrize": [True, False],
    "self_loops": [True, False],
    "drop_duplicates": [True, False],
    "train_per_class": [1, 5, 10**6],
    "val_per_class": [0, 3],
    "train_fraction": [0.001, 0.5, 0.99],
    "val_fraction": [0.0, 0.5, 0.99],
    "split_index": [0, 1, 2**40],
}


class Silent(AssertionError):
    """A wrong input was accepted."""


def attempt(case: Callable[[], object]) -> tuple[str, str]:
    """Run a case: "accepted", "refused" by a ValueError of one line, "silent" or "traceback"; and what it said."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case()
    except Silent as error:
        return "silent", str(error)
    except Exception as error:
        text = str(error)
        if type(error).__name__ in ("ValueError", "ConfigError") and re.fullmatch(".{1,999}", text):
            return "refused", text
        tail = "".join(traceback.format_tb(error.__traceback__)[-3:])
        return "traceback", f"{type(error).__name__}: {text[:300]!r}\n{tail}"
    return "accepted", ""


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """Flip, cut, insert, repeat or delete some bytes."""
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        length = min(len(data) - at, rng.choice((1, 2, 8, 64, 1024)))
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at : at + length] = rng.randbytes(length)
        elif kind == 4:
            data[at:at] = data[at : at + length]
        else:
            data[at : at + length] = b"\x00" * length
    return bytes(data)


def graph() -> Arrays:
    """Return a graph of 40 nodes and 120 distinct weighted edges."""
    rng = np.random.default_rng(0)
    masks = {f"{name}_mask": np.arange(40) % 3 == i for i, name in enumerate(("train", "val", "test"))}
    return {
        "edge_index": np.stack(np.divmod(rng.permutation(1600)[:120], 40)),
        "edge_weight": rng.random(120).astype(np.float32),
        "x": rng.standard_normal((40, 5)).astype(np.float32),
        "y": np.arange(40) % 3,
        **masks,
    }


def options(rng: random.Random) -> dict[str, Any]:
    return {key: rng.choice(values) for key, values in OPTIONS.items() if rng.random() < 0.2}


def changed(arrays: Arrays, rng: random.Random) -> Arrays:
    """Change the type, shape or content of one array, rename or remove it."""
    arrays = {name: array.copy() for name, array in arrays.items()}
    name = rng.choice(list(arrays))
    array = arrays[name]
    kind = rng.randrange(9)
    with np.errstate(all="ignore"):
        if kind == 0:
            del arrays[name]
        elif kind == 1:
            arrays[rng.choice(("x", "y", "edges", "node_labels", "train_masks", "z"))] = arrays.pop(name)
        elif kind == 2:
            dtype = rng.choice(TYPES)
            arrays[name] = array.astype("i8" if dtype.startswith("m") else dtype).astype(dtype)
        elif kind == 3:
            shapes = [(-1,), (-1, 1), (1, -1), (-1, 1, 1), *([(-1, 2)] if array.size % 2 == 0 else [])]
            arrays[name] = array[:0] if rng.random() < 0.2 else array.reshape(rng.choice(shapes))
        elif kind == 4:
            arrays[name] = array[: rng.randrange(len(array) + 1)]
        elif kind == 5:
            arrays[name] = array.T.copy() if rng.random() < 0.5 else np.concatenate([array, array])
        else:
            array = array if rng.random() < 0.5 else array.astype(rng.choice(["f8", "i8", "u8"]))
            flat = array.reshape(-1)
            for _ in range(rng.choice((1, 1, 5)) if flat.size else 0):
                flat[rng.randrange(flat.size)] = np.array(rng.choice(NUMBERS)).astype(array.dtype)
            arrays[name] = flat.reshape(array.shape)
    return arrays


def check(data: Dataset) -> None:
    """Raise Silent if the dataset cannot be trained on."""
    chosen = data.train_mask | data.val_mask | data.test_mask
    if data.task in MATRICES:
        if data.y.shape != (data.num_nodes, data.num_classes) or bool(torch.isinf(data.y[chosen]).any()):
            raise Silent("a target that is not a number")
        if bool(data.y[data.train_mask].isnan().all()):
            raise Silent("a training split without a label")
    elif not -1 <= int(data.y.min()) <= int(data.y.max()) < data.num_classes or bool((data.y[chosen] < 0).any()):
        raise Silent("a label of no class")
    if data.num_edges and not 0 <= int(data.edge_index.min()) <= int(data.edge_index.max()) < data.num_nodes:
        raise Silent("an edge of no node")
    if not torch.equal(torch.bincount(data.edge_index[1], minlength=data.num_nodes), data.in_degree):
        raise Silent("degrees that are not those of the edges")
    if data.edges.type is not None and len(data.edges.type) and int(data.edges.type.max()) >= data.edge_sizes.types:
        raise Silent("an edge of no type")
    if not bool(torch.isfinite(data.x).all()):
        raise Silent("a feature that is not finite")
    if data.edges.weight is not None and not bool(torch.isfinite(data.edges.weight).all()):
        raise Silent("a weight that is not finite")
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    if int(masks.sum(0).max()) > 1 or not bool(masks[0].any()):
        raise Silent("a split that is empty or overlaps")


def arrays_case(number: int, place: Path) -> None:
    """Read changed arrays from a .npz file, or from a folder both whole and in chunks."""
    rng = random.Random(f"input/{number}")
    arrays: Arrays = graph()
    fields: dict[str, Any] = {}
    if rng.random() < 0.2:
        arrays["y"] = (np.arange(120).reshape(40, 3) % 2).astype(rng.choice(["i8", "f4", "b1"]))
    if number % 7 == 6:
        arrays["y"], fields["task"] = np.random.default_rng(number).standard_normal((40, 3)), "regression"
        arrays["y"][np.arange(40) % 3 == 1, 0] = np.nan
    if number % 5 == 4:
        arrays |= {"edge_type": np.arange(120) % 4, "edge_attr": np.ones((120, 3), dtype=np.float32)}
        fields["self_loops"] = False
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):  # numpy cannot make this change
            arrays = changed(arrays, rng)
    fields = options(rng) | fields
    if number % 2:
        read_folder(arrays, fields, place)
        return
    np.savez(place / "g.npz", **arrays)
    features = ("file", "file", "identity", "degree")[number // 2 % 4]
    check(NPZ(path=str(place / "g.npz"), features=features, **fields).load(None, seed=0))


def read_folder(arrays: Arrays, fields: dict[str, Any], place: Path) -> None:
    folder = place / "g"
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    for name, array in arrays.items():
        if name == "edge_index" and array.ndim > 1 and len(array) == 2:
            np.save(folder / "src.npy", array[0])
            np.save(folder / "dst.npy", array[1])
        np.save(folder / f"{name}.npy", array)
    config = Folder(path=str(folder), **fields)
    data = config.load(None, seed=0)
    check(data)
    if config.normalize != "standard":
        stored = config.stored(None, 0, place)
        if (stored.graph_hash, stored.split_hash) != (data.graph_hash, data.split_hash):
            raise Silent("another graph when read in chunks")


def change_types(data: HeteroData, rng: random.Random) -> None:
    """Change, add or remove a field of a store, or add a store."""
    store = rng.choice(data.stores)
    keys = [key for key in store if key != "_global_store"]
    kind = rng.randrange(10)
    if kind == 0:
        data[rng.choice(("paper", "author", "thing", ""))].x = torch.ones(rng.choice((0, 1, 6, 24)), 2)
        return
    if kind == 1:
        names = ["paper", "author", "venue", "thing"]
        data[rng.choice(names), rng.choice(("cites", "new")), rng.choice(names)].edge_index = torch.zeros(2, 3).long()
        return
    if not keys or kind == 2:
        extra = ("y", "x", "num_nodes", "edge_weight", "edge_attr", "edge_type", "adj_t", "edge_label", "train_mask")
        store[rng.choice(extra)] = rng.choice((*OTHER_VALUES, torch.ones(24), torch.ones(20, 2), torch.arange(6) % 2))
        return
    key = rng.choice(keys)
    value = store[key]
    if kind == 3:
        del store[key]
    elif kind == 4 or not isinstance(value, Tensor):
        store[key] = rng.choice(OTHER_VALUES)
    elif kind == 5:
        store[key] = value.to(rng.choice((*DTYPES, torch.complex64)))
    elif kind == 6:
        store[key] = rng.choice(
            (value.mT if value.ndim > 1 else value[None], value[:0], value[..., :1], value.flatten())
        )
    elif kind == 7:
        store[key] = rng.choice((value.to("meta"), value.to_sparse()))
    else:
        flat = value.clone().flatten()
        for _ in range(rng.choice((1, 1, 5)) if len(flat) else 0):
            flat[rng.randrange(len(flat))] = rng.choice((-1, -2, 2, 24, 255, 2**31, 2**62, 1e300, torch.nan, torch.inf))
        store[key] = flat.view(value.shape)


def hetero_case(number: int, place: Path) -> None:
    """Read a changed HeteroData from memory or from a file, and compare types of nodes and edges."""
    rng = random.Random(f"hetero/{number}")
    data = hetero()
    fields: dict[str, Any] = options(rng) | {"self_loops": False}
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3))):
        with contextlib.suppress(ValueError, TypeError, IndexError, RuntimeError, AttributeError, KeyError):
            change_types(data, rng)  # torch and PyG refuse some changes
    if number % 2:
        torch.save(data, place / "hetero.pt")
        found = PT(path=str(place / "hetero.pt"), **fields).load(None, seed=0)
    else:
        config = PT(**fields)
        found = prepare(raw_graph("given", data, config.task), config, seed=0)
    check(found)
    kinds = torch.arange(len(data.node_types)).repeat_interleave(
        torch.tensor([data[kind].num_nodes for kind in data.node_types])
    )
    place_of = {kind: i for i, kind in enumerate(data.node_types)}
    ends = torch.tensor([[place_of[source], place_of[destination]] for source, _, destination in data.edge_types])
    assert found.edges.type is not None
    wanted, got = ends[found.edges.type].t(), kinds[found.edge_index]
    if not bool(((got == wanted) | (got == wanted.flip(0))).all()):  # symmetrize reverses edges
        raise Silent("an edge joins nodes of other types than its relation")


def write_files(place: Path) -> dict[str, Callable[[], Dataset]]:
    """Write a graph in every format. Return a reader for each file."""
    arrays = graph()
    pt, _, npz, folder = sources(place, arrays)
    np.savez_compressed(place / "packed.npz", **arrays)
    torch.save(hetero(), place / "hetero.pt")
    configs = {"g.npz": npz, "packed.npz": NPZ(path=str(place / "packed.npz")), "g.pt": pt}
    configs["hetero.pt"] = PT(path=str(place / "hetero.pt"), self_loops=False)
    configs |= {f"g/{name}.npy": folder for name in ("x", "y", "src", "edge_weight", "train_mask")}
    return {name: partial(config.load, None, 0) for name, config in configs.items()}


def file_case(number: int, place: Path) -> None:
    """Read a file with damaged bytes."""
    readers = write_files(place)
    name = list(readers)[number % len(readers)]
    content = damaged((place / name).read_bytes(), random.Random(f"{name}/{number}"))
    (place / name).write_bytes(content)
    check(readers[name]())


def test_every_format_is_accepted_as_written(tmp_path: Path) -> None:
    for name, read in write_files(tmp_path).items():
        assert attempt(partial(lambda read: check(read()), read)) == ("accepted", ""), name
    out = io.BytesIO()
    np.save(out, np.zeros((0, 3)))
    (tmp_path / "g" / "edge_attr.npy").write_bytes(out.getvalue())
    ending, line = attempt(lambda: Folder(path=str(tmp_path / "g")).load(None, 0))
    assert ending == "refused" and "edge_attr.npy is float64 [0, 3]" in line


SIZES: dict[Case, tuple[int, int]] = {arrays_case: (150, 2000), hetero_case: (70, 1000), file_case: (90, 2000)}


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", SIZES)
def test_changed_graph_is_accepted_or_refused_in_one_line(case: Case, tmp_path: Path) -> None:
    fuzz(case, range(SIZES[case][0]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", SIZES)
def test_many_changed_graphs_are_accepted_or_refused_in_one_line(case: Case, tmp_path: Path) -> None:
    fuzz(case, range(*SIZES[case]), tmp_path)


def fuzz(case: Case, numbers: range, place: Path) -> None:
    """The number of a case is its seed."""
    ended = {number: attempt(partial(case, number, place)) for number in numbers}
    findings = [f"{number}: {how}: {what}" for number, (how, what) in ended.items() if how in ("silent", "traceback")]
    assert not findings, "\n".join(findings[:20])
    counts = Counter(how for how, _ in ended.values())
    assert min(counts["accepted"], counts["refused"]) > len(numbers) // 20
