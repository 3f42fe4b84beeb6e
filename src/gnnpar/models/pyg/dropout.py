"""Dropout of a PyG model with masks keyed by node, so that they are equal on any rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from traceback import walk_stack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gnnpar.graph import Graph
from gnnpar.models.pyg.layout import Layout
from gnnpar.models.pyg.marks import EdgeRows, LocalEdges
from gnnpar.models.pyg.nested import Called, Intercepting
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
