"""Functions and modules of torch and PyG that have another body while a user's forward runs on a rank's rows.

- Dropout draws masks keyed by node, or by edge on rows of edges, so that they are equal on any rank. Other noise is
  refused.
- torch.utils.checkpoint and PyG's reversible modules rerun a part of the model in backward, where row exchanges and
  keyed masks must not run. Here the part runs once and keeps its activations: same values, more memory. As in PyG's own
  loop, a checkpointed part updates the running statistics of BatchNorm1d twice. A part that changes other buffers, or
  numbers kept as module attributes, is refused.
- Batch normalisation has the graph's moments. Some modules of PyG read the number of rows, or get rows without a mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from traceback import walk_stack
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch_geometric.nn import GraphSizeNorm
from torch_geometric.nn.attention import PolynormerAttention, SGFormerAttention
from torch_geometric.nn.models.rev_gnn import InvertibleModule

from gnnpar.graph import Graph, Moments
from gnnpar.models.norm import MomentsOf, batch_norm
from gnnpar.models.pyg.marks import EdgeRows, LocalEdges
from gnnpar.models.pyg.nested import Called, Intercepting, holding, python_state, replaced
from gnnpar.models.pyg.rows import GLOBAL_REDUCTIONS, GlobalReductions, Layout, NodeRows
from gnnpar.models.sgformer import over_all_nodes
from gnnpar_kernels import keep_mask

LAST_TAG = 16  # before the first dropout of a pass; gnnpar's own models use smaller tags
_DROPOUTS = frozenset({F.dropout, torch.dropout})
_ATTENDS: Mapping[object, int] = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
"""Functions with dropout inside, and the position of their argument `dropout_p`."""
_OTHER_NOISE = frozenset(
    {
        *(F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, F.gumbel_softmax, F.rrelu),
        *(torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randint_like),
        *(torch._standard_gamma, torch._sample_dirichlet),  # pyright: ignore[reportPrivateImportUsage] - of torch.distributions
        *(torch.bernoulli, torch.binomial, torch.multinomial, torch.normal, torch.poisson, torch.randperm),
        *(torch.rrelu, torch.rrelu_, Tensor.bernoulli, Tensor.bernoulli_, Tensor.cauchy_, Tensor.exponential_),
        *(Tensor.geometric_, Tensor.log_normal_, Tensor.multinomial, Tensor.normal_, Tensor.random_, Tensor.uniform_),
    }
)
IN_EVALUATION = (
    "the model drops entries in evaluation, too: F.dropout without training=self.training, or with a value of it that "
    "to_hetero has traced; use nn.Dropout"
)


def _rows_and_probability(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True
) -> tuple[Tensor, float]:
    """Return the rows and the probability of a call of F.dropout or torch.dropout, 0 if it drops nothing."""
    return input, float(p) if training and train else 0.0


def keyed_dropout(
    g: Graph, num_rows: int, layout: Layout | None = None, *, edge_ids: Tensor | None = None, after: int = LAST_TAG
) -> TorchFunctionMode:
    """Return a context in which dropout draws masks keyed by node, and on rows of edges by edge. Calls are tagged in
    order.

    Refuse other noise from torch's functions. layout: rows are of one node type. after: tag of the last dropout of the
    pass so far. Shapes: edge_ids [E]; unmarked tensors of E rows (E not `num_rows`) count as rows of edges.
    """
    g, tag = g.at(0), after

    def dropped(x: Tensor, p: float) -> Tensor:
        nonlocal tag
        tag += 1
        if isinstance(x, EdgeRows) or (edge_ids is not None and x.shape[0] == len(edge_ids) != num_rows):
            return _dropped_edges(g, x, p, tag, edge_ids)
        if layout is not None:
            return layout.dropout(g, x, p, tag=tag)
        if x.ndim > 2 and x.shape[:2] == (1, num_rows):  # from to_dense_batch
            return g.dropout(x[0], p, tag=tag)[None]
        if x.shape[0] != num_rows:
            raise ValueError(f"the model drops entries of {list(x.shape)}, which are no rows of nodes or edges")
        return g.dropout(x, p, tag=tag)

    return _dropout_by(dropped)


def no_dropout(why: str = "a message has dropout of its own") -> TorchFunctionMode:
    """Return a context that refuses dropout and other noise."""

    def refused(x: Tensor, p: float) -> Tensor:
        raise ValueError(why)

    return _dropout_by(refused)


def _dropout_by(body: Callable[[Tensor, float], Tensor]) -> TorchFunctionMode:
    """Return a context in which `body` drops entries, and other noise is refused."""

    def called(func: Called, args: tuple, given: Mapping[str, Any]) -> object:  # Any: of any function
        if func in _OTHER_NOISE and given.get("training", True):
            names = (frame.f_code.co_name for frame, _ in walk_stack(None))
            if "reset_parameters" not in names:  # lazy modules initialise in their first forward
                raise ValueError(
                    f"the model calls {func.__name__}: its noise is not keyed; use F.dropout or nn.Dropout"
                )
        place = _ATTENDS.get(func, len(args))
        if given.get("dropout_p", 0 if place >= len(args) else args[place]) and given.get("training", True):
            raise ValueError(f"the model calls {func.__name__} with dropout_p: its noise is not keyed; set it to 0")
        if func in (torch.sort, Tensor.sort) and len(args) == 1 and not args[0].is_floating_point():
            return func(*args, **{"stable": True, **given})  # masks are keyed by row: equal keys keep their order
        if func not in _DROPOUTS:
            return func(*args, **given)
        x, p = _rows_and_probability(*args, **given)
        return body(x, p) if p else x

    return Intercepting(called)


def _dropped_edges(g: Graph, x: Tensor, p: float, tag: int, edge_ids: Tensor | None) -> Tensor:
    """Apply the masks of attention dropout. Shapes: [E, ...] -> [E, ...]."""
    local = LocalEdges.current.get()
    if edge_ids is None:
        edge_ids = g.edge_ids if local is None else local.ids(len(x))
    if edge_ids is None or len(edge_ids) != len(x):
        raise ValueError(f"the model drops entries of {list(x.shape)}, made of rows of edges, but not one an edge")
    drop = g.edge_dropout(p, tag=tag)
    if drop is None:
        return x
    keep = keep_mask(edge_ids, x[0].numel() if len(x) else 0, p=drop.p, key=drop.key)
    return x * keep.view(x.shape) / (1 - drop.p)


_NET: ContextVar[nn.Module | None] = ContextVar("net", default=None)
"""The user's module while its forward runs."""
_PART: ContextVar[bool] = ContextVar("part", default=False)
"""True inside a checkpointed part, which PyG's own loop would rerun in backward."""


@contextmanager
def _part(*, norms: bool = True) -> Iterator[None]:
    """Raise ValueError if module state changes within the context, since a rerun would change it again. norms: allow
    BatchNorm1d, which then moves its statistics twice, to change its buffers."""
    counted = _state(without_norms=norms)
    with holding(_PART, norms):
        yield
    changed = [name for name, state in _state(without_norms=norms).items() if counted.get(name) != state]
    if changed and torch.is_grad_enabled():
        raise ValueError(
            f"{changed[0]} changes in a part that torch.utils.checkpoint or a reversible module would run again, "
            "which would change it again; leave that part out of it"
        )


def _state(*, without_norms: bool) -> dict[str, object]:
    """Return identity and version of each buffer of the model, and each number and string that a module keeps."""
    net = _NET.get()
    assert net is not None
    norms = {name for name, each in net.named_modules() if without_norms and type(each) is nn.BatchNorm1d}
    buffers = {name: (id(t), t._version) for name, t in net.named_buffers() if name.rpartition(".")[0] not in norms}
    return buffers | python_state(net)


@cache
def _replace_checkpoints() -> None:
    """Replace torch's two checkpoint functions once, for all threads; the replacements check if a forward runs."""
    reentrant, other = checkpointing.CheckpointFunction, checkpointing._checkpoint_without_reentrant_generator

    class Checkpoint(reentrant):
        @classmethod
        def apply(cls, run: Callable[..., object], preserve: bool, *args: object) -> object:
            if _NET.get() is None:
                return reentrant.apply(run, preserve, *args)
            trains = any(isinstance(each, Tensor) and each.requires_grad for each in args)
            with _part(), nullcontext() if trains else torch.no_grad():  # as torch: no parameter has a gradient either
                return run(*args)

    def without_reentrant(*args: Any, **kwargs: Any) -> Iterator[object]:  # Any: of torch
        if _NET.get() is None:
            yield from other(*args, **kwargs)
        else:
            with _part():
                yield

    setattr(checkpointing, "CheckpointFunction", Checkpoint)  # noqa: B010 - pyright treats the name as a class
    setattr(checkpointing, "_checkpoint_without_reentrant_generator", without_reentrant)  # noqa: B010


IN_A_FOLD: ContextVar[bool] = ContextVar("in_a_fold", default=False)
"""True while a fold runs the user's code on rows of edges or of a block."""


def _over_heads(moments_of: MomentsOf, length: int, x: Tensor) -> Moments | None:
    """Return the moments of rows [N, C, L] passed as [N * L, C]: per channel, over rows and the last dimension."""
    found = moments_of(x.reshape(-1, length * x.shape[1]))
    if found is None:
        return None
    mean, variance = (t.view(length, -1) for t in found[:2])
    center = mean.mean(0)
    spread = (variance + (mean - center).square()).mean(0)
    return found._replace(mean=center, variance=spread, rows=found.rows * length)


def _norm_forward(norm: nn.BatchNorm1d, g: Graph, layout: Layout | None) -> Callable[[Tensor], Tensor]:
    """Return the module's forward on the own rows of `g`; with a `layout`, on rows of one node type."""
    own = norm.forward

    def forward(input: Tensor) -> Tensor:  # torch's name
        local = LocalEdges.current.get()
        again = norm.training and _PART.get() and torch.is_grad_enabled()
        if isinstance(input, EdgeRows) and local is not None and local.whole:
            if again:
                own(input.detach())
            return own(input)
        source = g.moments if norm.training else None  # may be in evaluation mode while the model trains
        if norm.training and (IN_A_FOLD.get() or isinstance(input, EdgeRows)):
            raise ValueError("a BatchNorm1d normalises rows of edges, which is not supported; use LayerNorm")
        if layout is not None and norm.training:
            if not isinstance(input, NodeRows):
                raise ValueError(
                    f"a BatchNorm1d normalises {list(input.shape)}, which are no rows of one type of nodes"
                )
            source = partial(layout.moments, g, input.kind)
        rows, length = input.as_subclass(Tensor), input.shape[2] if input.ndim == 3 else 1
        if input.ndim == 3:
            rows, source = rows.transpose(1, 2).flatten(0, 1), source and partial(_over_heads, source, length)
        out = batch_norm(norm, source, rows, moves=2 if again else 1)
        if input.ndim == 3:
            out = out.unflatten(0, (-1, length)).transpose(1, 2)
        return out.as_subclass(type(input))

    return forward


def _graph_size(
    norm: GraphSizeNorm, rows: GlobalReductions, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
) -> Tensor:
    if len(x) != rows.own or (batch is not None and bool(batch.any())):
        return type(norm).forward(norm, x, batch, batch_size)
    return x / rows.number() ** 0.5


def _attention(
    conv: SGFormerAttention | PolynormerAttention, rows: GlobalReductions, x: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return linear attention over all nodes. x, mask: from to_dense_batch, which drops the mark of rows. Shapes: x
    [1, N, F], mask [1, N] -> [1, N, F']."""
    if x.shape[:2] != (1, rows.own):
        return type(conv).forward(conv, x, mask)  # pyright: ignore[reportArgumentType] - of one class or the other
    if isinstance(conv, PolynormerAttention):
        return type(conv).forward(conv, NodeRows.of(0, x, 1) if rows.active else x, mask)
    x = x[0].as_subclass(Tensor)
    q, k, v = (lin(x).unflatten(1, (conv.heads, conv.head_channels)) for lin in (conv.q, conv.k, conv.v))
    v = v if mask is None else v.masked_fill(~mask[0][:, None, None], 0.0)
    q, k = (F.normalize(torch.where(t == 0, 1e-6, t), dim=-1) for t in (q, k))
    number, (out, share) = rows.number(), over_all_nodes(rows.g, q, k, v)
    return ((out + number * v) / (share + number)).mean(1).to(x.dtype)[None]


_OF_ALL_NODES = {GraphSizeNorm: _graph_size, SGFormerAttention: _attention, PolynormerAttention: _attention}
"""Forwards of modules that read the number of rows, or get rows without a mark. Inputs other than one row per node of a
single graph run the class's forward."""


@contextmanager
def substituted(
    net: nn.Module, g: Graph, num_rows: int, layout: Layout | None, rows: GlobalReductions | None, after: int | None
) -> Iterator[None]:
    """Within the context, the functions and modules that `net` calls have their other bodies. after: tag of the last
    dropout of the pass so far; None: the pass draws no masks."""
    _replace_checkpoints()
    with ExitStack() as stack:
        if after is not None:
            stack.enter_context(keyed_dropout(g, num_rows, layout, after=after))
        stack.enter_context(holding(GLOBAL_REDUCTIONS, rows))
        stack.enter_context(holding(_NET, net))
        for each in net.modules():
            body: dict[str, object] = {}
            if isinstance(each, InvertibleModule):
                body = {"disable": True, "_forward": _part(norms=False)(each._forward)}
            elif type(each) is nn.BatchNorm1d:
                body = {"forward": _norm_forward(each, g, layout)}
            elif type(each) in _OF_ALL_NODES and rows is not None and layout is None and "forward" not in vars(each):
                body = {"forward": partial(_OF_ALL_NODES[type(each)], each, rows)}
            stack.enter_context(replaced(each, body))
        yield
