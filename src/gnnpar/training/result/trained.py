"""`gnnpar.load(run_folder)`: a run's trained model, on one device, for any graph with the same kinds of features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gnnpar.comm import ThreadWorld
from gnnpar.comm.world import torch_defaults
from gnnpar.data.dataset import Dataset
from gnnpar.data.hetero import homogeneous
from gnnpar.data.preprocess import Preprocess, canonical_edges, normalized
from gnnpar.data.raw import EdgeList, checked_data, checked_features, checked_index, edge_list_of, edges_of
from gnnpar.files import JsonDict
from gnnpar.folds.edge_data import EdgeData
from gnnpar.models.gnn import GNN
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.local import Pass
from gnnpar.partition.learned import WEIGHT
from gnnpar.partition.shard import Shard
from gnnpar.paths import path_of
from gnnpar.precision import TYPES
from gnnpar.settings import Settings, build_settings
from gnnpar.targets import refuse_foreign
from gnnpar.track.console import complain, say
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.checkpoint.files import Checkpoint
from gnnpar.training.checkpoint.resume import EdgeFacts
from gnnpar.training.result.result import valid_result


class Trained(nn.Module):
    """A trained model: call it to get exact logits [N, classes], without dropout.

    Arguments: a PyG `Data` or `HeteroData`, or x [N, F], edge_index [2, E] and, if used, edge_weight [E], edge_type
    [E], edge_attr [E, D]. An adj_t (a SparseTensor, or a sparse tensor of torch) may replace edge_index.

    Edges and features are prepared as in the run (self loops, reverse edges, repeated edges, row sums). Pass undirected
    pairs as edges in both directions. `prepared=True` skips the preparation.
    settings: the run's settings. epoch: epochs done. val: validation metric. edges: kinds of edge data in training.
    vectors [N, d]: learned vectors of the nodes for features=learned or both, else None; the graph must then be the
    training graph, and features=learned does not read its x.
    """

    vectors: Tensor | None

    def __init__(self, model: GNN, settings: Settings, found: Checkpoint, vectors: Tensor | None = None) -> None:
        super().__init__()
        self.model, self.settings, self.epoch, self.val = model, settings, found.epoch, found.val
        self.edges = EdgeFacts.of(found.manifest["run"])
        self.register_buffer("vectors", vectors)
        self.eval()

    # Any: an object of PyG or a sparse tensor of another library
    def forward(
        self,
        x: Any,
        edge_index: Any = None,
        edge_weight: Tensor | None = None,
        *,
        edge_type: Tensor | None = None,
        edge_attr: Tensor | None = None,
        prepared: bool = False,
    ) -> Tensor:
        if edge_index is None:
            x = homogeneous(x, known=self.edges.sizes.schema, double=True) if type(x).__name__ == "HeteroData" else x
            x, edges = x.x, edges_of(x)
        else:
            edges = edge_list_of(edge_index)
        if self.vectors is not None:
            if x is not None and len(x) != len(self.vectors):
                raise ValueError(f"x has {len(x)} rows, but {len(self.vectors)} nodes have learned vectors; give these")
            x = self.vectors[:, :0] if x is None or self.settings.features == "learned" else x
        x = checked_features("given", x.detach() if isinstance(x, Tensor) else x, double=True)
        given = {**edges.data.tensors, **EdgeData(None, edge_weight, edge_type, edge_attr).tensors}
        data = EdgeData(**{kind: value.detach().cpu() for kind, value in given.items()})
        types, double = self.edges.sizes.types or None, self.settings.precision == "fp64"
        edge_index = checked_index("given", edges.edge_index, len(x))
        edges = EdgeList(edge_index, checked_data("given", data, edge_index.shape[1], num_types=types, double=double))
        if unread := sorted(edges.data.kinds - self.settings.model.edge_data):
            raise ValueError(f"the edges have edge_{unread[0]}, which this model does not read; leave it out")
        sizes = self.edges.sizes
        carried = {"weight": self.edges.weighted, "type": sizes.types, "attr": sizes.attr}  # in training
        if lacking := [kind for kind in sorted(self.settings.model.edge_data - given.keys()) if carried[kind]]:
            raise ValueError(f"the model was trained on edges with edge_{lacking[0]}, and these have none; give it")
        if x.shape[1] != (width := self.num_features):
            raise ValueError(f"x is {tuple(x.shape)}, but the model was trained on {width} features a node")
        x, edges = (x, _sorted(edges, len(x))) if prepared else self._prepared(x, edges)
        device, dtype = next(self.model.parameters()).device, TYPES[self.settings.precision].rows
        shard = _shard(x, edges, edge_ids=self.model.needs_edge_ids).to(device, dtype)
        shard = shard if self.vectors is None else replace(shard, learned=nn.Parameter(self.vectors))
        return self.model(WholeGraph(shard, Pass(self.settings.seed)), shard.inputs())

    @property
    def num_features(self) -> int:
        """Return the width of x."""
        return self.model.in_dim - (0 if self.vectors is None else self.vectors.shape[1])

    def _prepared(self, x: Tensor, edges: EdgeList) -> tuple[Tensor, EdgeList]:
        how = self.settings.dataset
        if not isinstance(how, Preprocess):
            return x, _sorted(edges, len(x))
        if how.normalize == "standard":
            raise ValueError(
                "the run's features were standardised by its training nodes, which a checkpoint does not hold: "
                "standardise x in the same way and call with prepared=True"
            )
        edges = canonical_edges(edges._replace(edge_index=edges.edge_index.cpu()), how, num_nodes=len(x))
        return normalized(x, how.normalize, train_mask=torch.ones(len(x), dtype=torch.bool), double=True), edges


def load(
    run: str | Path,
    *,
    which: Literal["best", "last"] = "best",
    device: str | torch.device = "cpu",
    trust: bool = False,
) -> Trained:
    """Return the model of a run's folder, or of one checkpoint in it. which=best: the best kept checkpoint on
    validation. Raises ValueError if there is no valid checkpoint, or if it names classes outside gnnpar and installed
    plugins. `trust=True` allows these classes; so does an earlier training with them in this working directory."""
    if which not in ("best", "last"):
        raise ValueError(
            f"which={which!r} is neither 'best' nor 'last': name one of them, or give a checkpoint's folder"
        )
    place = path_of(run, "run")
    try:
        there = torch.device(device)
        torch.empty(0, device=there)
    except (RuntimeError, TypeError, AssertionError) as error:  # AssertionError: torch without CUDA
        line = str(error).split("\n", maxsplit=1)[0]
        raise ValueError(f"device={device!r} is not available on this machine: {line}") from error
    with torch_defaults():
        return opened(*find(place, which, trust=trust), there)


def opened(found: Checkpoint, settings: Settings, device: str | torch.device = "cpu") -> Trained:
    """Return the model of a checkpoint. Raises as `load` does."""
    saved = found.manifest["run"]
    weights, _ = found.merged(torch.device("cpu"))
    vectors = weights.pop(WEIGHT, None)
    model = settings.build_model(saved["num_features"], saved["num_outputs"], EdgeFacts.of(saved).sizes)
    check_weights(model, weights, found.folder)
    model.to(device, TYPES[settings.precision].parameters).load_state_dict(weights)
    return Trained(model, settings, found, vectors).to(device)


def find(
    folder: Path, which: Literal["best", "last"], *, trust: bool = False, named: object = None
) -> tuple[Checkpoint, Settings]:
    """Return the checkpoint in a run's folder, or in the given checkpoint folder, and the settings of its run. named:
    settings of the caller, to trust their classes. Raises as `load` does."""
    chosen = checkpoint.best if which == "best" else checkpoint.latest
    found = checkpoint.read(folder) if checkpoint.is_checkpoint(folder) else chosen(folder, complain)
    if found is None:
        raise ValueError(f"{folder} has no good checkpoint; give the folder of a run with {checkpoint.FOLDER}/ in it")
    best = ((valid_result(folder) or {}).get("metric") or {}).get("best_epoch")
    if which == "best" and best is not None and best + 1 != found.epoch:
        say(f"the model of epoch {found.epoch}; that of epoch {best + 1}, the best on validation, was not kept")
    saved = found.manifest["run"]
    remedy = "with trust=True, or --trust, its code is imported and runs"
    refuse_foreign(saved["settings"], str(found.folder), remedy=remedy, named=named, trust=trust, noted=True)
    return found, build_settings(saved["settings"], saved["names"])


def check_weights(model: GNN, weights: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError if the weights of a checkpoint do not fit its model."""
    needed = model.weights
    for name, parameter in needed.items():
        if name in weights and checkpoint.is_extra(name):
            continue
        given = weights.get(name)
        have = list(given.shape) if isinstance(given, Tensor) else "not there"
        if have != list(parameter.shape):
            raise ValueError(f"{folder} is no good checkpoint: {name} is {have}, its model has {list(parameter.shape)}")
    if unknown := sorted(weights.keys() - needed.keys()):
        raise ValueError(f"{folder} is no good checkpoint: its model has no {unknown[0][:80]}")


def _shard(x: Tensor, edges: EdgeList, *, edge_ids: bool) -> Shard:
    """Return the whole graph as the only part, without labels."""
    unknown, everywhere = torch.zeros(len(x), dtype=torch.int64), torch.ones(len(x), dtype=torch.bool)
    labels: JsonDict = {"y": unknown, "masks": (everywhere,) * 3, "num_classes": 1, "task": "single_label"}
    dataset = Dataset.of("given", x=x.cpu(), edge_index=edges.edge_index, edges=edges.data, **labels)
    (comm,) = ThreadWorld(1).communicators()
    return Shard.open(dataset, unknown, comm, edge_ids=edge_ids)


def _sorted(edges: EdgeList, num_nodes: int) -> EdgeList:
    """Sort edges by (destination, source); keep repeated edges."""
    src, dst = edges.edge_index.cpu().long()
    order = torch.argsort(dst * num_nodes + src, stable=True)
    return EdgeList(torch.stack([src[order], dst[order]]), edges.data.at(order))
