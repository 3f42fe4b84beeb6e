"""Record a PyG model's forward as a `torch.fx.Graph`, and cut it into layers, between each two convolutions.

A node is a call of a torch function, a convolution or a module without convolutions. The graph is recorded with an
uncommon number of rows and another dtype than the model's: an integer or dtype equal to them stands for those of a
rank's rows. Python control flow and state are not recorded, so a module that reads values of tensors is refused, and so
is a model that gives other values layer by layer (`PyGNet.cuts` compares them).

A layer is one convolution and the row-wise steps around it. The cut between two convolutions is the first place where
the tensors read later have the fewest columns. All of these tensors are sent: the input of a residual, inputs of
jumping knowledge, the initial rows of GCNII. Values that depend on no row (a softmax of a parameter) are recomputed in
the layer that reads them.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.fx import Graph, Interpreter, Node
from torch.fx.node import Argument, map_aggregate
from torch_geometric.nn import MessagePassing

from gnnpar.folds.block import Rows
from gnnpar.models.pyg.dropout import LAST_TAG
from gnnpar.models.pyg.marks import Placeholder
from gnnpar.models.pyg.nested import Called, Intercepting, leaves, python_state
from gnnpar.models.pyg.probe_graph import ProbeGraph

_READS_VALUES = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__complex__"}
    | {"is_nonzero", "equal", "allclose", "__array__"}
)
_LEAVES_NO_STEP = frozenset({"register_hook", "register_post_accumulate_grad_hook", "backward", "__set__"})
_ROWS = 1009  # number of rows in the recording; a model with an integer of this value is refused
Versions = list[tuple[Tensor, int]]


def _tensors_of(value: object) -> list[Tensor]:
    """Return the tensors in a value, without placeholders for edges."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor) and not isinstance(leaf, Placeholder)]


def _tensor_at(value: object, place: int) -> Tensor:
    return _tensors_of(value)[place]


class Recording(Intercepting):
    """The graph of one call of `net` on features `x`. The inside of a step is not recorded.

    own: nodes for the number, dtype and device of a rank's rows. out: node of the output. meta of a node: `tail` (row
    shape, if it holds node rows in the dtype of the features), `written` (nodes changed in place), `last_tag` (of the
    last dropout when it ends).
    """

    def __init__(self, net: nn.Module, view: ProbeGraph, x: Tensor) -> None:
        super().__init__(self._recorded)
        self.view, self.rows, self.dtype, self.depth = view, len(x), x.dtype, 0
        self.graph, self.out = Graph(), None
        self.own = [self.graph.placeholder(each) for each in ("rows", "dtype", "device")]
        self._alive: list[Tensor] = []  # keeps ids unique
        self._read: Versions = []  # by the module that runs
        self._nodes: dict[int, Node] = {}
        named = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
        self._names = {id(t): name for name, t in reversed(named)}
        self._stored = {t.untyped_storage().data_ptr(): name for name, t in reversed(named) if t.numel()}

    def _recorded(self, func: Called, args: tuple, given: dict[str, object]) -> object:
        if self.depth:
            return func(*args, **given)
        name = func.__name__
        if name in _READS_VALUES:
            raise ValueError(f"its forward reads values of tensors ({name.strip('_')}), which no recording follows")
        if name in _LEAVES_NO_STEP:
            called = "sets an attribute of" if name == "__set__" else f"calls {name} of"
            raise ValueError(f"its forward {called} a tensor, which no recording follows")
        self._refuse_other_gradients()
        read = [(t, t._version) for t in _tensors_of((args, given))]
        out = func(*args, **given)
        if _tensors_of(out) or any(t._version != version for t, version in read):
            self._note(func, args, given, read, out)
        return out

    def _refuse_other_gradients(self) -> None:
        if torch.is_grad_enabled() != self.view.training:  # torch calls the forward of a Function without gradients
            raise ValueError(
                "its forward switches gradients off or on, itself or in a torch.autograd.Function; use detach"
            )

    def begin(self, net: nn.Module, args: tuple[object, ...]) -> None:
        x = args[0] if args else None
        if not isinstance(x, Tensor):
            raise ValueError("its forward takes no tensor of rows first")
        self._keep(x, self.graph.placeholder("x"))
        self.__enter__()

    def end(self, net: nn.Module, args: tuple[object, ...], out: object) -> None:
        self.__exit__(None, None, None)
        self.out = self._nodes.get(id(out))
        for name, buffer in net.named_buffers():
            if id(buffer) in self._nodes and id(buffer) not in self._names:
                raise ValueError(f"its forward writes into {name}")

    def enter(self, module: nn.Module, args: tuple[object, ...], given: Mapping[str, object]) -> None:
        self.depth += 1
        if self.depth == 1:
            self._refuse_other_gradients()
            self._read = [(t, t._version) for t in _tensors_of((args, given))]

    def leave(self, name: str, module: nn.Module, args: tuple, given: dict[str, object], out: object) -> None:
        self.depth -= 1
        if not self.depth:
            self._note(name, args, given, self._read, out)

    def _note(self, called: str | Called, args: tuple, given: dict, read: Versions, out: object) -> None:
        """Add the node of a call of a module or function, and a node for each tensor inside of its result. read:
        tensors before the call."""
        op, name = ("call_module", called) if isinstance(called, str) else ("call_function", called.__name__)

        def known(leaf: Argument) -> Argument:
            if isinstance(leaf, torch.device):
                return self.own[2]
            if not isinstance(leaf, Tensor) or isinstance(leaf, Placeholder):
                is_rows = isinstance(leaf, int) and leaf == self.rows
                return self.own[0] if is_rows else self.own[1] if leaf is self.dtype else leaf
            if (node := self._node_of(leaf)) is None:
                raise ValueError(
                    f"{name} reads a tensor that is made neither of x nor of parameters and buffers; register_buffer it"
                )
            return node

        node = self.graph.create_node(op, called, map_aggregate(args, known), map_aggregate(given, known))
        changed = [each for t, version in read if t._version != version for each in (t, t._base)]  # and a view's base
        written = [found for t in changed if t is not None and (found := self._node_of(t)) is not None]
        for t in changed:
            if t is not None and (lasting := self._stored.get(t.untyped_storage().data_ptr())):
                raise ValueError(f"its forward writes into {lasting}")
        if any(each.target == "x" for each in written):
            raise ValueError("its forward writes into the features, which stay written in the next epoch")
        node.meta |= {"written": written, "last_tag": self.view.last_tag}
        for i, t in enumerate(_tensors_of(out)):
            if self._node_of(t) is None:
                self._keep(t, node if t is out else self.graph.call_function(_tensor_at, (node, i)))

    def _node_of(self, tensor: Tensor) -> Node | None:
        """Return the node of a tensor; None if it is made of no recorded one."""
        if id(tensor) in self._names and id(tensor) not in self._nodes:
            self._keep(tensor, self.graph.get_attr(self._names[id(tensor)]))
        return self._nodes.get(id(tensor))

    def _keep(self, tensor: Tensor, node: Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        node.meta = {"written": [], "last_tag": self.view.last_tag, **node.meta}
        if tensor.shape[:1] == (self.rows,) and tensor.dtype == self.dtype:
            node.meta["tail"] = tensor.shape[1:]


def _recording(model: Callable[[ProbeGraph, Tensor], Tensor], net: nn.Module, view: ProbeGraph, x: Tensor) -> Recording:
    recorder = Recording(net, view, x)
    handles = [
        net.register_forward_pre_hook(recorder.begin),
        net.register_forward_hook(recorder.end, always_call=True),  # stop recording on an error inside
    ]
    for name, module in net.named_modules():
        if name and _is_step(module):
            handles.append(module.register_forward_pre_hook(recorder.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(partial(recorder.leave, name), with_kwargs=True))
    try:
        with torch.set_grad_enabled(view.training):  # forward may read the mode
            model(view, x)
    finally:
        for handle in handles:
            handle.remove()
    return recorder


def _is_step(module: nn.Module) -> bool:
    inside = (each for each in module.modules() if each is not module)
    return isinstance(module, MessagePassing) or not any(isinstance(each, MessagePassing) for each in inside)


def columns(node: Node) -> float:
    """Return the columns of a value; infinity if it does not have one row per node."""
    return math.prod(node.meta.get("tail", (math.inf,)))


def title(node: Node) -> str:
    if node.target is _tensor_at:
        return title(node.all_input_nodes[0])
    return node.target if isinstance(node.target, str) else node.target.__name__.strip("_")


@dataclass(frozen=True, eq=False)
class Segment:
    """The steps of a layer, or of the part before the first or after the last layer.

    graph: of a rank's number, dtype and device of rows, and the inputs. reads, gives: inputs and outputs, as nodes of
    the recording. after: tag of the last dropout before the segment.
    """

    graph: Graph
    reads: tuple[Node, ...]
    gives: tuple[Node, ...]
    after: int

    def run(self, net: nn.Module, activations: Rows) -> Rows:
        """Run the steps. Shapes: activations [N, columns] for each of `reads` -> [N, columns] for each of `gives`."""
        first = activations[0]
        values = [t.view(len(t), *node.meta["tail"]) for node, t in zip(self.reads, activations, strict=True)]
        interpreter = Interpreter(net, graph=self.graph)
        interpreter.extra_traceback = False  # it would add lines to messages
        out = interpreter.run(len(first), first.dtype, first.device, *values)
        if of_edges := [node for node, t in zip(self.gives, out, strict=True) if len(t) != len(first)]:
            raise ValueError(
                f"the output of {title(of_edges[0])} is read in a later layer of the model, and does not have one row "
                "per node: choose single, graph_parallel or another strategy without layers on other ranks"
            )
        return tuple(t.reshape(len(first), int(columns(node))) for node, t in zip(self.gives, out, strict=True))

    def parameters(self, net: nn.Module) -> Iterable[nn.Parameter]:
        """Yield the parameters that the steps read, and those of the modules that they call."""
        for node in self.graph.nodes:
            if node.op == "call_module":
                yield from net.get_submodule(node.target).parameters()
            elif node.op == "get_attr" and isinstance(held := attrgetter(node.target)(net), nn.Parameter):
                yield held


Program = tuple[Segment, ...]
"""The part before the first layer, the layers, the part after the last."""


@dataclass(frozen=True, eq=False)
class Cuts:
    """A model cut into layers. programs: by (training, weighted). reads: the activations before each layer. layer_of:
    layer of each parameter read in a layer."""

    programs: Mapping[tuple[bool, bool], Program]
    reads: tuple[tuple[Node, ...], ...]
    layer_of: Mapping[str, int]

    def __deepcopy__(self, memo: object) -> Cuts:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None: another process records the model again."""
        return type(None), ()


def cut(model: nn.Module, convs: Sequence[str], in_dim: int, *, weighted: Iterable[bool]) -> Cuts:
    """Cut a model with the user's module as submodule `net`. ValueError if it cannot run layer by layer. convs: names
    of the convolutions in `net`, in order of execution."""
    programs: dict[tuple[bool, bool], Program] = {}
    dtype = next(model.parameters(), torch.zeros(0)).dtype
    twin = copy.deepcopy(model).to(torch.float32 if dtype == torch.float64 else torch.float64)
    net = twin.get_submodule("net")
    for weights in weighted:
        for training in (False, True):
            kept, buffers = python_state(net), {name: buffer.clone() for name, buffer in net.named_buffers()}
            recording = _recording(twin, net, *example(twin, _ROWS, in_dim, training, weights))
            if changed := [name for name, value in python_state(net).items() if kept.get(name) != value]:
                raise ValueError(f"its forward changes {changed[0]}, which a recording would leave as it is")
            if changed := [n for n, b in net.named_buffers() if n in buffers and not b.equal(buffers[n])]:
                raise ValueError(f"its forward changes {changed[0]}, which layers would change more than once")
            programs[training, weights] = _segments(recording, convs)
    reads = [tuple(layer.reads for layer in program[1:-1]) for program in programs.values()]
    if len({tuple(tuple(map(columns, nodes)) for nodes in layers[1:]) for layers in reads}) > 1:
        raise ValueError("its forward keeps other rows between convolutions in training than in evaluation")
    return Cuts(programs, reads[-1], _layers_of_parameters(programs.values(), model.get_submodule("net")))


def example(model: nn.Module, rows: int, in_dim: int, training: bool, weighted: bool) -> tuple[ProbeGraph, Tensor]:
    """Return a graph of `rows` nodes, and features [rows, in_dim]."""
    like = next(model.parameters(), torch.zeros(0))
    x = torch.randn(rows, in_dim, generator=torch.Generator().manual_seed(rows)).to(like)
    return ProbeGraph(x, torch.ones(rows).to(like) if weighted else None, training=training), x


def _layers_of_parameters(programs: Iterable[Program], net: nn.Module) -> dict[str, int]:
    """Return the layer of each parameter. ValueError if two layers, possibly on two ranks, read the same one."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    found: dict[str, int] = {}
    for program in programs:
        for i, segment in enumerate(program):
            layer = min(max(i - 1, 0), len(program) - 3)
            for name in (names[id(each)] for each in segment.parameters(net)):
                if found.setdefault(name, layer) != layer:
                    raise ValueError(f"{name} is read in two layers, {found[name]} and {layer}")
    return found


class _Flow:
    """Values that depend on rows, with their lifetimes. A cut at c lies before step c."""

    def __init__(self, tape: Recording) -> None:
        self.own, self.steps = tape.own, [node for node in tape.graph.nodes if node.op != "placeholder"]
        x = next(node for node in tape.graph.nodes if node.target == "x")
        self.made, self.of_rows = {x: -1}, {x}
        for i, node in enumerate(self.steps):
            self.made[node] = i
            if not self.of_rows.isdisjoint(node.all_input_nodes):
                self.of_rows.update((node, *node.meta["written"]))
        if (out := tape.out) is None or out not in self.of_rows:
            raise ValueError("its modules and torch's functions do not compute its output from the features")
        self.last = {node: max((self.made[user] for user in node.users), default=-1) for node in self.made}
        self.last[out], self.out = len(self.steps), out

    def alive(self, at: int) -> tuple[Node, ...]:
        """Return the values alive across a cut, in order of creation."""
        return tuple(node for node, made in self.made.items() if node in self.of_rows and made < at <= self.last[node])

    def columns(self, at: int) -> float:
        """Return the columns of the values alive across a cut; infinity if one does not have one row per node."""
        return sum(map(columns, self.alive(at)))

    def narrowest_cut(self, first: int, second: int, names: str) -> int:
        """Return the cut with the fewest columns after step `first` and before step `second`."""
        best = min(range(first + 1, second + 1), key=self.columns)
        if math.isinf(self.columns(best)):
            made = title(next(node for node in self.alive(best) if math.isinf(columns(node))))
            raise ValueError(f"the output of {made} is read {names}, and does not have one row per node")
        return best

    def segment(self, first: int, last: int) -> Segment:
        """Return the steps between two cuts, and the steps without rows that they need."""
        reads, gives = self.alive(first), (self.out,) if last == len(self.steps) else self.alive(last)
        chosen, needed = list[Node](), set[Node]()
        for i in range(last - 1, -1, -1):
            node = self.steps[i]
            wanted = i >= first if node in self.of_rows else not needed.isdisjoint((node, *node.meta["written"]))
            if wanted:
                chosen.append(node)
                needed.update(node.all_input_nodes)
        graph = Graph()
        copies = {node: graph.placeholder(node.name) for node in (*self.own, *reads)}
        written = {each for node in chosen for each in node.meta["written"]}
        copies |= {node: graph.call_method("clone", (copies[node],)) for node in reads if node in written}
        for node in reversed(chosen):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in gives))
        after = self.steps[first - 1].meta["last_tag"] if first else LAST_TAG
        return Segment(graph, reads, gives, after)


def _segments(tape: Recording, convs: Sequence[str]) -> Program:
    flow = _Flow(tape)
    called = [(i, str(node.target)) for i, node in enumerate(flow.steps) if node.target in convs]
    times = Counter(name for _, name in called)
    if twice := [name for name in convs if times[name] > 1]:
        raise ValueError(f"its forward calls {twice[0]} more than once")
    if inside := [name for name in convs if not times[name]]:
        raise ValueError(f"{inside[0]} runs inside of another convolution")
    inner = [flow.narrowest_cut(first, second, f"between {a} and {b}") for (first, a), (second, b) in pairwise(called)]
    (first, _), (last, _), end = called[0], called[-1], len(flow.steps)
    begin = next(at for at in range(first, -1, -1) if math.isfinite(flow.columns(at)))
    behind = next(at for at in range(last + 1, end + 1) if math.isfinite(flow.columns(at)))
    return tuple(flow.segment(*ends) for ends in pairwise((0, begin, *inner, behind, end)))
