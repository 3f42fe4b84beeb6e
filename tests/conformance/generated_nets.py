"""Models drawn at random from PyG's parts, and what users do with these: options, subclasses, hooks, shared modules.

A specification is plain data, so that a failing model can be made smaller by hand.
"""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import inspect
import json
import random
import types
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as pyg
from torch_geometric import utils
from torch_geometric.nn import MessagePassing

from conformance.plain_loop import EDGE_KEYS, Trained, Verdict, drawing, graph, plain, verdict

TARGET = "conformance.generated_nets.build"
NOISY = ("SuperGATConv",)  # draws negative edges in training
LACKING = ("DynamicEdgeConv", "GravNetConv", "XConv", "SplineConv", "PANConv", "MeshCNNConv")  # need other packages
Spec = dict  # {"seed", "layers": [{"conv", "twists", "steps", "checkpoint", "same", "twice"}], "out", "jk", ...}


def mlp(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inside, 8), nn.Tanh(), nn.Linear(8, outside))


class Base(MessagePassing):
    """Of convolutions of one's own: a dense layer, then `propagate`; 8 columns to 8."""

    aggregation, axis, temperature = "add", 0, 1.0

    def __init__(self) -> None:
        super().__init__(aggr=self.aggregation, node_dim=self.axis)
        self.lin, self.att, self.mlp = nn.Linear(8, 8), nn.Parameter(torch.randn(8)), mlp(16, 8)
        self.of_edge, self.right = nn.Linear(4, 8), self.lin

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j):
        return x_j

    def keep(self, **tensors):
        """Leave tensors that other methods read."""
        vars(self).update(tensors)
        return self

    def cooled(self):
        self.temperature = self.temperature * 0.5 if self.training else self.temperature
        return self.temperature


class TutorialGCN(Base):
    axis = -2

    def forward(self, x, edge_index):
        edge_index, _ = utils.add_self_loops(edge_index, num_nodes=x.size(0))
        row, col = edge_index
        root = utils.degree(col, x.size(0), dtype=x.dtype).pow(-0.5)
        return self.propagate(edge_index, x=self.lin(x), norm=root[row] * root[col]) + self.att

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


class OwnGates(Base):
    """edge_updater as GATConv uses it."""

    def forward(self, x, edge_index, edge_attr):
        gate = self.edge_updater(edge_index, x=x, edge_attr=edge_attr)
        return self.propagate(edge_index, x=self.lin(x), gate=gate)

    def edge_update(self, x_j, x_i, edge_attr, index, size_i):
        return utils.softmax((x_i * x_j + self.of_edge(edge_attr)).sum(1), index, num_nodes=size_i)

    def message(self, x_j, gate):
        return x_j * gate.unsqueeze(-1)


def _soft(x_j: Tensor, score: Tensor, *where: object) -> Tensor:
    return x_j * utils.softmax(score.sum(1, keepdim=True), *where)


def _by_hand(self: Base, x: Tensor, edge_index: Tensor) -> Tensor:
    """Gather and scatter without `propagate`."""
    source, destination = edge_index
    return utils.scatter(self.lin(x)[source], destination, 0, x.size(0), reduce="mean") + x


def _with(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda self, x, edge_index: self.propagate(change(edge_index), x=self.lin(x))


_METHODS: dict[str, dict[str, object]] = {  # of subclasses of Base
    "TutorialEdge": {"aggregation": "max", "message": lambda self, x_i, x_j: self.mlp(torch.cat([x_i, x_j - x_i], 1))},
    "UpdateReads": {"aggregation": "mean", "update": lambda self, aggr_out, x: (aggr_out * self.att + x).tanh()},
    "Soft": {"message": lambda self, x_i, x_j, index, ptr, size_i: _soft(x_j, x_i * x_j, index, ptr, size_i)},
    "SoftDim": {"message": lambda self, x_j, index, ptr, dim_size: _soft(x_j, x_j * self.att, index, ptr, dim_size)},
    "Closure": {
        "forward": lambda self, x, edge_index: self.keep(scale=3 * self.att.softmax(0)).propagate(edge_index, x=x),
        "message": lambda self, x_i, x_j: self.scale * (x_j - x_i),
    },
    "ClosureUpdate": {
        "forward": lambda self, x, edge_index: self.keep(kept=self.lin(x).sigmoid()).propagate(edge_index, x=x),
        "update": lambda self, inputs: inputs * self.kept,
    },
    "ReadsRows": {  # of nodes, behind the back of `propagate`
        "forward": lambda self, x, edge_index: self.keep(rows=self.lin(x), e=edge_index).propagate(edge_index, x=x),
        "message": lambda self, x_j: x_j * self.rows[self.e[0]],
    },
    "Attributed": {
        "forward": lambda self, x, edge_index, edge_attr: self.propagate(edge_index, x=x, e=self.of_edge(edge_attr)),
        "message": lambda self, x_j, e: (x_j + e).relu(),
    },
    "Divided": {
        "forward": lambda self, x, edge_index, edge_attr: self.propagate(
            edge_index, x=x, e=self.of_edge(edge_attr / edge_attr.max(0).values)
        ),
        "message": lambda self, x_j, e: (x_j + e).relu(),
    },
    "Largest": {"message": lambda self, x_j: x_j / x_j.abs().max()},
    "Counts": {"message": lambda self, x_j, index: x_j / len(index)},
    "OnlyOwn": {"message": lambda self, x_i: x_i.sigmoid()},
    "Indexed": {  # reads ids of nodes
        "message": lambda self, x_j, edge_index_i, edge_index_j: x_j * (edge_index_i > edge_index_j).to(x_j)[:, None]
    },
    "Sized": {
        "forward": lambda self, x, edge_index: self.propagate(edge_index, x=self.lin(x), size=(len(x), len(x))),
        "message": lambda self, x_j, size_j: x_j / size_j,
    },
    "Whole": {
        "forward": lambda self, x, edge_index: self.propagate(edge_index, x=self.lin(x), gate=self.att.sigmoid()),
        "message": lambda self, x_j, gate: x_j * gate,
    },
    "OuterReads": {"message": lambda self, x_j: x_j * self.outer[0]},  # a parameter of the model around it
    "InPlace": {"message": lambda self, x_j: x_j.mul_(2).add_(1)},
    "Remembers": {
        "forward": lambda self, x, edge_index: self.propagate(edge_index, x=self.lin(x)) * self.seen.mean(),
        "message": lambda self, x_j: self.keep(seen=x_j.sigmoid()).seen * x_j,
    },
    "Twice": {
        "forward": lambda self, x, e: self.propagate(e, x=self.propagate(e, x=x).tanh()) + self.lin(x),
    },
    "ByHand": {"forward": _by_hand},
    "NoLoops": {"forward": _with(lambda edges: utils.remove_self_loops(edges)[0])},
    "Loops": {"aggregation": "mean", "forward": _with(lambda edges: utils.add_remaining_self_loops(edges)[0])},
    "Backward": {"forward": _with(lambda edges: edges.flip(0))},
    "Sorted": {"forward": _with(utils.coalesce)},
    "Undirected": {"forward": _with(utils.to_undirected)},
    "Half": {"forward": _with(lambda edges: edges[:, : edges.size(1) // 2])},
    "Extra": {"forward": _with(lambda edges: torch.cat([edges, torch.tensor([[0, 1], [1, 0]])], 1))},
    "Upwards": {"forward": _with(lambda edges: edges[:, edges[0] < edges[1]])},
    "TwoNames": {  # one matrix under two names
        "forward": lambda self, x, edge_index: self.propagate(edge_index, x=(self.lin(x), self.right(x))),
        "message": lambda self, x_i, x_j: (x_j + x_i).relu(),
    },
    "Annealed": {"message": lambda self, x_j: (x_j / self.cooled()).tanh()},
    "Median": {"aggregation": "median"},
    "Several": {"aggregation": ["mean", "max"], "update": lambda self, inputs: self.mlp(inputs)},
}
for _body in _METHODS.values():
    for _name, _method in _body.items():
        if isinstance(_method, types.FunctionType):
            _method.__name__ = _name  # by which PyG finds its arguments
OWN: dict[str, type[MessagePassing]] = {"TutorialGCN": TutorialGCN, "OwnGates": OwnGates}
OWN |= {name: type(name, (Base,), {**body, "__module__": __name__}) for name, body in _METHODS.items()}
WITH_ROWS = ("Attributed", "OwnGates", "Divided")
VARIANTS_OF_OWN = [f"{name}(){'; a' * (name in WITH_ROWS)}" for name in OWN]


def _half_turned(rows: Tensor) -> Tensor:
    half = len(rows) // 2
    return torch.cat([rows[:half], -rows[half:]])


class HalfOfRows(Base):
    def message(self, x_j):
        return _half_turned(x_j)


class HalfOfAttributes(Base):
    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, e=self.of_edge(_half_turned(edge_attr)))

    def message(self, x_j, e):
        return (x_j + e).relu()


class FirstRow(Base):
    def message(self, x_j):
        return x_j + x_j[0]


OWN |= {each.__name__: each for each in (HalfOfRows, HalfOfAttributes, FirstRow)}

STEPS = {  # of rows h [N, 8] between convolutions, one row at a time
    "relu": "h.relu()",
    "elu": "F.elu(h)",
    "dropout": "F.dropout(h, 0.0, self.training)",
    "unit": "F.normalize(h, dim=1)",
    "log": "h.log_softmax(-1)",
    "residual": "h + first",
    "in place": "h.clone().mul_(2)",
    "half detached": "h + h.detach()",
    "gradient hook": "doubled(h)",
    "gate": "h * self.gate",
    "tied": "h + tied(conv, h)",
    "LayerNorm": "norm(h)",
    "BatchNorm1d": "norm(h)",
    "BatchNorm": "norm(h)",
    "MessageNorm": "norm(first, h)",
    "hops": "self.hops(torch.stack([h, first], 1)).mean(1)",
    "same rows": "h[torch.arange(len(h))]",
}
MIXING = {  # all rows at once
    "centred": "h - h.mean(0)",
    "virtual node": "h + h.mean(0, keepdim=True).expand_as(h).tanh()",
    "columns": "F.normalize(h, dim=0)",
    "cumulative": "h.cumsum(0) / 9",
    "attention": "h * h.softmax(0)",
    "first row": "h + h[0]",
    "best rows": "h * (h.norm(dim=1) >= h.norm(dim=1).topk(5).values.min())[:, None]",
    "number": "h / len(h)",
    "position": "h + torch.arange(h.size(0))[:, None] / 9",
    "embedding": "h + self.embedding(torch.arange(h.size(0)))",
    "table": "h + self.embedding.weight",
    "pooled": "h + pyg.global_mean_pool(h, None)",
    "batch": "h + pyg.global_add_pool(h, torch.zeros(len(h), dtype=torch.long))",
    "degree": "h * utils.degree(edge_index[1], h.size(0), h.dtype)[:, None]",
    "ordered": "h[h[:, 0].argsort()]",
    "largest": "h / h.abs().max()",
    "GraphNorm": "norm(h)",
    "PairNorm": "norm(h)",
    "InstanceNorm": "norm(h)",
    "DiffGroupNorm": "norm(h)",
    "edges": "h + edge_index.size(1) / 99",
    "shuffled back": "h.flip(0) + h",
    "standard": "(h - h.mean()) / h.std()",
}
NORMS = {
    "LayerNorm": "nn.LayerNorm(8)",
    "BatchNorm1d": "nn.BatchNorm1d(8)",
    "BatchNorm": "pyg.BatchNorm(8)",
    "MessageNorm": "pyg.MessageNorm(learn_scale=True)",
    "GraphNorm": "pyg.GraphNorm(8)",
    "PairNorm": "pyg.PairNorm()",
    "InstanceNorm": "pyg.InstanceNorm(8)",
    "DiffGroupNorm": "pyg.DiffGroupNorm(8, 2)",
}
ROWS = {  # of edges, before the first convolution
    "weight doubled": ("edge_weight", "edge_weight * 2"),
    "weight gated": ("edge_weight", "edge_weight * self.gate[0].sigmoid()"),
    "weight scaled": ("edge_weight", "edge_weight / edge_weight.max()"),
    "attr encoded": ("edge_attr", "self.encoder(edge_attr)"),
    "attr scaled": ("edge_attr", "edge_attr / edge_attr.max(0).values"),
    "type merged": ("edge_type", "edge_type.clamp(max=1)"),
}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "clamp": lambda out: out.clamp(-0.1, 0.1),
    "double": lambda out: 2 * out,
    "over largest": lambda out: out / out.abs().max(),
}
STEPS_OF_CONV = ("message", "update", "aggregate", "edge_update", "propagate", "forward")
HOOKS = ("message", "aggregate", "propagate", "edge_update")
OTHER = (
    "frozen",
    "frozen first",
    "weight_norm",
    "spectral_norm",
    "forward hook",
    "forward pre-hook",
    "decoy",
    "aggregation hook",
)


def doubled(h: Tensor) -> Tensor:
    """Its gradient is doubled."""
    h = h * 1
    if h.requires_grad:
        h.register_hook(lambda gradient: 2 * gradient)
    return h


def tied(conv: nn.Module, h: Tensor) -> Tensor:
    """A dense layer of the convolution, called outside of it."""
    for module in conv.modules():
        if isinstance(module, nn.Linear | pyg.Linear) and module.weight.shape == (8, 8):
            return module(h)
    return h


def names(**more: object) -> dict[str, object]:
    """What constructors, calls and steps are written in."""
    deg = torch.tensor([1, 2, 3, 5, 5, 4, 2, 1, 1])
    base = {"nn": nn, "torch": torch, "F": F, "pyg": pyg, "utils": utils, "mlp": mlp, "DEG": deg}
    return {**vars(pyg), **OWN, **base, "tied": tied, "doubled": doubled, **more}


_CALLS = {"": "conv(x, edge_index)", "w": "conv(x, edge_index, edge_weight)"}
_CALLS |= {"a": "conv(x, edge_index, edge_attr)", "t": "conv(x, edge_index, edge_type)"}
_ARGUMENTS = f"edge_index, {'=None, '.join(EDGE_KEYS)}=None"


def split(variant: str) -> tuple[str, str, tuple[str, ...]]:
    """Constructor, call, and the rows of edges that the call reads."""
    made, _, call = variant.partition(";")
    call = _CALLS.get(call.strip(), call.strip())
    call = call.replace("edge_index, edge_attr)", "edge_index, edge_attr=edge_attr)")
    return made, call, tuple(key for key in EDGE_KEYS if key in call)


@cache
def _compiled(arguments: str, body: str) -> Callable[..., Tensor]:
    return eval(f"lambda {arguments}: {body}", names())  # noqa: S307 - lines of this module


def overriding(base: type[nn.Module], method: str, change: str) -> Callable[..., object]:
    """A method that calls the base's with the arguments that this names, and changes what it gives."""
    given = list(inspect.signature(inspect.getattr_static(base, method)).parameters.values())[1:]
    plain_ones = [p.replace(annotation=p.empty) for p in given]
    passed = [("**" if p.kind is p.VAR_KEYWORD else "*" if p.kind is p.VAR_POSITIONAL else "") + p.name for p in given]
    body = f"def {method}(self, {', '.join(map(str, plain_ones))}):\n    return change(base(self, {', '.join(passed)}))"
    space = {"base": inspect.getattr_static(base, method), "change": _of_tensors(CHANGES[change]), "__name__": __name__}
    exec(body, space)
    return space[method]


def _of_tensors(change: Callable[[Tensor], Tensor]) -> Callable[[object], object]:
    return lambda out: change(out) if isinstance(out, Tensor) else out


def made(variant: str, twists: list[str]) -> nn.Module:
    """The convolution with its twists; a twist that it has no method for changes nothing."""
    source = split(variant)[0]
    name = source.partition("(")[0]
    base = names()[name]
    assert isinstance(base, type)
    kind = base
    for twist in twists:
        how, _, rest = twist.partition(" ")
        method, _, change = rest.partition(" ")
        if how == "subclass" and method in dir(kind):
            kind = type(f"My{name}", (kind,), {method: overriding(kind, method, change), "__module__": __name__})
    conv: nn.Module = eval(source, names(**{name: kind}))  # noqa: S307
    for twist in twists:
        _twist(conv, *twist.split(" ", 2))
    return conv


def _twist(conv: nn.Module, how: str, what: str = "", change: str = "") -> None:
    linear = next((m for m in conv.modules() if isinstance(m, nn.Linear | pyg.Linear)), None)
    parameter = next(conv.parameters(), None)
    if how == "shadow" and what in dir(type(conv)):
        vars(conv)[what] = types.MethodType(overriding(type(conv), what, change), conv)
    elif how == "hook" and isinstance(conv, MessagePassing):
        changed = _of_tensors(CHANGES[change])
        vars(MessagePassing)[f"register_{what}_forward_hook"](conv, lambda _, inputs, out: changed(out))
    elif how == "pre-hook" and isinstance(conv, MessagePassing):
        vars(MessagePassing)[f"register_{what}_forward_pre_hook"](conv, _halved)
    elif f"{how} {what}" == "forward hook":
        conv.register_forward_hook(lambda _, inputs, out: _of_tensors(torch.tanh)(out))
    elif f"{how} {what}" == "forward pre-hook":
        conv.register_forward_pre_hook(lambda _, inputs: (_of_tensors(torch.tanh)(inputs[0]), *inputs[1:]))
    elif how == "aggregation" and isinstance(conv, MessagePassing) and isinstance(conv.aggr_module, nn.Module):
        conv.aggr_module.register_forward_hook(lambda _, inputs, out: torch.tanh(out))
    elif how == "decoy" and isinstance(conv, MessagePassing):  # of sparse matrices alone: never called
        vars(conv)["message_and_aggregate"] = lambda *_: 1 / 0
    elif f"{how} {what}".strip() == "frozen":
        conv.requires_grad_(False)
    elif f"{how} {what}" == "frozen first" and parameter is not None:
        parameter.requires_grad_(False)
    elif how == "weight_norm" and linear is not None:
        weight_norm(linear)
    elif how == "spectral_norm" and linear is not None:
        spectral_norm(linear)


def _halved(conv: nn.Module, inputs: tuple) -> tuple:
    """Half of every floating row in the dictionary of arguments, which is the last input."""
    *others, given = inputs
    return (*others, {k: v / 2 if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()})


class Net(nn.Module):
    """A specification as a model: a dense layer, layers, a dense layer."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, self.tau = spec, 1.0
        self.first, self.gate = nn.Linear(8, 8), nn.Parameter(torch.ones(8) / 2)
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        used = [step for layer in spec["layers"] for step in layer.get("steps", ())]
        for layer in spec["layers"]:
            same = layer.get("same")
            conv = made(layer["conv"], layer.get("twists", [])) if same is None else self.convs[same]
            if type(conv).__name__.endswith("OuterReads"):
                conv.outer = [self.gate]
            self.convs.append(conv)
            norms = [NORMS.get(step, "nn.Identity()") for step in layer.get("steps", ())]
            self.norms.append(nn.ModuleList(eval(norm, names()) for norm in norms))  # noqa: S307
        if "embedding" in used or "table" in used:
            self.embedding = nn.Embedding(24, 8)
        if "hops" in used:
            self.hops = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        if "attr encoded" in spec.get("rows", ()):
            self.encoder = nn.Linear(4, 4)
        if jk := spec.get("jk"):
            self.jump = pyg.JumpingKnowledge(jk, 8, len(spec["layers"]))
        self.head = nn.Linear(8 * (len(spec["layers"]) if jk == "cat" else 1), 3)
        if spec.get("frozen first"):
            self.first.requires_grad_(False)

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        if self.spec.get("held"):
            self.norms.eval()
        return self

    def run(self, x: Tensor, edge_index: Tensor, **rows: Tensor) -> object:
        first = h = self.first(x)
        if self.spec.get("annealed"):
            self.tau = self.tau * 0.5 if self.training else self.tau
            h = (h / self.tau).tanh()
        for name in self.spec.get("rows", ()):
            key, body = ROWS[name]
            if key in rows:
                rows[key] = _compiled(f"self, {key}", body)(self, rows[key])
        hops = []
        for layer, conv, norms in zip(self.spec["layers"], self.convs, self.norms, strict=True):
            call = _compiled(f"conv, x, {_ARGUMENTS}", split(layer["conv"])[1])
            for _ in range(1 + bool(layer.get("twice"))):
                if layer.get("checkpoint") is None:
                    h = call(conv, h, edge_index, **rows)
                else:
                    given = partial(_with_rows, call, conv, tuple(rows))
                    h = checkpoint(given, h, edge_index, *rows.values(), use_reentrant=layer["checkpoint"])
            for step, norm in zip(layer.get("steps", ()), norms, strict=True):
                body = (STEPS | MIXING)[step]
                h = _compiled("self, h, first, conv, norm, edge_index", body)(self, h, first, conv, norm, edge_index)
            hops.append(h)
        out = self.head(self.jump(hops) if self.spec.get("jk") else h)
        return {"tuple": (out, h), "dictionary": {"logits": out, "h": h}}.get(self.spec.get("out", ""), out)


def _with_rows(call: Callable[..., Tensor], conv: nn.Module, keys: tuple[str, ...], *given: Tensor) -> Tensor:
    return call(conv, *given[:2], **dict(zip(keys, given[2:], strict=True)))


def keys_of(spec: Spec) -> tuple[str, ...]:
    """The rows of edges that a model reads."""
    read = {key for layer in spec["layers"] for key in split(layer["conv"])[2]}
    return tuple(key for key in EDGE_KEYS if key in read)


def build(spec: str) -> nn.Module:
    """The model of a specification, as JSON; its weights depend on that alone."""
    given: Spec = json.loads(spec)
    keys = keys_of(given)
    arguments, passed = ", ".join(keys), ", ".join(f"{key}={key}" for key in keys)
    forward = eval(f"lambda self, x, edge_index, {arguments}: self.run(x, edge_index, {passed})")  # noqa: S307
    with drawing(given["seed"]):
        made = type("Generated", (Net,), {"forward": forward, "__module__": __name__})(given)
    for each in made.modules():
        if isinstance(each, pyg.RGATConv):  # which PyG leaves without values
            nn.init.constant_(each.l2, 1 / each.out_channels)
    return made


def kwargs_of(spec: Spec) -> dict[str, str]:
    return {"spec": json.dumps(spec)}


def draw(seed: int) -> Spec:
    """A specification."""
    from conformance.all_convolutions import VARIANTS

    r = random.Random(seed)
    there = [each for each in VARIANTS if not each.startswith(LACKING)]
    maybe: Callable[[float], bool] = lambda share: r.random() < share  # noqa: E731
    layers: list[dict] = []
    for i in range(r.choice((1, 2, 2, 3, 4))):
        layer: dict = {"conv": r.choice(there if maybe(0.65) else VARIANTS_OF_OWN), "twists": [], "steps": []}
        if i and maybe(0.08):
            layer["conv"], layer["same"] = layers[i - 1]["conv"], i - 1
        elif maybe(0.45):
            kind = r.choice(("subclass", "subclass", "shadow", "hook", "pre-hook", "other"))
            change = r.choice(tuple(CHANGES)) if maybe(0.3) else "tanh"
            method, hook = r.choice(STEPS_OF_CONV), r.choice(HOOKS)
            ways = {"subclass": f"subclass {method} {change}", "shadow": f"shadow {method} {change}"}
            ways |= {"hook": f"hook {hook} {change}", "pre-hook": f"pre-hook {hook}", "other": r.choice(OTHER)}
            layer["twists"].append(ways[kind])
        layer |= {"checkpoint": maybe(0.5)} if maybe(0.08) else {}
        layer |= {"twice": True} if maybe(0.06) else {}
        layer["steps"] += [r.choice(tuple(STEPS)) for _ in range(r.randrange(3))]
        layer["steps"] += [r.choice(tuple(MIXING))] if maybe(0.09) else []
        if layer["conv"].startswith("Annealed"):  # PyG's recomputation cools twice an epoch
            layer.pop("checkpoint", None)
        layers.append(layer)
    spec: Spec = {"seed": seed, "layers": layers}
    spec |= {"jk": r.choice(("cat", "max", "lstm"))} if maybe(0.12) else {}
    spec |= {"out": r.choice(("tuple", "dictionary"))} if maybe(0.08) else {}
    spec |= {"rows": [r.choice(tuple(ROWS))]} if maybe(0.25) else {}
    for key, share in (("held", 0.15), ("annealed", 0.06), ("frozen first", 0.08)):
        spec |= {key: True} if maybe(share) else {}
    return spec


def place(seed: int) -> tuple[str, int, bool]:
    """(strategy, ranks, is the graph dirty?) of a seed."""
    r = random.Random(-seed - 1)
    strategy = r.choice(("single", "single", "graph_parallel", "graph_parallel", "sar", "gnnpipe", "feature"))
    world = 1 if strategy == "single" else r.choice((1, 2, 2, 4))
    return strategy, min(world, len(draw(seed)["layers"])) if strategy == "gnnpipe" else world, r.random() < 0.7


def judged(spec: Spec, strategy: str, world: int, *, dirty: bool) -> Verdict:
    """`skipped`: PyG itself does not run it."""
    data = graph(seed=spec["seed"], dirty=dirty, edges=keys_of(spec))
    try:
        due: Trained = plain(lambda: build(**kwargs_of(spec)), data)
    except Exception as error:  # whatever PyG says of a combination
        return Verdict("skipped", f"{type(error).__name__}: {str(error)[:200]}")
    if not all(torch.isfinite(value).all() for value in due.state.values()):
        return Verdict("skipped", "not finite")
    found = verdict(TARGET, kwargs_of(spec), data, strategy, world, due, auto=spec["seed"] % 4 > 0)
    noisy = any(name in json.dumps(spec) for name in NOISY) and "nois" in found.why
    places = ("reads rows of edges by numbers of nodes", "depends on the order of edges")
    by_place = any(each in found.why for each in places)  # gnnpar keeps edges in an order of its own
    if found.kind == "refused" and strategy == "single" and not noisy and not by_place:
        return Verdict("refused alone", found.why)
    return found


def judge(seed: int) -> Verdict:
    strategy, world, dirty = place(seed)
    return judged(draw(seed), strategy, world, dirty=dirty)
