"""Dropout of a PyG model: masks keyed by node in the place of random ones, so that they are the same on any rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_stack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gnnpar.graph import Graph
from gnnpar.models.pyg.edge_rows import EdgeRows
from gnnpar.models.pyg.layout import Layout
from gnnpar_kernels import keep_mask

LAST_TAG = 16  # before the first dropout of a pass; those of gnnpar's own models have smaller ones
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
    """Whether a module initialises its weights, as lazy modules do in their first forward."""
    return any(frame.f_code.co_name == "reset_parameters" for frame, _ in walk_stack(None))


@contextmanager
def keyed_dropout(
    g: Graph,
    num_rows: int,
    edge_ids: Tensor | None = None,
    layout: Layout | None = None,
    *,
    after: int = LAST_TAG,
) -> Iterator[None]:
    """Inside, dropout draws masks keyed by node, on rows of edges by edge; other noise that torch's functions draw is
    refused. Shapes: edge_ids [E]: tensors of E rows that are not `num_rows` are rows of edges, as EdgeRows are.
    `layout`: rows are those of one type of nodes, and none of edges. `after`: the tag of the last dropout of the pass
    before."""
    with _KeyedDropout(g.at(0), num_rows, edge_ids=edge_ids, layout=layout, after=after):
        yield


@contextmanager
def no_dropout() -> Iterator[None]:
    """Inside, dropout is refused: what it would act on is no row of a node."""
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
    """Inside, a model that evaluates is refused where it drops entries."""
    with _RefusedInEvaluation():
        yield


@contextmanager
def edge_dropout(g: Graph, edge_ids: Tensor | None, num_edges: int) -> Iterator[None]:
    """Inside, dropout on rows of edges draws masks keyed by edge. Shapes: edge_ids [num_edges], None: it is refused."""
    with _KeyedDropout(g, num_edges, by_edge=True, edge_ids=edge_ids):
        yield


class _KeyedDropout(TorchFunctionMode):
    """F.dropout and nn.Dropout on rows of nodes become g.dropout, each call of a pass with a tag of its own; on rows of
    edges, masks of attention dropout."""

    def __init__(
        self,
        g: Graph | None,
        num_rows: int,
        *,
        by_edge: bool = False,
        edge_ids: Tensor | None = None,
        layout: Layout | None = None,
        after: int = LAST_TAG,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.g, self.num_rows, self.by_edge, self.edge_ids, self.tag = g, num_rows, by_edge, edge_ids, after

    def __torch_function__(
        self, func: Callable[..., Tensor], types: object, args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> Tensor:
        given = dict(kwargs or {})
        if func in _OTHER_NOISE and given.get("training", True) and not _fills_weights():
            raise ValueError(f"the model calls {func.__name__}, whose noise is not keyed; F.dropout and nn.Dropout are")
        if func not in _DROPOUTS:
            return func(*args, **given)
        names = ("input", "p", "training" if func is F.dropout else "train", "inplace")
        values: dict[str, object] = dict(zip(names, args, strict=False)) | given
        x, p, training = values["input"], values.get("p", 0.5), values.get(names[2], True)
        assert isinstance(x, Tensor)
        assert isinstance(p, float | int)
        if not training or p == 0:
            return x
        if self.g is not None and self.layout is not None:
            if isinstance(x, EdgeRows):
                raise ValueError("the model drops entries of edge_attr_dict, which is not carried; hand it on whole")
            self.tag += 1
            return self.layout.dropout(self.g, x, float(p), tag=self.tag)
        edge_ids = self.edge_ids
        by_edge = self.by_edge or (edge_ids is not None and x.shape[0] == len(edge_ids) != self.num_rows)
        if self.g is not None and isinstance(x, EdgeRows):
            by_edge, edge_ids = True, self.g.edge_ids
        expected = len(edge_ids) if by_edge and edge_ids is not None else self.num_rows
        if self.g is None or x.shape[0] != expected or (by_edge and edge_ids is None):
            raise ValueError(
                f"the model drops entries of {list(x.shape)}, which are no rows of nodes; a message has "
                "no dropout of its own"
            )
        self.tag += 1
        if by_edge:
            drop = self.g.edge_dropout(float(p), tag=self.tag)
            if drop is None or edge_ids is None:
                return x
            keep = keep_mask(edge_ids, x[0].numel() if len(x) else 0, p=drop.p, key=drop.key)
            return x * keep.view_as(x) / (1 - drop.p)
        return self.g.dropout(x, float(p), tag=self.tag)
