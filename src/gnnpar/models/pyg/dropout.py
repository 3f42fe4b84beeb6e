"""Dropout of a PyG model: masks keyed by node in the place of random ones, so that they are the same on any rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gnnpar.graph import Graph

_TAG = 16  # of the first dropout of a pass; those of gnnpar's own models have smaller ones
_DROPOUTS = frozenset({F.dropout, torch.dropout})
_OTHER_NOISE = frozenset(
    {F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, F.gumbel_softmax}
)


@contextmanager
def keyed_dropout(g: Graph, num_rows: int) -> Iterator[None]:
    """Inside, dropout draws masks keyed by node; other noise that torch's functions draw is refused."""
    with _KeyedDropout(g.at(0), num_rows):
        yield


@contextmanager
def no_dropout() -> Iterator[None]:
    """Inside, dropout is refused: what it would act on is no row of a node."""
    with _KeyedDropout(None, 0):
        yield


class _KeyedDropout(TorchFunctionMode):
    """F.dropout and nn.Dropout on rows of nodes become g.dropout, each call of a pass with a tag of its own."""

    def __init__(self, g: Graph | None, num_rows: int) -> None:
        super().__init__()
        self.g, self.num_rows, self.calls = g, num_rows, 0

    def __torch_function__(
        self, func: Callable[..., Tensor], types: object, args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> Tensor:
        given = dict(kwargs or {})
        if func in _OTHER_NOISE:
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
        if self.g is None or x.shape[0] != self.num_rows:
            raise ValueError(
                f"the model drops entries of {list(x.shape)}, which are no rows of nodes; a message has "
                "no dropout of its own"
            )
        self.calls += 1
        return self.g.dropout(x, float(p), tag=_TAG + self.calls)
