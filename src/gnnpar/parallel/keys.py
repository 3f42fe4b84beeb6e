"""Mask keys as device tensors, so that a captured epoch reads new numbers in each replay."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnpar_kernels import fold_key
from gnnpar_kernels.hashing import key_tensor

Call = tuple[int, int, int]
"""Layer, tag and kind of a mask."""


class KeyTable:
    """Keys of the masks that one epoch draws; every epoch draws the same masks in number and order. Shapes: key [3]
    int32.

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
