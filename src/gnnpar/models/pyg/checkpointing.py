"""torch.utils.checkpoint and PyG's reversible modules inside of a user's model.

Both run a part of the model again in backward, where no exchange of rows and no keyed mask belongs. Inside of `kept`
the part runs once and its activations are kept: the same numbers, in more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch.utils.checkpoint as checkpointing
from torch import nn
from torch_geometric.nn.models.rev_gnn import InvertibleModule

from gnnpar.models.pyg.propagate import replaced

_KEPT: ContextVar[bool] = ContextVar("kept", default=False)


@contextmanager
def kept(net: nn.Module) -> Iterator[None]:
    """Inside, nothing runs again in backward."""
    _install()
    before = _KEPT.set(True)
    try:
        with ExitStack() as stack:
            for each in net.modules():
                if isinstance(each, InvertibleModule):
                    stack.enter_context(replaced(each, {"disable": True}))
            yield
    finally:
        _KEPT.reset(before)


@cache
def _install() -> None:
    """Ranks may be threads: torch's two ways to checkpoint are replaced once, and ask whether `kept` is entered."""
    reentrant, other = checkpointing.CheckpointFunction, checkpointing._checkpoint_without_reentrant_generator

    class Checkpoint(reentrant):
        @classmethod
        def apply(cls, run: Callable[..., object], preserve: bool, *args: object) -> object:
            return run(*args) if _KEPT.get() else reentrant.apply(run, preserve, *args)

    def without_reentrant(*args: Any, **kwargs: Any) -> Iterator[object]:  # Any: of torch
        return once() if _KEPT.get() else other(*args, **kwargs)

    def once() -> Iterator[None]:
        yield

    setattr(checkpointing, "CheckpointFunction", Checkpoint)  # noqa: B010 - pyright knows the name as a class
    setattr(checkpointing, "_checkpoint_without_reentrant_generator", without_reentrant)  # noqa: B010
