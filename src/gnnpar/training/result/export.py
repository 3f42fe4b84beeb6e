"""A trained model to take away: files that torch alone reads.

weights.pt (a state dict, read with weights_only=True), model.json (what it is, how features and edges are prepared,
checksums), program.pt2 (torch.export of the forward pass in plain torch operations), predict.py (which uses them).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnnpar.data.preprocess import Preprocess
from gnnpar.durable import JsonDict, file_hash
from gnnpar.models.gnn import GNN
from gnnpar.parallel.plain import PlainGraph
from gnnpar.training.result.header import versions
from gnnpar.training.result.trained import DTYPES, Trained

WEIGHTS, MODEL, PROGRAM, SCRIPT = "weights.pt", "model.json", "program.pt2", "predict.py"
_TEMPLATE = Path(__file__).parents[1] / "templates" / "export" / "predict.txt"
_PREPARES = ("self_loops", "symmetrize", "drop_duplicates", "normalize")


class Plain(nn.Module):
    """(x [N, F], edge_index [2, E], prepared) -> exact logits [N, classes]."""

    def __init__(self, model: GNN) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.model(PlainGraph(edge_index, x.shape[0], x), x)


def traced(model: GNN) -> Any:
    """The program of torch.export, for any number of nodes and edges. ValueError in one line where it has none."""
    parameter = next(model.parameters())
    x = torch.zeros(7, model.in_dim, dtype=parameter.dtype)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 2], [1, 2, 3, 4, 5, 6, 0, 2, 0]])
    dims: Any = {"x": {0: torch.export.Dim("num_nodes")}, "edge_index": {1: torch.export.Dim("num_edges")}}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(Plain(model).eval(), (x, edges), dynamic_shapes=dims)
    except Exception as error:  # whatever a model of the user's own does that cannot be traced
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{type(model.config).__name__} has no program: {type(error).__name__}: {lines[0][:200]}; a forward "
            "pass can be traced that uses tensors and the graph alone"
        ) from error


def export(trained: Trained, folder: Path) -> list[str]:
    """Write the files; lines on what could not be written."""
    model = trained.model.cpu().eval()
    folder.mkdir(parents=True, exist_ok=True)
    problems = []
    torch.save({name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, folder / WEIGHTS)
    for name in (PROGRAM, SCRIPT):
        (folder / name).unlink(missing_ok=True)
    try:
        torch.export.save(traced(model), folder / PROGRAM)
        shutil.copyfile(_TEMPLATE, folder / SCRIPT)
    except ValueError as error:
        problems.append(str(error))
    told = described(trained)
    told["files"] = {name: file_hash(folder / name) for name in (WEIGHTS, PROGRAM) if (folder / name).exists()}
    (folder / MODEL).write_text(json.dumps(told, indent=1, default=str) + "\n", encoding="utf-8")
    return problems


def described(trained: Trained) -> JsonDict:
    """model.json."""
    settings, how = trained.settings, trained.settings.dataset
    prepare = {name: getattr(how, name) for name in _PREPARES} if isinstance(how, Preprocess) else None
    config = trained.model.config
    return {
        "schema": 1,
        "model": {"name": settings.names.get("model"), "class": type(config).__name__, **dataclasses.asdict(config)},
        "num_features": trained.model.in_dim,
        "num_outputs": trained.model.out_dim,
        "dtype": str(DTYPES[settings.precision]).removeprefix("torch."),
        "prepare": prepare,
        "dataset": settings.names.get("dataset"),
        "strategy": settings.names.get("strategy"),
        "epoch": trained.epoch,
        "val": trained.val,
        "versions": versions(),
    }
