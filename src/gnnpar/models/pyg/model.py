"""`model=pyg model.target=my_package.Net`: a PyG model, unchanged, under strategies that run a model in one piece."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from gnnpar.folds.aggregator import Aggregator, EdgeDropout
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.folds.edge_data import EdgeData, EdgeKind, EdgeSizes
from gnnpar.graph import Graph, Message
from gnnpar.models.gnn import GNN
from gnnpar.models.initial import construct
from gnnpar.models.pyg.dropout import keyed_dropout
from gnnpar.models.pyg.propagate import Edges, Neighborhood, NormalizedSum, Way, Weights, drops_edges, way_of
from gnnpar.models.row_local import refuse_row_mixing
from gnnpar.targets import locate

_IN = ("in_channels", "in_dim", "in_features", "input_dim", "num_features", "num_node_features")
_OUT = ("out_channels", "out_dim", "out_features", "output_dim", "num_classes")


@dataclass(frozen=True, kw_only=True)
class PyG:
    """Fields = YAML keys. `target`: a class, or a function that returns a torch.nn.Module, of forward(x, edge_index) or
    of forward(x, edge_index, edge_weight).

    `kwargs` are its arguments; the widths of features and logits are filled in where it has an argument for them
    (in_channels, out_channels, num_features, num_classes, ...) that `kwargs` leaves out. `self_loops`: of the dataset.
    """

    target: str | None = None
    kwargs: Mapping[str, object] = field(default_factory=dict, hash=False)
    self_loops: bool = True
    in_one_piece: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.target:
            raise ValueError("model.target is not set; name the class of the model, e.g. model.target=my_package.Net")

    @property
    def input_dropout(self) -> float:
        return 0.0

    @property
    def num_layers(self) -> int:
        return len(_convolutions(self._sample()))

    @property
    def edge_data(self) -> frozenset[EdgeKind]:
        return frozenset() if weight_argument(self._sample()) is None else frozenset({"weight"})

    @property
    def takes_root(self) -> bool:
        found = _convolutions(self._sample()).items()
        return any(isinstance(_way(name, conv, self), NormalizedSum) for name, conv in found)

    def on(self, sizes: EdgeSizes) -> Self:
        return self

    @property
    def whole_neighborhoods(self) -> tuple[str, ...]:
        found = _convolutions(self._sample()).items()
        return tuple(name for name, conv in found if isinstance(_way(name, conv, self), Neighborhood))

    def ways(self) -> list[str]:
        """A line a convolution: how it aggregates."""
        found = _convolutions(self._sample()).items()
        return [f"{name}: {type(conv).__name__}, {_way(name, conv, self).title}" for name, conv in found]

    def _sample(self) -> nn.Module:
        """The module for some widths, to look at."""
        with torch.random.fork_rng(devices=[]):
            return _make(self.target, tuple(self.kwargs.items()), 8, 4)

    def build(self, in_dim: int, out_dim: int, *, seed: int, cached_first_layer: bool = False) -> PyGNet:
        """The model with the initial weights that its modules make, drawn from a generator that depends on `seed`
        alone. ValueError where it is no model of forward(x, edge_index), or holds what cannot run on a part."""
        arguments = tuple(self.kwargs.items())
        model = construct(lambda: PyGNet(self, _make(self.target, arguments, in_dim, out_dim), in_dim, out_dim), seed)
        ends = [conv.aggr_module for conv in model.convs.values() if isinstance(conv.aggr_module, nn.Module)]
        aside = [module for aggregation in ends for module in aggregation.modules()]
        refuse_row_mixing(model, keyed_dropout=True, aside=aside)
        model.measure()
        return model


def _make(target: str | None, arguments: tuple, in_dim: int, out_dim: int) -> nn.Module:
    assert target is not None
    try:
        factory = locate(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"model.target={target} cannot be imported: {error}") from error
    if not callable(factory):
        raise ValueError(f"model.target={target} is a {type(factory).__name__}; name a class or a function")
    given = dict(arguments)
    names = list(inspect.signature(factory).parameters)
    for known, width in ((_IN, in_dim), (_OUT, out_dim)):
        if free := [name for name in names if name in known]:
            given.setdefault(free[0], width)
    try:
        net = factory(**given)
    except (TypeError, ValueError, AssertionError) as error:
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(f"model.target={target} cannot be made with {shown}: {error}; set model.kwargs") from error
    if not isinstance(net, nn.Module):
        raise ValueError(f"model.target={target} gives a {type(net).__name__}, not a torch.nn.Module")
    parameters = list(inspect.signature(net.forward).parameters.values())
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in (2, 3, 4)]
    unknown = [name for name in needed[2:] if name != weight_argument(net)]
    if len(parameters) < 2 or unknown or (parameters[1].name not in ("edge_index", "adj_t", "edges")):
        raise ValueError(
            f"model.target={target} has forward({', '.join(each.name for each in parameters)}); gnnpar calls "
            "forward(x, edge_index), and forward(x, edge_index, edge_weight) where it takes that"
        )
    return net


def weight_argument(net: nn.Module) -> str | None:
    """The argument of forward that takes the weights of edges."""
    names = list(inspect.signature(net.forward).parameters)[2:]
    return next((name for name in names if name in ("edge_weight", "edge_weights")), None)


def _convolutions(net: nn.Module) -> dict[str, MessagePassing]:
    """The outermost convolutions by name, in the order in which modules are registered."""
    return {name: conv for name, conv in net.named_modules() if isinstance(conv, MessagePassing)}


class PyGNet(GNN):
    """A user's module `net`, one layer a convolution; it runs in one piece."""

    def __init__(self, config: PyG, net: nn.Module, in_dim: int, out_dim: int) -> None:
        nn.Module.__init__(self)  # GNN makes layers of a configuration
        self.source, self.in_dim, self.out_dim = config, in_dim, out_dim
        self.config = config  # pyright: ignore[reportAttributeAccessIssue] - what a GNN of layers has is read by engines of layers
        self.net = net
        self.ways = {name: _way(name, conv, config) for name, conv in self.convs.items()}
        self.widths = (in_dim, *[0] * len(self.ways))

    @property
    def convs(self) -> dict[str, MessagePassing]:
        return _convolutions(self.net)

    def forward(self, g: Graph, x: Tensor) -> Tensor:
        """Logits [N, out_dim] of the rows g owns."""
        training = g.edge_dropout(0.5) is not None
        self.net.train(training)
        with keyed_dropout(g, x.shape[0]) if training else nullcontext(), self._folding(g):
            return self.net(x, Edges(), **self._weights(g))

    def _weights(self, g: Graph) -> dict[str, Weights]:
        """The argument for weights, where the graph has some or forward needs one."""
        name = weight_argument(self.net)
        if name is None:
            return {}
        needed = inspect.signature(self.net.forward).parameters[name].default is inspect.Parameter.empty
        return {name: Weights()} if needed or g.in_weight is not None else {}

    @contextmanager
    def _folding(self, g: Graph) -> Iterator[None]:
        """Inside, convolutions aggregate through `g`: instance attributes stand before a class's methods."""
        replaced: list[tuple[MessagePassing, str]] = []
        try:
            for layer, (name, conv) in enumerate(self.convs.items()):
                for method, body in self.ways[name].hooks(conv, g.at(layer)).items():
                    vars(conv)[method] = body
                    replaced.append((conv, method))
            yield
        finally:
            for conv, method in replaced:
                del vars(conv)[method]

    def measure(self) -> None:
        """Find the widths of layers, and what cannot run, on one node."""
        widths: dict[str, int] = {}

        def note(name: str, output: object) -> None:
            widths[name] = output.shape[-1] if isinstance(output, Tensor) else 0

        hooks = [
            conv.register_forward_hook(lambda _, __, output, name=name: note(name, output))
            for name, conv in self.convs.items()
        ]
        parameter = next(self.net.parameters(), torch.zeros(0))
        x = torch.zeros(1, self.in_dim, dtype=parameter.dtype)
        try:
            with torch.no_grad():
                out = self(OneNode(x), x)
                if weight_argument(self.net) is not None:
                    out = self(OneNode(x, torch.ones(1, dtype=x.dtype)), x)
        except ValueError as error:
            raise ValueError(f"model.target={self.source.target}: {error}.") from error
        except (TypeError, RuntimeError, AttributeError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(
                f"model.target={self.source.target} cannot run on {self.in_dim} features: {type(error).__name__}: "
                f"{lines[0][:200]}; see model.kwargs"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        if not isinstance(out, Tensor) or out.shape != (1, self.out_dim):
            got = list(out.shape[1:]) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"model.target={self.source.target} gives {got} for each node, and the task needs {self.out_dim} "
                "logits; set model.kwargs"
            )
        if unused := [name for name in self.ways if name not in widths]:
            raise ValueError(f"model.target={self.source.target}: {unused[0]} of the model is not used in forward")
        self.widths = (self.in_dim, *(widths[name] for name in self.ways))

    @property
    def num_layers(self) -> int:
        return len(self.ways)

    @property
    def convolutions(self) -> list[object]:
        return list(self.convs.values())

    @property
    def needs_edge_ids(self) -> bool:
        return any(drops_edges(conv) for conv in self.convs.values())


def _way(name: str, conv: MessagePassing, config: PyG) -> Way:
    try:
        return way_of(conv, self_loops=config.self_loops)
    except ValueError as error:
        raise ValueError(f"{name} of model.target={config.target} ({type(conv).__name__}) {error}.") from error


class OneNode:
    """A graph of one node and its self loop, in evaluation."""

    def __init__(self, like: Tensor, in_weight: Tensor | None = None) -> None:
        self.node_ids = torch.zeros(1, dtype=torch.int64)
        self.in_degree = torch.ones(1, dtype=like.dtype)
        self.in_weight = in_weight
        self.edge_ids = self.node_ids
        weight = None if in_weight is None else torch.ones_like(in_weight)
        self._block = Block.from_edges(
            self.node_ids,
            self.node_ids,
            num_dst=1,
            num_src=1,
            src_ids=self.node_ids,
            edges=EdgeData(ids=self.edge_ids, weight=weight),
        )

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        return x

    def type_degree(self, types: int) -> Tensor:
        return self.in_degree[:, None].expand(-1, types)

    def at(self, layer: int) -> Self:
        return self

    def source(self, message: Message, *rows: Tensor) -> Rows:
        return message(self, *rows)

    def destinations(self, *rows: Tensor) -> tuple[Self, Rows]:
        return self, rows

    def edge_dropout(self, p: float, *, tag: int = 0) -> EdgeDropout | None:
        return None

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        x = Operands(src, dst, edge, shared)
        return agg.finish(agg.update(agg.init(1, x), self._block, x))[0]
