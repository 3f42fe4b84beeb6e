"""A world of threads of which one runs at a time: many parts of a graph on one device, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gnnpar.comm.threads import ThreadWorld


class TurnWorld(ThreadWorld):
    """A rank runs until it needs what is not there yet. Then it calls `leaves` and another one has its turn.

    `posted` is told every buffer that is put into a mailbox. Both run while nothing else does.
    """

    def __init__(
        self, size: int, *, device: torch.device | None, leaves: Callable[[], None], posted: Callable[[Tensor], None]
    ) -> None:
        super().__init__(size, device=device)
        self._turn, self._leaves, self._posted = threading.Lock(), leaves, posted

    def turn(self) -> AbstractContextManager[Any]:
        return self._turn

    def put(self, key: tuple, item: Any) -> None:
        for each in item if isinstance(item, tuple) else (item,):
            if isinstance(each, Tensor):
                self._posted(each)
        super().put(key, item)

    def take(self, key: tuple) -> Any:
        if not self.box(key).empty():  # nobody else takes from this box
            return super().take(key)
        self._leaves()
        self._turn.release()
        try:
            return super().take(key)
        finally:
            self._turn.acquire()
