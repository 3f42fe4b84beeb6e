"""Small raw graphs and real folders for the tests of gnnpar.data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from gnnpar.data import RawGraph
from gnnpar.data.folder import Folder
from gnnpar.data.npz import NPZ
from gnnpar.data.saved import PT, write_given

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def raw_graph(**changes: Any) -> RawGraph:
    """Six nodes, five edges with a loop and a repetition, node 5 isolated, three classes."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "x": torch.arange(12, dtype=torch.float32).reshape(6, 2),
        "y": torch.tensor([0, 1, 2, 0, 1, 2]),
        "edge_index": torch.tensor([[0, 1, 1, 3, 4], [1, 2, 2, 3, 0]]),
        "task": "single_label",
        "masks": tuple(torch.tensor(rows) for rows in ([1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1])),
    }
    return RawGraph(**(fields | changes))


def pyg_data(**changes: Any) -> Data:
    """The same graph as PyG has it; None removes a field."""
    raw = raw_graph()
    assert raw.masks is not None
    train, val, test = (mask.bool() for mask in raw.masks)
    fields = {"x": raw.x, "y": raw.y, "edge_index": raw.edge_index}
    fields |= {"train_mask": train, "val_mask": val, "test_mask": test}
    return Data(**{key: value for key, value in (fields | changes).items() if value is not None})


def npz_arrays(**changes: Any) -> dict[str, Any]:
    """The same graph as arrays of a user's file; None removes a key."""
    arrays = {key: value.numpy() for key, value in pyg_data().to_dict().items()}
    return {key: value for key, value in (arrays | changes).items() if value is not None}


def sources(folder: Path, arrays: Mapping[str, Any], **how: Any) -> tuple[PT, PT, NPZ, Folder]:
    """The same arrays in a `.pt`, given in memory, in an `.npz` and in a folder of `.npy`."""
    torch.save(Data(**{key: torch.from_numpy(array) for key, array in arrays.items()}), folder / "g.pt")
    np.savez(folder / "g.npz", **arrays)
    (folder / "g").mkdir(exist_ok=True)
    src, dst = arrays["edge_index"]
    for key, array in {**arrays, "src": src, "dst": dst}.items():
        if key != "edge_index":
            np.save(folder / "g" / f"{key}.npy", array)
    return (
        PT(path=str(folder / "g.pt"), **how),
        PT(path=str(write_given(arrays)), **how),
        NPZ(path=str(folder / "g.npz"), **how),
        Folder(path=str(folder / "g"), **how),
    )


def shared(*names: str) -> Path:
    """The folder of real files, or a skip that says what is missing."""
    missing = [name for name in names if not (SHARED / name / "raw").is_dir()]
    if missing:
        pytest.skip(f"no raw files of {', '.join(missing)} in ../shared/data")
    return SHARED


def hetero() -> HeteroData:
    """12 papers of width 3, which have labels, 5 authors of width 2, 4 venues without features."""
    gen = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(12, 3, generator=gen), torch.randn(5, 2, generator=gen)
    data["venue"].num_nodes = 4
    data["paper"].y = torch.arange(12) % 3
    part = torch.arange(12) % 4
    data["paper"].train_mask, data["paper"].val_mask, data["paper"].test_mask = part < 2, part == 2, part == 3
    for source, relation, destination, rows in (
        ("author", "writes", "paper", (5, 12)),
        ("paper", "of", "author", (12, 5)),
        ("paper", "in", "venue", (12, 4)),
        ("venue", "has", "paper", (4, 12)),
        ("paper", "cites", "paper", (12, 12)),
    ):
        ends = torch.stack([torch.randint(0, count, (20,), generator=gen) for count in rows])
        data[source, relation, destination].edge_index = ends
    return data
