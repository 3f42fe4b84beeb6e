"""`HeteroData` that somebody may hand in, in memory or as a file: what is accepted is one typed graph whose nodes,
edges and labels are those of its types, all else is refused in one line."""

from __future__ import annotations

import contextlib
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from attack.fuzzing import Counts, Silent, attempt
from attack.inputs import DTYPES, hetero
from attack.test_inputs import check, options
from gnnpar.data.dataset import Dataset
from gnnpar.data.preprocess import prepare
from gnnpar.data.saved import PT, raw_graph

FEW, MANY = 70, 1000
OTHER_VALUES = (None, "x", 3, -1, 0, True, 2.5, [], {}, [1, 2], 10**12, 2**70, float("nan"), {"a": 1})


def changed(data: HeteroData, rng: random.Random) -> None:
    """One field of one store, or one store, is another or lost."""
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
        huge = value.flatten()[:1].expand(rng.choice((2, 24, 1 << 20, 1 << 40)), rng.choice((1, 1 << 20)))
        shapes = (value.mT if value.ndim > 1 else value[None], value[:0], value[..., :1], value.flatten(), huge)
        store[key] = rng.choice(shapes)
    elif kind == 7:
        store[key] = rng.choice((value.to("meta"), value.to_sparse()))
    else:
        flat = value.clone().flatten()
        for _ in range(rng.choice((1, 1, 5)) if len(flat) else 0):
            flat[rng.randrange(len(flat))] = rng.choice((-1, -2, 2, 24, 255, 2**31, 2**62, 1e300, torch.nan, torch.inf))
        store[key] = flat.view(value.shape)


def case(number: int) -> tuple[HeteroData, dict[str, Any]]:
    """The object of case `number`, and what is set beside it."""
    rng = random.Random(f"hetero/{number}")
    data = hetero(rng)
    fields: dict[str, Any] = {"self_loops": False}  # loops that are added would have no type
    if data["paper"].y.is_floating_point() and rng.random() < 0.7:
        fields["task"] = "regression"
    if "train_mask" not in data["paper"]:
        fields["split"] = "random"
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3))):
        with contextlib.suppress(ValueError, TypeError, IndexError, RuntimeError, AttributeError, KeyError):
            changed(data, rng)  # what torch or PyG refuse to make is no case
    return data, options(rng) | fields


def check_types(data: HeteroData, found: Dataset) -> None:
    """Silent where an edge joins nodes of other types than its relation says, or a node of no label is in a split."""
    counts = [data[kind].num_nodes for kind in data.node_types]
    kinds = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    if len(kinds) != found.num_nodes:
        raise Silent(f"{found.num_nodes} nodes of {len(kinds)}")
    labelled = [data[kind].get("y") is not None for kind in data.node_types]
    chosen = found.train_mask | found.val_mask | found.test_mask
    if bool((chosen & ~torch.tensor(labelled)[kinds]).any()):
        raise Silent("a node of a type without labels is in a split")
    place = {kind: i for i, kind in enumerate(data.node_types)}
    wanted = torch.tensor([[place[source], place[destination]] for source, _, destination in data.edge_types])
    assert found.edges.type is not None
    both = wanted[found.edges.type].t()  # of symmetrized edges, either direction is that of the relation
    ends = kinds[found.edge_index]
    if not bool(((ends == both) | (ends == both.flip(0))).all()):
        raise Silent("an edge of another type than its nodes have")


def read(data: HeteroData, fields: dict[str, Any], file: Path | None) -> None:
    """From a file, or as it is handed to `gnnpar.train`."""
    if file is not None:
        torch.save(data, file)
        found = PT(path=str(file), **fields).load(None, seed=0)
    else:
        config = PT(**fields)
        found = prepare(raw_graph("given", data, config.task), config, seed=0)
    check(found)
    check_types(data, found)


def fuzz(numbers: range, place: Path, counts: Counts) -> None:
    for number in numbers:
        data, fields = case(number)
        file = place / "hetero.pt" if number % 2 else None
        counts.add(f"hetero {number}", *attempt(partial(read, data, fields, file)))


def test_types_are_accepted_as_they_are_or_refused_in_one_line(tmp_path: Path) -> None:
    counts = Counts()
    fuzz(range(FEW), tmp_path, counts)
    assert not counts.findings, "\n".join(counts.findings)
    assert counts.ended["accepted"] > FEW // 10
    assert counts.ended["refused"] > FEW // 10


@pytest.mark.slow
def test_many_types_are_accepted_as_they_are_or_refused_in_one_line(tmp_path: Path) -> None:
    counts = Counts()
    fuzz(range(FEW, MANY), tmp_path, counts)
    assert not counts.findings, "\n".join(counts.findings[:20])
