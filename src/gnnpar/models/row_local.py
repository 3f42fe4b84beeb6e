"""Refuse modules known to mix rows or to draw unkeyed random numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

_MIXING: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,  # batch and instance norms: statistics of all rows
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_NOISE: tuple[type[nn.Module], ...] = (nn.modules.dropout._DropoutNd, nn.RReLU)
# of torch_geometric.nn, by module and name, without importing PyG
_NORMS_PYG = ("BatchNorm", "HeteroBatchNorm", "InstanceNorm", "GraphNorm", "GraphSizeNorm", "PairNorm")
_NORMS_PYG += ("MeanSubtractionNorm", "DiffGroupNorm")
_POOLS_PYG = tuple(f"torch_geometric.nn.{folder}." for folder in ("pool", "aggr", "glob"))
REMEDY = "nn.LayerNorm and everything else that treats each row alone will do"


def refuse_noise(model: nn.Module) -> None:
    """Raise ValueError with the name of the first module with unkeyed noise (nn.Dropout is keyed)."""
    for name, module in model.named_modules():
        stacked = isinstance(module, nn.RNNBase) and module.num_layers > 1 and module.dropout > 0
        if stacked or (isinstance(module, _NOISE) and type(module) is not nn.Dropout):
            raise ValueError(
                f"{name} of the model is a {type(module).__name__} with noise that is not keyed by node; use nn.Dropout"
            )


def refuse_row_mixing(model: nn.Module, *, skipped: Sequence[nn.Module] = ()) -> None:
    """Raise ValueError with the name of the first module that mixes rows or draws unkeyed noise. skipped: modules to
    skip, which do not run or reduce rows through the graph."""
    for name, module in model.named_modules():
        if any(module is each for each in skipped):
            continue
        if why := row_mixing(module):
            raise ValueError(f"{name} of the model is a {type(module).__name__}, which {why}.")


def row_mixing(module: nn.Module) -> str:
    """Return why a module mixes rows; empty if it is not known to."""
    if isinstance(module, _NOISE):
        return "draws other numbers on every rank: call g.dropout(x, p), with masks keyed by node"
    if isinstance(module, nn.Softmax | nn.LogSoftmax) and module.dim == 0:
        return f"mixes the rows of all nodes, of which a rank holds a part: give it dim=-1; {REMEDY}"
    if isinstance(module, _MIXING) or _is_mixing_pyg(module):
        return f"mixes the rows of all nodes, of which a rank holds a part: {REMEDY}"
    return ""


def _is_mixing_pyg(module: nn.Module) -> bool:
    folder, name = type(module).__module__, type(module).__name__
    if folder.startswith("torch_geometric.nn.norm."):
        return name in _NORMS_PYG or (name == "LayerNorm" and vars(module).get("mode") == "graph")
    return folder.startswith(_POOLS_PYG)
