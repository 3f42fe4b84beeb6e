"""torch.utils.checkpoint and PyG's reversible modules in a user's model.

Both rerun a part of the model in backward, where row exchanges and keyed masks must not run. Inside `kept` the part
runs once and keeps its activations: same values, more memory. As in PyG's own loop, a checkpointed part updates the
running statistics of BatchNorm1d twice. A part that changes other buffers, or numbers kept as module attributes, is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch_geometric.nn.models.rev_gnn import InvertibleModule

from gnnpar.models.pyg.nested import holding, python_state, replaced

_KEPT: ContextVar[nn.Module | None] = ContextVar("kept", default=None)
_PART: ContextVar[bool] = ContextVar("part", default=False)


def runs_again() -> bool:
    """Return True inside a checkpointed part that PyG's own loop would rerun in backward."""
    return _PART.get() and torch.is_grad_enabled()


@contextmanager
def kept(net: nn.Module) -> Iterator[None]:
    """Within the context, rerun no part in backward."""
    _install()
    with holding(_KEPT, net), ExitStack() as stack:
        for each in net.modules():
            if isinstance(each, InvertibleModule):
                once = {"disable": True, "_forward": _part(norms=False)(each._forward)}
                stack.enter_context(replaced(each, once))
        yield


@contextmanager
def _part(*, norms: bool = True) -> Iterator[None]:
    """Raise ValueError if module state changes within the context, since a rerun would change it again. norms: allow
    BatchNorm1d, which calls `runs_again`, to change its buffers."""
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
    net = _KEPT.get()
    assert net is not None
    norms = {name for name, each in net.named_modules() if without_norms and type(each) is nn.BatchNorm1d}
    buffers = {name: (id(t), t._version) for name, t in net.named_buffers() if name.rpartition(".")[0] not in norms}
    return buffers | python_state(net)


@cache
def _install() -> None:
    """Replace torch's two checkpoint functions once, for all threads; the replacements check if `kept` is active."""
    reentrant, other = checkpointing.CheckpointFunction, checkpointing._checkpoint_without_reentrant_generator

    class Checkpoint(reentrant):
        @classmethod
        def apply(cls, run: Callable[..., object], preserve: bool, *args: object) -> object:
            if _KEPT.get() is None:
                return reentrant.apply(run, preserve, *args)
            trains = any(isinstance(each, Tensor) and each.requires_grad for each in args)
            with _part(), nullcontext() if trains else torch.no_grad():  # as torch: no parameter has a gradient either
                return run(*args)

    def without_reentrant(*args: Any, **kwargs: Any) -> Iterator[object]:  # Any: of torch
        if _KEPT.get() is None:
            yield from other(*args, **kwargs)
        else:
            with _part():
                yield

    setattr(checkpointing, "CheckpointFunction", Checkpoint)  # noqa: B010 - pyright treats the name as a class
    setattr(checkpointing, "_checkpoint_without_reentrant_generator", without_reentrant)  # noqa: B010
