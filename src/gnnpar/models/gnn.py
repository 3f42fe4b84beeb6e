"""Container of every model (encoder, layers, decoder) and the base of all configurations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, runtime_checkable

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le, Lt
from torch import Tensor, nn

from gnnpar.files import require_memory
from gnnpar.folds.block import Rows, widened
from gnnpar.folds.edge_data import EdgeKind, EdgeSizes
from gnnpar.graph import Graph
from gnnpar.models.initial import Linear, construct
from gnnpar.models.norm import NormKind, norm_of, normalized
from gnnpar.models.row_local import refuse_row_mixing
from gnnpar.precision import mixed


@runtime_checkable
class EdgeReader(Protocol):
    """A convolution that may draw masks or read rows per edge."""

    needs_edge_ids: bool


@runtime_checkable
class SymmetricConv(Protocol):
    """A convolution that sums in-edges by D^-1/2 A D^-1/2 only, and leaves the scaling to the edge weights if
    `Local.normalised`."""

    takes_normalised: bool


Order = Literal["auto", "transform_first", "aggregate_first"]
Jump = Literal["none", "last", "cat", "max"]
Probability = Annotated[float, Ge(0.0), Lt(1.0)]
MOST_LAYERS = 10_000

_ENCODER_MASK, _DECODER_MASK = 1, 2  # dropout tags; a layer's own mask has tag 0


class ModelSource:
    """The configuration `model`: a ModelConfig or a PyG model.

    wraps: the module is the user's, stored as `net`, and runs on one graph at a time. in_one_piece: why the layers
    cannot run separately; empty if they can, or if unknown until the dataset sets the widths. edge_data: kinds of edge
    data that the model reads. takes_root: it normalises by roots of sums of edge weights. reads_degrees: it is built
    with the histogram of in-degrees. whole_neighborhoods: convolutions that need all in-edges of a row at once.
    moments, totals: modules that normalise by the mean and variance of all rows of a layer, or read sums over them.
    """

    wraps: ClassVar[bool] = False
    in_one_piece: ClassVar[str] = ""
    edge_data: ClassVar[frozenset[EdgeKind]] = frozenset()
    takes_root: ClassVar[bool] = False
    reads_degrees: ClassVar[bool] = False
    whole_neighborhoods: ClassVar[tuple[str, ...]] = ()
    moments: ClassVar[tuple[str, ...]] = ()
    totals: ClassVar[tuple[str, ...]] = ()
    num_layers: int
    input_dropout: float

    def aggregation_paths(self) -> list[str]:
        """Return a line for each convolution with a noteworthy aggregation path."""
        return []

    def cuts(self) -> list[str]:
        """Return a line for each noteworthy cut between two layers: the activations that a stage boundary sends."""
        return []

    def on(self, sizes: EdgeSizes) -> ModelSource:
        """Return this configuration with open fields filled from the dataset: number of edge types, width of edge
        attributes, histogram of in-degrees. Call it before `build`."""
        return self

    def build(self, in_dim: int, out_dim: int, *, seed: int, cached_first_layer: bool = False) -> GNN:
        """Build the model with initial weights that depend on `seed` alone."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelSource):
    """Base of model configurations. Fields are YAML keys; a model adds its own and a method that makes a convolution.

    encoder, decoder: a dense layer before and after. With neither, widths are F, hidden, ..., classes.
    norm: of a layer's output, per row (layer) or per column over all rows of the graph (batch).
    jump: input of the decoder. The last layer's rows (none, last), the concatenated rows of all layers (cat), or their
    maximum per column (max).
    dropout: on the input of every layer but the first. input_dropout: on the features.
    order: of a linear aggregation and its matrix. auto exchanges the narrower side.
    """

    num_layers: Annotated[int, Ge(1), Le(MOST_LAYERS)] = 2
    hidden: Annotated[int, Ge(1)] = 64
    dropout: Probability = 0.5
    input_dropout: Probability = 0.0
    norm: NormKind = "none"
    residual: bool = False
    encoder: Literal["none", "linear"] = "none"
    decoder: Literal["none", "linear"] = "none"
    order: Order = "auto"
    jump: Jump = "none"

    @property
    def moments(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("model.norm=batch",) if self.norm == "batch" else ()

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        """Return a module with forward (g, h, *rest of the activations) -> [N, out_dim]."""
        raise NotImplementedError(f"{type(self).__name__} does not say how a convolution is made")

    activation: ClassVar[Callable[[Tensor], Tensor]] = F.relu
    pre_activation: ClassVar[bool] = False
    carries_first: ClassVar[bool] = False  # whether every layer reads the encoder's output

    @property
    def carried_columns(self) -> int:
        """Width of the features that every layer reads in place of the encoder's output."""
        return 0

    def build(self, in_dim: int, out_dim: int, *, seed: int, cached_first_layer: bool = False) -> GNN:
        """Build the model with initial weights that depend on `seed` alone. ValueError if one of its modules cannot run
        on a part of the graph."""
        if cached_first_layer and self.encoder != "none":
            raise ValueError(
                f"first_layer=cached needs raw features in front of layer 0, but model.encoder={self.encoder} puts "
                "learned rows there: set model.encoder=none or first_layer=live."
            )
        inner = self.hidden * max(0, self.num_layers - 2)
        numbers = (in_dim + out_dim + inner) * self.matrices + self.hidden * self.num_layers * self.square_matrices
        nbytes = 8 * self.hidden * numbers  # a weight and its gradient
        size = f"a model with model.hidden={self.hidden}, model.num_layers={self.num_layers}, {in_dim} features"
        require_memory(nbytes, f"{size} and {out_dim} classes", "lower them")
        model = construct(lambda: self.module(in_dim, out_dim, cached_first_layer=cached_first_layer), seed)
        refuse_row_mixing(model, skipped=model.norms)
        return model

    def module(self, in_dim: int, out_dim: int, *, cached_first_layer: bool) -> GNN:
        """Return the module; a model with parts other than layers returns a subclass of GNN."""
        return GNN(self, in_dim, out_dim, cached_first_layer=cached_first_layer)

    @property
    def matrices(self) -> float:
        """Approximate number of weight matrices of a convolution."""
        return 1.0

    @property
    def square_matrices(self) -> float:
        """Number of hidden x hidden matrices of a convolution, independent of the widths of its rows."""
        return 0.0

    def aggregates_first(self, in_dim: int, out_dim: int, *, cached: bool) -> bool:
        """Return True if a linear aggregation comes before the matrix. Equal widths aggregate first, so that layer 0
        needs no gradient exchange."""
        if self.order == "auto":
            return cached or in_dim <= out_dim
        return self.order == "aggregate_first"

    def only_order(self, order: Order, why: str) -> None:
        """Raise ValueError if the configuration asks for the other order."""
        if self.order not in ("auto", order):
            raise ValueError(f"model.order={self.order} is not possible here: {why}. Use order=auto or order={order}.")


@dataclass(frozen=True, kw_only=True)
class ReadsAttributes(ModelConfig):
    """Configuration of a model that reads edge attributes. edge_dim: width of edge_attr. None: that of the dataset. 0:
    layers without edge attributes."""

    edge_dim: Annotated[int, Ge(0), Le(1_000_000)] | None = None
    edge_data = frozenset({"attr"})

    def on(self, sizes: EdgeSizes) -> Self:
        if self.edge_dim not in (None, sizes.attr):
            raise ValueError(
                f"model.edge_dim={self.edge_dim}, but edge_attr of the dataset has width {sizes.attr}; set it to null"
            )
        return replace(self, edge_dim=sizes.attr)


def attributes(g: Graph, width: int) -> Rows:
    """Return the edge operands: attributes of the in-edges, empty if `width` is 0. Shapes: ([E, width],)."""
    if not width:
        return ()
    if g.edge_attr is None or g.edge_attr.shape[1] != width:
        has = "none" if g.edge_attr is None else f"rows of {g.edge_attr.shape[1]}"
        raise ValueError(f"the model reads {width} attributes of each edge, and the graph has {has}")
    return (g.edge_attr,)


class Layer(nn.Module):
    """Dropout, conv, norm, activation (+ input); pre-activated: norm, activation, dropout, conv, + input."""

    def __init__(self, config: ModelConfig, in_dim: int, out_dim: int, *, index: int, last: bool, cached: bool) -> None:
        super().__init__()
        first = cached and index == 0
        self.index, self.jump = index, config.jump
        self.num_first = int(config.carries_first or config.carried_columns > 0)
        self.conv = config.conv(
            in_dim, out_dim, index=index, aggregate_first=config.aggregates_first(in_dim, out_dim, cached=first)
        )
        self.pre, self.plain = config.pre_activation, last
        self.p = config.input_dropout if index == 0 and config.encoder == "none" else config.dropout
        self.residual = (config.residual or config.pre_activation) and in_dim == out_dim
        normed = in_dim if self.pre else out_dim
        self.norm = None if last and not self.pre else norm_of(config.norm, normed)
        self.activate = type(config).activation

    def forward(self, g: Graph, activations: Rows) -> Rows:
        """Run the layer. Output rows have the type of the input rows."""
        h, *rest = activations
        first, jumped = rest[: self.num_first], rest[self.num_first :]
        with mixed(h):
            inside = self._bend(g, h) if self.pre else h
            out = self.conv(g, g.dropout(inside, self.p), *first).to(h.dtype)
            if not self.pre and not self.plain:
                out = self._bend(g, out)
        if self.residual:
            out = out + _first(h, out.shape[0])
        if self.index and self.jump in ("cat", "max"):  # h is the output of the previous layer
            jumped = [_first(rows, out.shape[0]) for rows in (*jumped, h)]
            jumped = jumped if self.jump == "cat" else [_largest(jumped)]
        return (out, *first, *jumped)

    def _bend(self, g: Graph, h: Tensor) -> Tensor:
        return self.activate(normalized(self.norm, g, h))


def _first(rows: Tensor, count: int) -> Tensor:
    """Return the first `count` rows, for a layer with fewer outputs than inputs (Graph.destinations)."""
    return rows if rows.shape[0] == count else rows[:count]


def _largest(rows: Sequence[Tensor]) -> Tensor:
    """Return the maximum per entry. For equal entries, the first one gets the gradient."""
    best, *others = rows
    for each in others:
        best = torch.where(each > best, each, best)
    return best


class GNN(nn.Module):
    """Encoder, layers and decoder. A pipeline stage runs a slice of `layers` and sends the activations between them.
    unanswered: node types with zero output rows. on_edges: name prefixes of modules that act on rows of edges."""

    unanswered: tuple[str, ...] = ()
    on_edges: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig, in_dim: int, out_dim: int, *, cached_first_layer: bool = False) -> None:
        super().__init__()
        self.config, self.in_dim, self.out_dim = config, in_dim, out_dim
        hidden, count = config.hidden, config.num_layers
        first = hidden if config.encoder == "linear" else in_dim
        last = hidden if config.decoder == "linear" else out_dim
        widths = [first, *[hidden] * (count - 1), last]
        if (config.carries_first or config.pre_activation) and len({*widths[:-1], widths[-1]}) > 1:
            raise ValueError(
                f"{type(config).__name__} adds rows of different layers, so all widths must be equal, got {widths}: "
                "set model.encoder=linear and model.decoder=linear."
            )
        if config.carried_columns >= in_dim:
            raise ValueError(
                f"model.num_node_types={config.carried_columns} reads so many columns at the end of the features, of "
                f"which there are {in_dim}"
            )
        self.widths = tuple(widths)  # layer i maps rows of width widths[i] to widths[i + 1]
        self.encoder = Linear(in_dim, hidden) if config.encoder == "linear" else None
        self.layers = nn.ModuleList(
            Layer(
                config,
                widths[i],
                widths[i + 1],
                index=i,
                cached=cached_first_layer,
                last=i == count - 1 and config.decoder == "none",
            )
            for i in range(count)
        )
        if config.jump != "none" and config.decoder == "none":
            raise ValueError(
                f"model.jump={config.jump} gives rows of model.hidden to a decoder; set model.decoder=linear"
            )
        read = hidden * count if config.jump == "cat" else hidden
        self.final_norm = norm_of(config.norm, read) if config.pre_activation else None
        self.decoder = Linear(read, out_dim) if config.decoder == "linear" else None

    def forward(self, g: Graph, x: Tensor) -> Tensor:
        """Return logits [N, out_dim] of the own rows of `g`."""
        activations = self.begin(g, x)
        for i in range(self.num_layers):
            activations = self.run_layer(i, g, activations)
        return self.end(g, activations)

    def run_layer(self, layer: int, g: Graph, activations: Rows) -> Rows:
        """Run one layer on its activations."""
        return self.layers[layer](g.at(layer), activations)

    def begin(self, g: Graph, x: Tensor) -> Rows:
        """Return the activations that enter the first layer, in the type of the features."""
        if self.encoder is None:
            return (x, *self._carried(x, x))
        with mixed(x):
            h = self.encoder(g.at(0).dropout(x, self.config.input_dropout, tag=_ENCODER_MASK))
        h = h if self.config.pre_activation else type(self.config).activation(h)
        return (h, *self._carried(x, h))

    def _carried(self, x: Tensor, first: Tensor) -> Rows:
        if columns := self.config.carried_columns:
            return (x[:, -columns:],)
        return (first,) if self.config.carries_first else ()

    def end(self, g: Graph, activations: Rows) -> Tensor:
        """Return the logits, in the type of the loss."""
        h, *rest = activations
        if self.decoder is None:
            return widened(h)
        if self.config.jump in ("cat", "max"):
            rows = (*rest[len(self._first_widths) :], h)
            h = torch.cat(rows, dim=1) if self.config.jump == "cat" else _largest(rows)
        g = g.at(self.num_layers - 1)
        with mixed(h):
            if self.config.pre_activation:
                h = type(self.config).activation(normalized(self.final_norm, g, h))
            return widened(self.decoder(g.dropout(h, self.config.dropout, tag=_DECODER_MASK)))

    def activation_widths(self, layer: int) -> tuple[int, ...]:
        """Return the widths of the activations that enter a layer, which a stage boundary before it sends."""
        made = self.widths[1:layer]  # outputs of earlier layers
        jumped = {"cat": made, "max": made[:1]}.get(self.config.jump, ())
        return (self.widths[layer], *self._first_widths, *jumped)

    def cut_before(self, layer: int) -> str:
        """Return a line about the stage boundary before a layer if it is noteworthy, else an empty string."""
        return ""

    def keep_layers(self, layers: Collection[int], *, first: bool, last: bool) -> None:
        """Drop all other layers. first, last: keep the modules before the first layer and after the last."""
        for i in range(self.num_layers):
            if i not in layers:
                self.layers[i] = nn.Identity()
        if not first:
            self.encoder = None
        if not last:
            self.decoder = self.final_norm = None

    @property
    def held(self) -> dict[str, Tensor]:
        """Return parameters and buffers under all of their names."""
        parameters, buffers = (each(remove_duplicate=False) for each in (self.named_parameters, self.named_buffers))
        return {name: tensor.detach() for name, tensor in (*parameters, *buffers)}

    @property
    def weights(self) -> dict[str, Any]:  # Any: of a module's extra state
        """Return the state_dict without tensors that modules compute from parameters.

        PyG's parametrized Linear writes its weight into the state_dict but does not load it. Read in evaluation mode:
        in training mode, reading a weight under spectral_norm changes its buffers.
        """

        def computed(module: str, _: str, leaf: str) -> bool:
            return isinstance(getattr(self.get_submodule(module), leaf, None), Tensor)

        held, modes = self.held, [(each, each.training) for each in self.modules()]
        try:
            for each, _ in modes:  # not by eval(): a module may override train()
                each.training = False
            found = self.state_dict().items()
            return {name: each for name, each in found if name in held or not computed(*name.rpartition("."))}
        finally:
            for each, mode in modes:
                each.training = mode

    @property
    def _first_widths(self) -> tuple[int, ...]:
        """Widths of the rows that every layer reads."""
        if columns := self.config.carried_columns:
            return (columns,)
        return (self.widths[0],) if self.config.carries_first else ()

    @property
    def norms(self) -> list[nn.Module]:
        """Return the norms of layers and the norm before the decoder."""
        return [
            norm for norm in (*(layer.norm for layer in self.layers), self.final_norm) if isinstance(norm, nn.Module)
        ]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def convolutions(self) -> list[object]:
        """Return the convolutions of all layers."""
        return [layer.conv for layer in self.layers]

    @property
    def needs_edge_ids(self) -> bool:
        """Return True if a layer draws masks or reads rows per edge."""
        return any(isinstance(conv, EdgeReader) and conv.needs_edge_ids for conv in self.convolutions)

    def takes_normalised(self, *, weighted: bool) -> bool:
        """Return True if all sums over in-edges are D^-1/2 A D^-1/2. weighted: edges have weights."""
        return all(isinstance(conv, SymmetricConv) and conv.takes_normalised for conv in self.convolutions)

    def layer_of(self, parameter: str) -> int | None:
        """Return the layer of a parameter, by its name: 0 for the encoder, None for the decoder."""
        head, *rest = parameter.split(".")
        return {"layers": int(rest[0]) if rest and rest[0].isdigit() else None, "encoder": 0}.get(head)
