"""Dropout of a PyG model with masks keyed by node, so that they are equal on any rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_stack

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


@contextmanager
def keyed_dropout(
    g: Graph, num_rows: int, layout: Layout | None = None, *, edge_ids: Tensor | None = None, after: int = LAST_TAG
) -> Iterator[None]:
    """Within the context, dropout draws masks keyed by node, and on rows of edges by edge.

    Other noise from torch's functions is refused. layout: rows are of one node type. after: tag of the last dropout of
    the pass so far. Shapes: edge_ids [E]; tensors of E rows (E not `num_rows`) count as rows of edges without a mark.
    """
    with _KeyedDropout(g.at(0), num_rows, edge_ids=edge_ids, layout=layout, after=after):
        yield


@contextmanager
def no_dropout() -> Iterator[None]:
    """Within the context, refuse dropout, since it would not act on rows of nodes."""
    with _KeyedDropout(None, 0):
        yield


class _RefusedInEvaluation(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Tensor], types: object, args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> Tensor:
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            name = "training" if func is F.dropout else "train"
            values: dict[str, object] = dict(zip(("input", "p", name), args, strict=False)) | given
            if values.get("p", 0.5) and values.get(name, True):
                raise ValueError(
                    "the model drops entries in evaluation, too: F.dropout without training=self.training, or with a "
                    "value of it that to_hetero has traced; use nn.Dropout"
                )
        return func(*args, **given)


@contextmanager
def no_dropout_in_evaluation() -> Iterator[None]:
    """Within the context, refuse a model that drops entries in evaluation."""
    with _RefusedInEvaluation():
        yield


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
        names = ("input", "p", "training" if func is F.dropout else "train", "inplace")
        values: dict[str, object] = dict(zip(names, args, strict=False)) | given
        x, p, training = values["input"], values.get("p", 0.5), values.get(names[2], True)
        assert isinstance(x, Tensor)
        assert isinstance(p, float | int)
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
