"""`model=pyg model.target=my_package.Net`: a PyG model, unchanged."""

# properties of a PyG model stand for class variables of other models
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import copy
import inspect
import random
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar, Literal

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing, RGATConv, SuperGATConv
from torch_geometric.nn.models.basic_gnn import PNA, BasicGNN

from gnnpar.comm.world import reason_of
from gnnpar.files import require_memory
from gnnpar.folds.block import Rows, widened
from gnnpar.folds.edge_data import EdgeKind, EdgeSizes, Schema, SelfLoops
from gnnpar.graph import Graph
from gnnpar.models.gnn import GNN, MOST_LAYERS, ModelSource
from gnnpar.models.initial import construct
from gnnpar.models.pyg import hetero
from gnnpar.models.pyg.cuts import Cuts, columns, cut, example, title
from gnnpar.models.pyg.hetero import ANY_SCHEMA, reads_dictionaries
from gnnpar.models.pyg.marks import EdgeRows, Edges, LocalEdges, Refused, Types, Weights
from gnnpar.models.pyg.nested import mapped, mapped_call, replaced
from gnnpar.models.pyg.probe_graph import ProbeGraph
from gnnpar.models.pyg.propagate import Forward, Lowering, NormalizedSum, StandIn, adds_loops, lowering_of
from gnnpar.models.pyg.rows import GlobalReductions, Layout, plain_rows
from gnnpar.models.pyg.substitutes import IN_EVALUATION, LAST_TAG, no_dropout, substituted
from gnnpar.models.row_local import refuse_noise
from gnnpar.paths import locate
from gnnpar.precision import is_narrow, mixed
from gnnpar.seeding import torch_seeded

_IN = ("in_channels", "in_dim", "in_features", "input_dim", "num_features", "num_node_features")
_EDGE = ("edge_dim", "edge_channels", "edge_features", "num_edge_features")
_TYPES = ("num_relations", "num_edge_types")
_OUT = ("out_channels", "out_dim", "out_features", "output_dim", "num_classes")
_LAZY = -1  # a width that PyG's lazy modules infer from their input
_SCHEMA: dict[str, Callable[[Schema], object]] = {
    "metadata": lambda schema: (list(schema.names), list(schema.edges)),
    "node_types": lambda schema: list(schema.names),
}
_BY_TYPE = "runs in one piece: it reads dictionaries by type"
_PROBE_NODES = 12  # nodes of the probe graph
_DEGREES = "deg"  # argument of PNAConv and DegreeScalerAggregation: a histogram of in-degrees


@dataclass(frozen=True, kw_only=True)
class PyG(ModelSource):
    """Configuration of a PyG model. Fields are YAML keys.

    target: a class, or a function that returns a torch.nn.Module, with forward(x, edge_index) and any of edge_weight,
    edge_attr and edge_type, or with forward(x_dict, edge_index_dict) and edge_weight_dict or edge_attr_dict.
    kwargs: arguments of `target`. Arguments for the widths of features, logits and edge_attr and for the number of edge
    types (in_channels, out_channels, num_features, num_classes, edge_dim, num_relations, ...) are filled in unless
    `kwargs` sets them. So is a required `deg`, the histogram of in-degrees [largest + 1]. A heterogeneous model gets
    `metadata`, and -1 for the width of features, which PyG's lazy modules infer.
    self_loops: of the dataset; auto: see `loops`. edge_dim: width of edge_attr. edge_types: number of edge types. None:
    as in the dataset. nodes, types: number of nodes and schema of a heterogeneous model, set by `on`; 0, None: unknown.
    """

    target: str | None = None
    kwargs: Mapping[str, object] = field(default_factory=dict, hash=False)
    self_loops: SelfLoops | Literal["auto"] = "auto"
    edge_dim: int | None = None
    edge_types: int | None = None
    nodes: int = 0
    types: Schema | None = None
    wraps: ClassVar[bool] = True
    input_dropout = 0.0

    def __post_init__(self) -> None:
        if not self.target:
            raise ValueError("model.target is not set; name the class of the model, e.g. model.target=my_package.Net")
        if not isinstance(self.kwargs, Mapping):
            raise ValueError(
                f"kwargs are arguments by name; a {type(self.kwargs).__name__} is none: remove its _target_"
            )
        if isinstance(layers := self.kwargs.get("num_layers"), int) and layers > MOST_LAYERS:
            raise ValueError(f"model.kwargs.num_layers={layers} is more than {MOST_LAYERS}; lower it")

    @property
    def reads_degrees(self) -> bool:
        return _DEGREES not in self.kwargs and _needs_degrees(_located(self.target))

    @property
    def num_layers(self) -> int:
        return len(_convolutions(self._sample()))

    @property
    def sample_schema(self) -> Schema | None:
        """Return `types`, or without a dataset a schema on which the model runs; None if it is not heterogeneous."""
        net = self._sample()
        return (self.types or hetero.schema_for(net)) if reads_dictionaries(net) else None

    @property
    def edge_data(self) -> frozenset[EdgeKind]:
        net = self._sample()
        return frozenset({*edge_arguments(net), "type"} if reads_dictionaries(net) else edge_arguments(net))

    @cached_property
    def loops(self) -> SelfLoops:
        """Value of dataset.self_loops=auto: true if all convolutions add one self loop per node and fold the result,
        else keep (the graph as given)."""
        with suppress(ValueError):
            net = self._sample()
            convs = [] if reads_dictionaries(net) else list(_convolutions(net).values())
            if convs and all(map(adds_loops, convs)):
                looped, kept = (replace(self, self_loops=each)._run_sample() for each in (True, "keep"))
                return True if looped is not None or kept is None else "keep"
        return "keep"

    @property
    def takes_root(self) -> bool:
        return any(isinstance(each, NormalizedSum) for each in self.lowerings_of(self._sample()).values())

    def on(self, sizes: EdgeSizes) -> PyG:
        if self.types is not None:
            return self
        if self.edge_dim not in (None, sizes.attr):
            raise ValueError(f"model.edge_dim={self.edge_dim}, and the dataset's edge_attr has width {sizes.attr}")
        if self.edge_types is not None and self.edge_types < sizes.types:
            raise ValueError(f"model.edge_types={self.edge_types}, and the dataset's edges have {sizes.types} types")
        types = sizes.types if self.edge_types is None else self.edge_types
        kwargs = dict(self.kwargs)
        if self.reads_degrees:
            if not sizes.degrees:
                raise ValueError(f"model.target={self.target} needs {_DEGREES}, and in-degrees were not counted")
            counts = dict(sizes.degrees)
            largest = max(counts)
            require_memory(16 * largest, f"the histogram of in-degrees up to {largest}", "give a smaller graph")
            kwargs[_DEGREES] = [counts.get(degree, 0) for degree in range(largest + 1)]
        given = replace(self, kwargs=kwargs, edge_dim=sizes.attr, edge_types=types)
        if not reads_dictionaries(self._sample(sizes.schema)):
            loops: SelfLoops = False if self.self_loops == "keep" and not sizes.loops else self._given_loops
            return replace(given, self_loops=loops, nodes=sum(count for _, count in sizes.degrees))
        if sizes.schema is None:
            raise self._lacks_schema()
        loops = "keep" if self._given_loops is not False and sizes.loops else False
        return replace(given, self_loops=loops, types=sizes.schema)

    @property
    def _given_loops(self) -> SelfLoops:
        return self.loops if self.self_loops == "auto" else self.self_loops

    def _lacks_schema(self) -> ValueError:
        return ValueError(
            f"model.target={self.target} reads dictionaries by type (HeteroConv, HGTConv, to_hetero), and the dataset "
            "does not say of which types its nodes are; give a HeteroData, in memory or as dataset=pt"
        )

    @property
    def whole_neighborhoods(self) -> tuple[str, ...]:
        return tuple(name for name, lowering in self.lowerings_of(self._sample()).items() if lowering.whole)

    @property
    def moments(self) -> tuple[str, ...]:
        return tuple(name for name, each in self._sample().named_modules() if type(each) is nn.BatchNorm1d)

    @property
    def totals(self) -> tuple[str, ...]:
        net = self._run_sample()
        return () if net is None else net.totals

    def aggregation_paths(self) -> list[str]:
        """Return a line per convolution with its aggregation path, and one per module that reduces all nodes' rows."""
        net = self._sample()
        found = self.lowerings_of(net).items()
        paths = [f"{name}: {type(net.get_submodule(name)).__name__}, {each.title}" for name, each in found]
        return paths + [f"{reader}: reads the whole graph" for reader in self.totals]

    def lowerings_of(self, net: nn.Module) -> dict[str, Lowering]:
        """Return the aggregation path of each convolution. ValueError names a convolution that has none."""
        found, loops = dict[str, Lowering](), self._given_loops
        for name, conv in _convolutions(net).items():
            try:
                found[name] = hetero.hetero_lowering(conv) or lowering_of(conv, self_loops=loops)
            except ValueError as error:
                title = f"{name} of model.target={self.target} ({type(conv).__name__})"
                raise ValueError(f"{title} {error}.") from error
        return found

    @property
    def in_one_piece(self) -> str:
        if reads_dictionaries(self._sample()):
            return f"{self.target} {_BY_TYPE}"
        try:
            if (net := self._run_sample()) is not None:
                net.cuts  # noqa: B018 - records the cuts, or raises
        except ValueError as error:
            return str(error)
        return ""

    def cuts(self) -> list[str]:
        """Return a line per cut. Empty without cuts, or if cuts are unknown before the dataset sets the widths."""
        net = None if self.in_one_piece else self._run_sample()
        return [] if net is None else [net.cut_before(layer) for layer in range(1, net.num_layers)]

    def _run_sample(self) -> PyGNet | None:
        """Return the model after a run with sample widths; None if it needs features of other widths."""
        in_dim, out_dim = (
            next((width for name in names if isinstance(width := self.kwargs.get(name), int)), usual)
            for names, usual in ((_IN, 8), (_OUT, 4))
        )
        in_dim = in_dim if self.types is None else self.types.width
        try:
            with torch_seeded(0):
                net = PyGNet(self, self._make(in_dim, out_dim), in_dim, out_dim)
                net.measure()
        except ValueError:
            return None
        return net

    def _sample(self, schema: Schema | None = None) -> nn.Module:
        """Build the module with sample widths. A class that looks up types by name fails without its own schema; return
        `NeedsSchema` for it."""
        factory, schema = _located(self.target), schema or self.types
        try:
            with torch_seeded(0):
                return self._make(8, 4, schema)
        except ValueError as error:
            by_name = isinstance(error.__cause__, LookupError | ValueError | AttributeError)
            if schema is not None or not by_name or not _SCHEMA.keys() & inspect.signature(factory).parameters.keys():
                raise
        return hetero.NeedsSchema(factory)

    def _make(self, in_dim: int, out_dim: int, schema: Schema | None = None) -> nn.Module:
        """Call the user's class or function with `kwargs` and the arguments that its signature names."""
        factory, given = _located(self.target), dict(self.kwargs)
        if _needs_degrees(factory):
            given.setdefault(_DEGREES, [0, 1])  # for checks; `on` sets the graph's histogram
        taken, types = inspect.signature(factory).parameters, schema or self.types or ANY_SCHEMA
        by_type = {name: of(types) for name, of in _SCHEMA.items() if name in taken and name not in given}
        given |= by_type

        def create(width: int) -> nn.Module:
            return self._create(factory, given | _widths(taken, given, width, out_dim, self.edge_dim, self.edge_types))

        net = create(_LAZY if by_type else in_dim)
        if not by_type and reads_dictionaries(net):
            net = create(_LAZY)
        parameters = list(inspect.signature(net.forward).parameters.values())
        needed = [each.name for each in parameters if each.default is each.empty and each.kind not in (2, 3, 4)]
        unknown = [name for name in needed[2:] if name not in edge_arguments(net).values() and name != "batch"]
        if unknown or len(parameters) < 2 or parameters[0].name == "data":
            raise ValueError(
                f"model.target={self.target} has forward({', '.join(each.name for each in parameters)}); gnnpar calls "
                "forward(x, edge_index), with edge_weight, edge_attr and edge_type where it takes them, or "
                "forward(x_dict, edge_index_dict), with edge_weight_dict or edge_attr_dict"
            )
        return net

    def _create(self, factory: Callable[..., object], given: Mapping[str, object]) -> nn.Module:
        try:
            listed = given.get(_DEGREES)
            degrees = {_DEGREES: torch.tensor(listed)} if isinstance(listed, list) else {}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # PyG warns of node types without in-edges
                net = factory(**{**given, **degrees})
        except Exception as error:  # the class may raise anything
            shown = ", ".join(f"{name}={str(value)[:80]}" for name, value in given.items())
            raise ValueError(
                f"model.target={self.target} cannot be made with {shown}: {_why(error)}; set model.kwargs"
            ) from error
        if not isinstance(net, nn.Module):
            raise ValueError(f"model.target={self.target} gives a {type(net).__name__}, not a torch.nn.Module")
        return net

    def build(self, in_dim: int, out_dim: int, *, seed: int, cached_first_layer: bool = False) -> PyGNet:
        """Build the model with its modules' own initialisation; the random generator depends only on `seed`.
        ValueError if it has no forward(x, edge_index), or if a module cannot run on a part of the graph."""

        def make() -> PyGNet:
            model = PyGNet(self, self._make(in_dim, out_dim), in_dim, out_dim)
            if model.schema is None and reads_dictionaries(model.net):
                raise self._lacks_schema()
            refuse_noise(model)
            for name, parameter in model.net.named_parameters():
                if parameter._post_accumulate_grad_hooks:
                    raise ValueError(
                        f"{name} has a hook of register_post_accumulate_grad_hook, which does not run here"
                    )
            for each in model.net.modules():
                if isinstance(each, RGATConv):  # PyG's reset_parameters computes these values but does not assign them
                    nn.init.constant_(each.l2, 1 / each.out_channels)
            model.measure()  # initialises lazy modules
            if model.gives != (out_dim,):
                raise ValueError(
                    f"model.target={self.target} gives {list(model.gives)} for each node, and the task needs {out_dim} "
                    "logits; set model.kwargs"
                )
            return model

        return construct(make, seed)


def _located(target: str | None) -> Callable[..., object]:
    """Return the class or function named by `model.target`. ValueError if it is neither, or missing."""
    assert target is not None
    try:
        factory = locate(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"model.target={target} cannot be imported: {error}") from error
    if not callable(factory):
        raise ValueError(f"model.target={target} is a {type(factory).__name__}; name a class or a function")
    return factory


def required(function: Callable[..., object]) -> list[str]:
    """Return the names of arguments without a default."""
    return [name for name, each in inspect.signature(function).parameters.items() if each.default is each.empty]


def _needs_degrees(factory: Callable[..., object]) -> bool:
    """Return True if `deg` is a required argument. PyG's PNA takes it in **kwargs."""
    taken = inspect.signature(factory).parameters
    if _DEGREES not in taken and any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return isinstance(factory, type) and issubclass(factory, PNA)
    return _DEGREES in required(factory)


def _widths(taken: Mapping[str, inspect.Parameter], given: Mapping[str, object], *sizes: int | None) -> dict[str, int]:
    """Return the arguments for `sizes` that `taken` names and `given` lacks. sizes: widths of features, logits and
    edge_attr, number of edge types."""
    found: dict[str, int] = {}
    for known, width in zip((_IN, _OUT, _EDGE, _TYPES), sizes, strict=True):
        free = [name for name in taken if name in known]
        if free and free[0] not in given and (width or taken[free[0]].default is inspect.Parameter.empty):
            found[free[0]] = width or 1  # if the dataset has no attributes, forward raises
    return found


def _why(error: Exception) -> str:
    """Return the first line of an error, formatted for an error message of gnnpar."""
    lines = str(error).strip().splitlines() or ["it gives no reason"]
    plain = isinstance(error, (ValueError, AssertionError))
    return lines[0][:200] if plain else reason_of(error)[:300]


def _python_noise() -> object:
    """Return the states of Python's and NumPy's random generators."""
    return random.getstate(), repr(numpy.random.get_state())


_WEIGHT_NAMES = ("edge_weight", "edge_weights", "edge_weight_dict", "edge_weights_dict")
_ARGUMENTS: dict[str, EdgeKind] = {
    **dict.fromkeys(_WEIGHT_NAMES, "weight"),
    **dict.fromkeys(("edge_attr", "edge_attr_dict"), "attr"),
    "edge_type": "type",
}
_EDGE_DATA: dict[EdgeKind, tuple[Callable[[LocalEdges], Tensor], str]] = {
    "weight": (Weights.of, "weights"),
    "type": (Types.of, "types"),
    "attr": (EdgeRows.attributes, "attributes"),
}


def edge_arguments(net: nn.Module) -> dict[EdgeKind, str]:
    """Return the arguments of forward that take edge data, by kind. PyG's own models have all of them; omit the ones
    that their convolutions do not read."""
    names = list(inspect.signature(net.forward).parameters)[2:]
    found: dict[EdgeKind, str] = {_ARGUMENTS[name]: name for name in reversed(names) if name in _ARGUMENTS}
    if isinstance(net, BasicGNN):
        if not net.supports_edge_weight:
            found.pop("weight", None)
        if not (net.supports_edge_attr and any(vars(conv).get("edge_dim") for conv in _convolutions(net).values())):
            found.pop("attr", None)
    return found


def _convolutions(net: nn.Module) -> dict[str, MessagePassing]:
    """Return the outermost convolutions by name, in order of registration."""
    return {name: conv for name, conv in net.named_modules() if isinstance(conv, MessagePassing)}


def _on_own_rows(name: str, forward: Forward, rows: GlobalReductions | None, dtype: torch.dtype) -> Forward:
    """Return a convolution's forward that takes node rows without their mark and marks its output. Round the output (a
    tensor or a dictionary of tensors) to a narrow dtype; keep a tuple. Prefix refusals with `name`."""

    def run(*args: object, **kwargs: object) -> object:
        if rows is not None:
            args, kwargs = mapped_call(args, kwargs, plain_rows)
        try:
            out = forward(*args, **kwargs)
        except Refused as error:
            raise ValueError(f"{name} {error}") from error
        if is_narrow(dtype) and not isinstance(out, tuple):
            out = mapped(out, lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) else leaf)
        return out if rows is None else mapped(out, rows.marked)  # also attention weights returned with the rows

    return run


def answer_of(out: object, *, typed: bool) -> object:
    """Return the first entry of a tuple, or `logits`, else the first entry, of a dictionary not keyed by node type."""
    if isinstance(out, tuple | list) and out:
        return out[0]
    return out.get("logits", next(iter(out.values()), None)) if isinstance(out, dict) and not typed else out


class PyGNet(GNN):
    """A user's module `net` with a layer per convolution. It runs layer by layer if it can be cut, else in one piece.
    answers: node types for which a heterogeneous model returns logits."""

    config: PyG  # only layer engines read a ModelConfig

    def __init__(self, config: PyG, net: nn.Module, in_dim: int, out_dim: int) -> None:
        nn.Module.__init__(self)  # GNN makes layers of a configuration
        self.config, self.in_dim, self.out_dim = config, in_dim, out_dim
        self.net = net
        self.lowerings = config.lowerings_of(net)
        self.widths, self.gives = (in_dim, *[0] * len(self.lowerings)), (out_dim,)
        self.schema, self.answers = config.types, tuple[str, ...]()
        if self.schema is not None and self.schema.width != in_dim:
            raise ValueError(f"rows have {in_dim} columns, and those of its types have {self.schema.width}")
        self._cuts: Cuts | None = None
        self.totals: tuple[str, ...] = ()  # modules that reduce the rows of all nodes
        self._measuring = False
        self.reads_edges = False  # True if forward reads edges outside convolutions

    @property
    def on_edges(self) -> tuple[str, ...]:
        return tuple(f"net.{name}." for name in self.convs)

    @property
    def convs(self) -> dict[str, MessagePassing]:
        return _convolutions(self.net)

    def forward(self, g: Graph, x: Tensor) -> Tensor:
        """Return logits [N, out_dim] of the own rows of `g`: of the first entry of a tuple that the user's forward
        gives, of `logits` or the first of a dict."""
        training, rows = self._begins(g), None
        layout = None if self.schema is None else Layout.of(self.schema, x)
        hooked = [name for name, parameter in self.net.named_parameters() if parameter._backward_hooks]
        if hooked and len(g.node_ids) != g.num_nodes:
            raise ValueError(f"a hook of {hooked[0]}'s gradient (register_hook) would see the share of one rank")
        if self._measuring or self.totals:
            names = {id(module): name for name, module in self.named_modules()} if self._measuring else {}
            rows = GlobalReductions(g.at(0), layout and [len(rows) for rows in layout.rows], names)
        edges = LocalEdges(g.at(0))
        features, index = x if rows is None else rows.marked(x), Edges.of(edges)
        if layout is not None:
            features, index = layout.features(x), hetero.by_type(hetero.RelationEdges.of, g, layout)
        given = self._edge_data(edges, layout)
        if layout is None and "batch" in required(self.net.forward):
            given["batch"] = torch.zeros_like(g.node_ids)
        with self._folding(g, x, layout, rows=rows, after=LAST_TAG if training else None):
            out = answer_of(self.net(features, index, **given), typed=layout is not None)
        self.reads_edges |= edges.read
        if rows is not None and self._measuring:
            self.totals = tuple({**dict.fromkeys(self.totals), **rows.readers})
        if layout is not None:
            answers = layout.answers(out, self.out_dim)
            self.answers, self.unanswered = tuple(answers), tuple(n for n in layout.schema.names if n not in answers)
            return widened(layout.logits(answers))
        if isinstance(out, EdgeRows):
            raise ValueError("the model adds rows of edges to rows of nodes; hand edge_attr to convolutions alone")
        out = plain_rows(out)
        assert isinstance(out, Tensor)
        return widened(out)

    def takes_normalised(self, *, weighted: bool) -> bool:
        """Return False with edge weights, since only running forward shows which convolution gets them."""
        plain = not weighted and self.schema is None
        return plain and all(isinstance(each, NormalizedSum) and each.loops for each in self.lowerings.values())

    def _begins(self, g: Graph) -> bool:
        """Set the mode of the user's module; return True if it trains."""
        training = g.edge_dropout(0.5) is not None
        self.net.train(training)
        return training

    def _edge_data(self, edges: LocalEdges, layout: Layout | None = None) -> dict[str, object]:
        """Return forward's edge arguments that the graph has data for or that are required."""
        g, given, types = edges.g, dict[str, object](), self.config.edge_types
        for kind, name in edge_arguments(self.net).items():
            of, title = _EDGE_DATA[kind]
            needed = name in required(self.net.forward)
            has = bool(types) if kind == "type" else (g.in_weight if kind == "weight" else g.edge_attr) is not None
            if needed and (types == 0 if kind == "type" else kind == "attr" and not has):
                raise ValueError(f"forward needs {name}, and the edges of the dataset have no {title}")
            if needed or has:
                given[name] = of(edges) if layout is None or kind == "type" else hetero.by_type(of, g, layout)
        return given

    @contextmanager
    def _folding(
        self,
        g: Graph,
        x: Tensor,
        layout: Layout | None = None,
        *,
        after: int | None,
        layer: int | None = None,
        rows: GlobalReductions | None = None,
    ) -> Iterator[None]:
        """Within the context, convolutions (or only the one of `layer`) run on `g`: instance attributes replace the
        class's methods. If the type of the input rows `x` is narrow, round outputs to it. after: tag of the last
        dropout so far; None: draw no masks.
        """
        convs = self.convs
        with ExitStack() as stack:
            stack.enter_context(mixed(x))
            stack.enter_context(substituted(self.net, g, x.shape[0], layout, rows, after))
            for i, (name, lowering) in enumerate(self.lowerings.items()):
                if layer not in (None, i):
                    continue
                conv, view = convs[name], g.at(i)
                if layout is None:
                    forward = lowering.forward(conv, view, conv.forward)
                else:
                    forward = hetero.typed_forward(lowering, conv, view, layout, conv.forward)
                marks = rows if layout is None else None
                forward = _on_own_rows(f"{name} ({type(conv).__name__})", forward, marks, x.dtype)
                forward = forward if "forward" in vars(conv) else StandIn(forward)
                stack.enter_context(replaced(conv, {"forward": forward}))
            yield

    def measure(self) -> None:
        """Run the model on a few nodes, or one of each type, to find widths of layers and unsupported modules.

        Run a copy, in evaluation and in training, so that counters and caches of forward do not change. Initialise lazy
        modules.
        """
        own, widths = self.net, dict[str, int]()
        self._measuring = True
        try:
            if any(map(is_lazy, own.parameters())):
                self._try(widths, training=False)
            with suppress(Exception):  # the module may not support copies
                self.net = copy.deepcopy(own)
            out = self._try(widths, training=False)
            if self.net is not own:
                drawn = _python_noise()
                for each in self.net.modules():
                    if isinstance(each, SuperGATConv):  # it samples edges for its own loss alone
                        vars(each)["negative_sampling"] = lambda edges, *_: edges
                self._try(widths, training=True)
                if _python_noise() != drawn:
                    raise ValueError("forward draws numbers of Python's or NumPy's generator: its noise is not keyed")
        except ValueError as error:
            raise ValueError(f"model.target={self.config.target}: {error}.") from error
        except Exception as error:  # forward may raise anything
            kinds, fix = self.schema or ANY_SCHEMA, "see model.kwargs"
            if left := [name for name in kinds.names if all(name != end for *_, end in kinds.edges)]:
                fix = f"no edge ends at {', '.join(left)}, so convolutions by edge type give it no rows; add reverse "
                fix += "edges (torch_geometric.transforms.ToUndirected), or keep its rows in forward"
            raise ValueError(
                f"model.target={self.config.target} cannot run on {self.in_dim} features: {_why(error)}; {fix}"
            ) from error
        finally:
            self.net, self._measuring = own, False
        self.gives = tuple(out.shape[1:])
        self.lowerings = {name: self.lowerings[name] for name in widths}  # in order of execution; others are unused
        self.widths = (self.in_dim, *widths.values())

    def _try(self, widths: dict[str, int], *, training: bool) -> Tensor:
        """Return logits of a few nodes, else without marked tensors, else of the dataset's number of nodes."""
        sizes = [_PROBE_NODES] * (1 + self._measuring)
        sizes += [self.config.nodes] if self.schema is None and self.config.nodes else []
        for num_nodes in sizes[:-1]:
            with suppress(Exception):  # forward may raise anything
                return self._logits(num_nodes, widths, training=training)
            self._measuring = False
            widths.clear()
        return self._logits(sizes[-1], widths, training=training)

    def _logits(self, num_nodes: int, widths: dict[str, int], *, training: bool) -> Tensor:
        """Return logits of `num_nodes` nodes, or of one of each type. Record the width of each convolution's output, in
        order of execution."""

        def note(name: str, conv: nn.Module, arguments: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            widths[name] = first.shape[-1] if isinstance(first, Tensor) else 0

        parameter = next((p for p in self.net.parameters() if not is_lazy(p)), torch.zeros(0))
        ends = None if self.schema is None else hetero.one_of_each(self.schema)
        num_nodes = num_nodes if self.schema is None else len(self.schema.nodes)
        x = torch.zeros(num_nodes, self.in_dim, dtype=parameter.dtype)
        if self.schema is not None and num_nodes > 1:
            x[:, -num_nodes:] = torch.eye(num_nodes)
        num_edges, width = len(x) if ends is None else len(ends[0]), self.config.edge_dim
        attr = x.new_zeros(num_edges, width) if width else None
        with ExitStack() as stack:
            for name, conv in self.convs.items():
                stack.callback(conv.register_forward_hook(partial(note, name)).remove)
            stack.enter_context(torch.set_grad_enabled(training))
            if not training:
                stack.enter_context(no_dropout(IN_EVALUATION))
            out = self(ProbeGraph(x, None, attr, ends=ends, training=training), x)
            if "weight" in edge_arguments(self.net):
                out = self(ProbeGraph(x, x.new_ones(num_nodes), attr, ends=ends, training=training), x)
        return out

    @property
    def cuts(self) -> Cuts:
        """Layers of the model, recorded on first use. ValueError if it cannot be cut."""
        if self.schema is not None:
            raise ValueError(f"{self.config.target} {_BY_TYPE}")
        if self._cuts is None:
            try:
                weighted = sorted({self._weighted(given) for given in (False, True)})
                cuts = cut(self, tuple(self.lowerings), self.in_dim, weighted=weighted)
                self._compare(cuts)
            except Exception as error:  # forward may raise anything
                why = _why(error)
                why = why if isinstance(error, ValueError) else f"it cannot run on a few nodes ({why})"
                raise ValueError(f"{self.config.target} runs in one piece: {why}") from error
            self._cuts = cuts
        return self._cuts

    def _compare(self, cuts: Cuts) -> None:
        """Raise ValueError if a copy run layer by layer gives other values. Compare the second pass, after one with
        other rows, since state that forward changes is constant in a recording."""
        for training, weighted in cuts.programs:
            fresh, whole, layered = (copy.deepcopy(self) for _ in range(3))
            layered._cuts = cuts
            g, x = example(self, 7, self.in_dim, training, weighted)
            runs = (fresh, x), (whole, x.flip(0)), (layered, x.flip(0)), (whole, x)
            with torch.no_grad():
                first, _, _, second = (each(g, rows.clone()) for each, rows in runs)
                activations = layered.begin(g, x)
                for i in range(self.num_layers):
                    activations = layered.run_layer(i, g, tuple(t.clone() for t in activations))
                out = layered.end(g, activations)
            if not torch.equal(first, second):
                raise ValueError("its forward gives other values the second time, and a recording the same")
            if not torch.equal(out, first):
                raise ValueError("its forward takes another way, or other numbers, for another number of rows")

    def _weighted(self, given: bool) -> bool:
        """Return True if forward gets edge weights. given: the graph has weights."""
        name = edge_arguments(self.net).get("weight")
        return name is not None and (given or name in required(self.net.forward))

    def begin(self, g: Graph, x: Tensor) -> Rows:
        return self._run_segment(0, g, (x,))

    def run_layer(self, layer: int, g: Graph, activations: Rows) -> Rows:
        return self._run_segment(1 + layer, g, activations)

    def end(self, g: Graph, activations: Rows) -> Tensor:
        return widened(self._run_segment(-1, g, activations)[0])

    def _run_segment(self, place: int, g: Graph, activations: Rows) -> Rows:
        """Run the segment of layer `place` - 1. Outputs keep the type of the inputs, except logits."""
        training = self._begins(g)
        segment, (first, *_) = self.cuts.programs[training, self._weighted(g.in_weight is not None)][place], activations
        with self._folding(g, first, layer=place - 1, after=segment.after if training else None):
            out = segment.run(self.net, activations)
        return out if place == -1 else tuple(t.to(first.dtype) for t in out)

    def activation_widths(self, layer: int) -> tuple[int, ...]:
        return tuple(int(columns(node)) for node in self.cuts.reads[layer])

    def cut_before(self, layer: int) -> str:
        names = tuple(self.lowerings)
        rows = ", ".join(f"{columns(node)} of {title(node)}" for node in self.cuts.reads[layer])
        return f"cut between {names[layer - 1]} and {names[layer]}: {rows}"

    def keep_layers(self, layers: Collection[int], *, first: bool, last: bool) -> None:
        for name, layer in self.cuts.layer_of.items():
            if layer not in layers:
                owner, _, leaf = name.rpartition(".")
                self.net.get_submodule(owner).register_parameter(leaf, None)

    def layer_of(self, parameter: str) -> int | None:
        """Return the layer of a parameter; None outside convolutions if the model cannot be cut into layers."""
        name = parameter.removeprefix("net.")
        for layer, conv in enumerate(self.lowerings):
            if name == conv or name.startswith(f"{conv}."):
                return layer
        try:
            return self.cuts.layer_of.get(name)
        except ValueError:
            return None

    @property
    def num_layers(self) -> int:
        return len(self.lowerings)

    @property
    def convolutions(self) -> list[object]:
        return list(self.convs.values())

    @property
    def needs_edge_ids(self) -> bool:
        reads_rows = bool(self.config.edge_dim) and "attr" in edge_arguments(self.net)
        drops = any(float(vars(conv).get("dropout") or 0) > 0 for conv in self.convs.values())
        return reads_rows or drops or self.reads_edges or any(lowering.whole for lowering in self.lowerings.values())
