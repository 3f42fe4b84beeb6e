"""The row-local half of every view: ids, degrees, keyed dropout, and rows that neighbours will read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

import gnnpar_kernels as kernels
from gnnpar.folds.aggregator import EdgeDropout
from gnnpar.folds.block import Rows
from gnnpar.graph import Moments, Reduction
from gnnpar.parallel.torch_types import Context, apply
from gnnpar.precision import is_narrow
from gnnpar_kernels import Key, fold_key
from gnnpar_kernels.hashing import key_tensor

_FEATURE_MASK, _EDGE_MASK = 0, 1  # kinds of masks

Call = tuple[int, int, int]
"""Layer, tag and kind of a mask."""


class KeyTable:
    """Keys of the masks that one epoch draws, as device tensors, so that a captured epoch reads new numbers in each
    replay. Every epoch draws the same masks in number and order. Shapes: key [3] int32.

    A key keeps its address unless a pass asks for more keys than any earlier pass.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._epoch = 0
        self._row_of: dict[Call, int] = {}
        self._words = torch.empty((0, 3), dtype=torch.int32, device=device)

    def fill(self, epoch: int) -> None:
        """Fill in the keys of this epoch. The host does not wait."""
        self._epoch = epoch
        if self._row_of:
            self._words.copy_(self._drawn(list(self._row_of)))

    def of(self, call: Call) -> Tensor:
        if call not in self._row_of:
            self._row_of[call] = len(self._row_of)
            self._words = torch.cat([self._words, self._drawn([call])])
        return self._words[self._row_of[call]]

    def _drawn(self, calls: list[Call]) -> Tensor:
        keys = [fold_key(self._seed, self._epoch, *call) for call in calls]
        return to_device(key_tensor(*keys), self._device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a device copy of a host tensor without waiting for it."""
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True)
class Pass:
    """One pass through the model: epoch, random numbers, training or evaluation.

    A `probe` draws training's masks and is counted as evaluation. `keys`: keys of this epoch as tensors; None: as
    numbers, with equal masks.
    """

    seed: int
    epoch: int = 0
    training: bool = False
    probe: bool = False
    keys: KeyTable | None = field(default=None, compare=False)

    @property
    def counted(self) -> bool:
        """Return True if the traffic of this pass is part of training."""
        return self.training and not self.probe

    def key(self, kind: int, layer: int, tag: int) -> Key:
        if self.keys is not None:
            return self.keys.of((layer, tag, kind))
        return fold_key(self.seed, self.epoch, layer, tag, kind)


def by_type(type_degree: Tensor | None, in_degree: Tensor, types: int) -> Tensor:
    """Return in-degrees by type, [N, types]. Shapes: type_degree [N, types of the graph], None without types; in_degree
    [N].

    Edges of a graph without types are all of type 0.
    """
    degree = in_degree[:, None] if type_degree is None else type_degree
    if degree.shape[1] > types:
        raise ValueError(
            f"the graph has {degree.shape[1]} types of edges, and the model reads {types} relations; give it as many"
        )
    return degree if degree.shape[1] == types else torch.nn.functional.pad(degree, (0, types - degree.shape[1]))


class LocalRows:
    """Rows of some nodes in one layer of one pass."""

    normalised = False
    random = False  # True if a mask was drawn

    def __init__(
        self, node_ids: Tensor, in_degree: Tensor, in_weight: Tensor | None = None, *, run: Pass, layer: int = 0
    ) -> None:
        self.node_ids, self.in_degree, self.in_weight = node_ids, in_degree, in_weight
        self.run, self.layer = run, layer

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        if p == 0 or not self.run.training:
            return x
        self.random = True
        return apply(_Dropout, x, self.node_ids, p, self.run.key(_FEATURE_MASK, self.layer, tag))

    def mask(self, ids: Tensor, width: int, p: float, *, tag: int) -> Tensor:
        """Return the entries that `dropout` keeps of these nodes' rows, [n, width]. CPU only."""
        return kernels.keep_mask(ids, width, p=p, key=self.run.key(_FEATURE_MASK, self.layer, tag))

    def edge_dropout(self, p: float, *, tag: int = 0) -> EdgeDropout | None:
        if p == 0 or not self.run.training:
            return None
        return EdgeDropout(p, self.run.key(_EDGE_MASK, self.layer, tag))


def masked(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Apply dropout with a given mask, [n, width]. CPU only."""
    return apply(_Dropout, x, None, p, 0, keep)


class OwnRows(LocalRows):
    """The part of a view that needs only its own rows. A view that is a dataclass sets `node_ids`, `in_degree` and
    `in_weight` itself."""

    def destinations(self, *rows: Tensor) -> tuple[Self, Rows]:
        return self, rows

    def moments(self, x: Tensor) -> Moments | None:
        if not self.run.training:
            return None
        raise self._missing_rows("moments")

    @property
    def num_nodes(self) -> int:
        raise self._missing_rows("totals")

    def total(self, part: Tensor, how: Reduction = "sum") -> Tensor:
        raise self._missing_rows("totals")

    def _missing_rows(self, what: str) -> ValueError:
        return ValueError(
            f"{what} of all rows are asked for in layer {self.layer}, of which {type(self).__name__} holds some "
            "at a time: use single, graph_parallel or another strategy that holds a layer's rows at once"
        )


def as_messages(rows: Rows, dtype: torch.dtype, num_rows: int | None = None) -> Rows:
    """Return the rows that neighbours read, rounded to the dtype of held rows if it is narrow. Raises ValueError if
    there is not one row for each of `num_rows` nodes."""
    if num_rows is not None and (other := [list(t.shape) for t in rows if t.shape[:1] != (num_rows,)]):
        raise ValueError(
            f"neighbours read rows of shape {other[0]}, and there are {num_rows} nodes here: hand on one row for each "
            "(for vectors learned for each node set features=learned)"
        )
    if not is_narrow(dtype):
        return rows
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in rows)


class Source(tuple[Tensor, ...]):
    """Source rows with facts for the view; a model sees only rows.

    `constant`: equal in every epoch. `halo()`: the same message on the kept rows of halo nodes.
    """

    halo: Callable[[], Rows] | None
    constant: bool

    def __new__(cls, rows: Rows, *, halo: Callable[[], Rows] | None = None, constant: bool = False) -> Source:
        self = super().__new__(cls, rows)
        self.halo, self.constant = halo, constant
        return self


class _Mask(Context):
    p: float
    key: Key


class _Dropout(torch.autograd.Function):
    """Dropout is linear in x: its gradient is the same mask. A GPU draws the mask again; a CPU keeps it as bytes, which
    is three times as fast and takes a quarter of a float's memory."""

    @staticmethod
    def forward(ctx: _Mask, x: Tensor, ids: Tensor | None, p: float, key: Key, keep: Tensor | None = None) -> Tensor:
        ctx.p, ctx.key = p, key
        flat = x.reshape(len(x), -1)  # the mask's column is the position in the flattened row
        if ids is not None and x.is_cuda:
            ctx.save_for_backward(ids)
            return kernels.dropout(flat, ids, p=p, key=key).view_as(x)
        if keep is None:
            assert ids is not None
            keep = kernels.keep_mask(ids, flat.shape[1], p=p, key=key)
        ctx.save_for_backward(keep)
        return kernels.apply_mask(flat, keep, p=p).view_as(x)

    @staticmethod
    def backward(ctx: _Mask, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = grad_outputs
        (saved,) = ctx.saved_tensors
        flat = grad.reshape(len(grad), -1)
        if grad.is_cuda:
            return kernels.dropout(flat, saved, p=ctx.p, key=ctx.key).view_as(grad), None, None, None, None
        return kernels.apply_mask(flat, saved, p=ctx.p).view_as(grad), None, None, None, None
