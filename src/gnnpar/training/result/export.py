"""Export a trained model to files that need torch only.

weights.pt (a state dict, read with weights_only=True), model.json (description, preparation of features and edges,
checksums), program.pt2 (torch.export of the forward pass in plain torch operations), predict.py (which uses them), and
on request model.onnx, which needs the extra [onnx].
"""

# torch's ONNX exporter has no types without onnx
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor, nn

from gnnpar.data.preprocess import Preprocess
from gnnpar.files import JsonDict, file_hash, open_atomic, read_json, write_text_atomic
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Rows
from gnnpar.folds.generic import Generic
from gnnpar.folds.max import Max
from gnnpar.folds.softmax import Softmax, SoftmaxDot, SoftmaxV2
from gnnpar.folds.sum import Sum
from gnnpar.graph import InEdges, OneView
from gnnpar.models.gnn import GNN
from gnnpar.parallel.local import LocalRows, Pass, by_type
from gnnpar.partition.learned import WEIGHT
from gnnpar.precision import TYPES
from gnnpar.settings import ConfigError
from gnnpar.training.result.result import versions
from gnnpar.training.result.trained import Trained

WEIGHTS, MODEL, PROGRAM, SCRIPT, ONNX = "weights.pt", "model.json", "program.pt2", "predict.py", "model.onnx"
_TEMPLATE = Path(__file__).parents[2] / "templates" / "export" / "predict.txt"
_TYPED = (
    "by type of edge has no form in plain torch, where edges have no types; load weights.pt into the class of the model"
)
_WHOLE = "a convolution that reads whole neighbourhoods has no form in plain torch; load weights.pt into its class"


class PlainGraph(OneView, LocalRows):
    """A graph in torch's own operations, for tracing: no kernels, no blocks, edges in any order, evaluation only.

    Folds are `index_add` and `scatter_reduce`; other aggregators raise ValueError. Edges have no data. Shapes:
    edge_index [2, E], (source, destination), of N nodes.
    """

    edge_attr = edge_type = None

    def __init__(self, edge_index: Tensor, num_nodes: int, like: Tensor) -> None:
        self._src, self._dst, self.num_nodes = edge_index[0], edge_index[1], num_nodes
        degree = self._added(like.new_ones(edge_index.shape[1]))
        super().__init__(torch.arange(num_nodes, device=degree.device), degree, run=Pass(0))

    @property
    def edge_ids(self) -> Tensor:
        return torch.arange(self._src.shape[0], device=self._src.device)

    @property
    def in_edges(self) -> InEdges:
        raise ValueError(_WHOLE)

    def type_degree(self, types: int) -> Tensor:
        return by_type(None, self.in_degree, types)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        if agg.whole_neighborhood:
            raise ValueError(_WHOLE)
        if isinstance(agg, Sum | Generic) and agg.types > 1:
            raise ValueError(f"{'a sum' if isinstance(agg, Sum) else 'attention'} {_TYPED}")
        there, here = tuple(rows[self._src] for rows in src), tuple(rows[self._dst] for rows in dst)
        if isinstance(agg, Sum):
            total = self._added(there[0])
            return total[:, None] if agg.types else total
        if isinstance(agg, Max):
            best = self._largest(there[0])
            return torch.where(best > -torch.inf, best, torch.zeros_like(best))
        if isinstance(agg, Softmax):
            x, score = there
            return self._attended(torch.nn.functional.leaky_relu(score + here[0], agg.slope), x)
        if isinstance(agg, SoftmaxV2):
            activated = torch.nn.functional.leaky_relu(there[0] + here[0], agg.slope)
            return self._attended((activated * shared[0]).sum(-1), there[0])
        if isinstance(agg, SoftmaxDot):  # edges have no attributes here
            return self._attended((there[0] * here[0]).sum(-1), agg.value(there, here, edge, shared))
        if not isinstance(agg, Generic):
            raise ValueError(
                f"the aggregator {type(agg).__name__} has no form in plain torch; use Generic in its place"
            )
        rows = there, here, (torch.zeros_like(self._src), *edge) if agg.types else edge, shared
        value = agg.value(*rows)
        out = self._added(value) if agg.score is None else self._attended(agg.score(*rows), value)
        return out[:, None] if agg.within else out

    def _added(self, rows: Tensor) -> Tensor:
        """Sum rows of edges by destination."""
        return rows.new_zeros(self.num_nodes, *rows.shape[1:]).index_add(0, self._dst, rows)

    def _largest(self, rows: Tensor) -> Tensor:
        """Return the maximum by destination; -inf without an in-edge."""
        index = self._dst.reshape(-1, *[1] * (rows.ndim - 1)).expand_as(rows)
        return rows.new_full((self.num_nodes, *rows.shape[1:]), -torch.inf).scatter_reduce(0, index, rows, "amax")

    def _attended(self, score: Tensor, value: Tensor) -> Tensor:
        """Attend to in-neighbours. Shapes: score [E, H], value [E, H, D] -> [N, H, D]; 0 without an in-edge."""
        weight = (score - self._largest(score)[self._dst]).exp()
        total = self._added(weight).clamp_min(torch.finfo(score.dtype).tiny)
        return self._added(weight[..., None] * value) / total[..., None]


class Plain(nn.Module):
    """A module of (x [N, F], edge_index [2, E], prepared) -> exact logits [N, classes]."""

    def __init__(self, model: GNN) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.model(PlainGraph(edge_index, x.shape[0], x), x)


_ANY_SIZE = {"x": {0: torch.export.Dim("num_nodes")}, "edge_index": {1: torch.export.Dim("num_edges")}}


def sample_of(model: GNN, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return inputs to trace Plain with."""
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 2], [1, 2, 3, 4, 5, 6, 0, 2, 0]])
    return torch.zeros(7, model.in_dim, dtype=dtype), edges


def missing() -> str:
    """Return the first missing package of the extra [onnx], else ''."""
    return next((name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None), "")


def onnx_of(model: GNN) -> bytes:
    """Return an ONNX file in fp32, since runtimes lack kernels for fp64. Raises ValueError."""
    plain, inputs = Plain(copy.deepcopy(model).float()).eval(), sample_of(model, torch.float32)
    names: JsonDict = {"input_names": list(_ANY_SIZE), "output_names": ["logits"]}
    try:
        with _quiet():
            made = torch.onnx.export(plain, inputs, dynamo=True, verbose=False, dynamic_shapes=_ANY_SIZE, **names)
        assert made is not None
        proto = made.model_proto
    except Exception as error:  # the exporter may raise anything
        raise ValueError(_export_error(model, "ONNX file", error)) from error
    for node in [*proto.graph.node, *(node for function in proto.functions for node in function.node)]:
        node.ClearField("metadata_props")  # source lines with local paths
    return proto.SerializeToString()


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager: silence the exporter's warnings, such as about optional packages."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def traced(model: GNN) -> torch.export.ExportedProgram:
    """Return the program of torch.export, for any number of nodes and edges. Raises ValueError."""
    inputs = sample_of(model, next(model.parameters()).dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(Plain(model).eval(), inputs, dynamic_shapes=_ANY_SIZE)
    except Exception as error:  # a user's model may raise anything
        hint = "; a forward pass can be traced that uses tensors and the graph alone"
        raise ValueError(_export_error(model, "program", error) + hint) from error
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # source lines with local paths
    return program


def _export_error(model: GNN, form: str, error: Exception) -> str:
    """Return the line for an error of an exporter."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(model.config).__name__} has no {form}: {type(error).__name__}: {lines[0][:200]}"


def export(trained: Trained, folder: Path, *, onnx: bool = False) -> list[str]:
    """Write the files of an export. Return a line per file that could not be made. Raises WriteError. onnx: also write
    an ONNX file, which needs the extra [onnx]."""
    model = trained.model.cpu().eval()
    folder.mkdir(parents=True, exist_ok=True)
    there = [name for name in (MODEL, WEIGHTS, PROGRAM, SCRIPT, ONNX) if (folder / name).exists()]
    if there and not _is_export(folder / MODEL):
        raise ConfigError(f"{folder} holds {there[0]}, which no export has written: name another folder by --out")
    problems = []
    weights = {name: each.clone() if isinstance(each, Tensor) else each for name, each in model.weights.items()}
    if trained.vectors is not None:
        weights[WEIGHT] = trained.vectors.cpu()
    _write(folder / WEIGHTS, lambda out: torch.save(weights, out))
    for name in (PROGRAM, SCRIPT, ONNX):
        (folder / name).unlink(missing_ok=True)
    try:
        if trained.edges.weighted or trained.edges.sizes.types or trained.edges.sizes.attr:
            carried = "weighted edges" if trained.edges.weighted else "edges with types or attributes"
            raise ValueError(f"the model was trained on {carried}, which a program does not read: no program")
        program = traced(model)
        _write(folder / PROGRAM, lambda out: torch.export.save(program, out))
        write_text_atomic(folder / SCRIPT, _TEMPLATE.read_text(encoding="utf-8"))
        if onnx:
            content = onnx_of(model)
            _write(folder / ONNX, lambda out: out.write(content))
    except ValueError as error:
        problems.append(str(error))
    made = [name for name in (WEIGHTS, PROGRAM, ONNX) if (folder / name).exists()]
    description = described(trained) | {"files": {name: file_hash(folder / name) for name in made}}
    write_text_atomic(folder / MODEL, json.dumps(description, indent=1, default=str) + "\n")
    return problems


def _is_export(model: Path) -> bool:
    """Return whether a model.json is one of `described`: other programs use the name too."""
    try:
        found = read_json(model)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"schema", "num_features", "prepare", "versions"} <= found.keys()


def _write(file: Path, save: Callable[[IO[bytes]], object]) -> None:
    """Write atomically. Torch writes to memory first, because its errors for a full disk cannot be recognised."""
    whole = io.BytesIO()
    save(whole)
    with open_atomic(file) as out:
        out.write(whole.getbuffer())


def described(trained: Trained) -> JsonDict:
    """Return the content of model.json."""
    settings, how = trained.settings, trained.settings.dataset
    prepare = dict(how.preparation) if isinstance(how, Preprocess) else None
    config = trained.model.config
    return {
        "schema": 1,
        "model": {"name": settings.names.get("model"), "class": type(config).__name__, **dataclasses.asdict(config)},
        "num_features": trained.num_features,
        "num_outputs": trained.model.out_dim,
        "dtype": str(TYPES[settings.precision].parameters).removeprefix("torch."),
        "prepare": prepare,
        "dataset": settings.names.get("dataset"),
        "strategy": settings.names.get("strategy"),
        "epoch": trained.epoch,
        "val": trained.val,
        "versions": versions(),
    }
