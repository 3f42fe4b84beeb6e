"""Dropout of a PyG model with masks keyed by node, so that they are equal on any rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from traceback import walk_stack
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gnnpar.graph import Graph
from gnnpar.models.pyg.layout import Layout
from gnnpar.models.pyg.marks import HERE, EdgeRows
from gnnpar_kernels import keep_mask

LAST_TAG = 16  # before the first dropout of a pass; gnnpar's own models use smaller tags
_DROPOUTS = frozenset({F.dropout, torch.dropout})
_OTHER_NOISE = frozenset(
    {
        *(F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, F.gumbel_softmax, F.rrelu),
        *(torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randint_like),
        *(torch.bernoulli, torch.binomial, torch.multinomial, torch.normal, torch.poisson, torch.randperm),
        *(torch.rrelu, torch.rrelu_, Tensor.bernoulli, Tensor.bernoulli_, Tensor.cauchy_, Tensor.exponential_),
        *(Tensor.geometric_, Tensor.log_normal_, Tensor.multinomial, Tensor.normal_, Tensor.random_, Tensor.uniform_),
    }
)


def _fills_weights() -> bool:
    """Return True if a module initialises its weights, as lazy modules do in their first forward."""
    return any(frame.f_code.co_name == "reset_parameters" for frame, _ in walk_stack(None))


class _NamedDropout(NamedTuple):
    """Arguments of F.dropout or torch.dropout."""

    input: Tensor
    p: float = 0.5
    training: bool = True
    inplace: bool = False

    @classmethod
    def of(cls, args: tuple, given: Mapping[str, Any]) -> Self:  # Any: of any function
        return cls(*args, **{"training" if name == "train" else name: value for name, value in given.items()})


def keyed_dropout(
    g: Graph, num_rows: int, layout: Layout | None = None, *, edge_ids: Tensor | None = None, after: int = LAST_TAG
) -> TorchFunctionMode:
    """Return a context in which dropout draws masks keyed by node, and on rows of edges by edge.

    Other noise from torch's functions is refused. layout: rows are of one node type. after: tag of the last dropout of
    the pass so far. Shapes: edge_ids [E]; tensors of E rows (E not `num_rows`) count as rows of edges without a mark.
    """
    return _KeyedDropout(g.at(0), num_rows, edge_ids=edge_ids, layout=layout, after=after)


def no_dropout() -> TorchFunctionMode:
    """Return a context that refuses dropout, since it would not act on rows of nodes."""
    return _KeyedDropout(None, 0)


class NoDropoutInEvaluation(TorchFunctionMode):
    """Refuse a model that drops entries in evaluation."""

    def __torch_function__(
        self, func: Callable[..., Tensor], types: object, args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> Tensor:
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            asked = _NamedDropout.of(args, given)
            if asked.p and asked.training:
                raise ValueError(
                    "the model drops entries in evaluation, too: F.dropout without training=self.training, or with a "
                    "value of it that to_hetero has traced; use nn.Dropout"
                )
        return func(*args, **given)


class _KeyedDropout(TorchFunctionMode):
    """Turn F.dropout and nn.Dropout on rows of nodes into g.dropout, with a new tag per call of a pass. On rows of
    edges, use masks of attention dropout. g=None: refuse dropout."""

    def __init__(
        self,
        g: Graph | None,
        num_rows: int,
        *,
        edge_ids: Tensor | None = None,
        layout: Layout | None = None,
        after: int = LAST_TAG,
    ) -> None:
        super().__init__()
        self.g, self.num_rows, self.edge_ids, self.layout, self.tag = g, num_rows, edge_ids, layout, after

    def __torch_function__(
        self, func: Callable[..., Tensor], types: object, args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> Tensor:
        given = dict(kwargs or {})
        if func in _OTHER_NOISE and given.get("training", True) and not _fills_weights():
            raise ValueError(f"the model calls {func.__name__}: its noise is not keyed; use F.dropout or nn.Dropout")
        if func is F.scaled_dot_product_attention and (given.get("dropout_p") or (len(args) > 4 and args[4])):
            raise ValueError(
                "the model calls scaled_dot_product_attention with dropout_p: its noise is not keyed; set it to 0"
            )
        if func not in _DROPOUTS:
            return func(*args, **given)
        x, p, training, _ = _NamedDropout.of(args, given)
        if not training or p == 0:
            return x
        if self.g is None:
            raise ValueError("a message has dropout of its own")
        self.tag += 1
        if isinstance(x, EdgeRows) or (self.edge_ids is not None and x.shape[0] == len(self.edge_ids) != self.num_rows):
            return self._of_edges(self.g, x, float(p))
        if self.layout is not None:
            return self.layout.dropout(self.g, x, float(p), tag=self.tag)
        if x.ndim > 2 and x.shape[:2] == (1, self.num_rows):  # from to_dense_batch
            return self.g.dropout(x[0], float(p), tag=self.tag)[None]
        if x.shape[0] != self.num_rows:
            raise ValueError(f"the model drops entries of {list(x.shape)}, which are no rows of nodes or edges")
        return self.g.dropout(x, float(p), tag=self.tag)

    def _of_edges(self, g: Graph, x: Tensor, p: float) -> Tensor:
        here, edge_ids = HERE.get(), self.edge_ids
        if edge_ids is None:
            edge_ids = g.edge_ids if here is None else here.ids(len(x))
        if edge_ids is None or len(edge_ids) != len(x):
            raise ValueError(f"the model drops entries of {list(x.shape)}, made of rows of edges, but not one an edge")
        drop = g.edge_dropout(p, tag=self.tag)
        if drop is None:
            return x
        keep = keep_mask(edge_ids, x[0].numel() if len(x) else 0, p=drop.p, key=drop.key)
        return x * keep.view(x.shape) / (1 - drop.p)
