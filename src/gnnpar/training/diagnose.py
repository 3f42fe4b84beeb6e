"""Explain non-finite numbers and exhausted memory, and name a setting to change."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gnnpar.parallel.engine import Engine
from gnnpar.settings import Settings

if TYPE_CHECKING:
    from gnnpar.training.loop import Run

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory", "Cannot allocate memory")


def finite_weights(engine: Engine) -> bool:
    """Return whether all weights are finite; a step with a finite gradient may overflow their type."""
    found = [torch.isfinite(p).all() for _, p in engine.named_parameters()]
    return not found or bool(torch.stack(found).all())


def non_finite_line(run: Run, epoch: int, loss: float) -> str:
    """Return a line that names the non-finite number of an epoch. Repeat a training pass exactly (no codec, no history)
    with the weights from its start, to name the first non-finite tensor and the layer. Collective."""
    engine, comm = run.engine, run.comm
    held = _first_of([("the features", run.shard.x), *engine.named_parameters()])
    if any(comm.broadcast(comm.gather(held))):
        mine = (held, None, None)
    else:
        with _watched(run.model) as found:
            gradient = engine.exact_gradient(epoch)
        output = f"the output of {found[0]}" if found else None
        back = [(f"the gradient of {name}", g) for name, g in reversed(list(gradient.items()))]
        mine = (None, output, _first_of(back))
    everyone = comm.broadcast(comm.gather(mine))
    cause = "every tensor of an exact pass is finite, so the codec or history of the strategy is not"
    # by kind: outputs of any stage come before gradients
    named = [(rank, what) for kind in zip(*everyone, strict=True) for rank, what in enumerate(kind) if what]
    if named:
        rank, what = named[0]
        layer = run.model.layer_of(what.rpartition(" ")[2])
        where = "" if layer is None else f" (layer {layer})"
        cause = f"the first tensor that is not finite is {what}{where}, on rank {rank}"
    problem = f"the loss is {loss} in epoch {epoch}"
    if math.isfinite(loss):
        broken = "the gradient" if run.optimizer.refused else "a weight after the step"
        problem = f"{broken} of epoch {epoch} is not finite (loss {loss:.4g})"
    return f"{problem}: {cause}; lower optim.lr or set optim.clip"


def _first_of(named: list[tuple[str, Tensor]]) -> str | None:
    return next((name for name, t in named if t.is_floating_point() and not bool(torch.isfinite(t).all())), None)


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    """Collect modules with non-finite outputs in the order of the pass, innermost first."""
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, args: object, out: object) -> None:
            tensors = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)]
            if any(not bool(torch.isfinite(t.detach()).all()) for t in tensors):
                found.append(name)

        return hook

    handles = [m.register_forward_hook(look(name)) for name, m in model.named_modules() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports exhausted host or GPU memory."""
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    return said or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def out_of_memory(error: BaseException, settings: Settings, world_size: int) -> MemoryError:
    """Return the error in one line, with the next setting that needs less memory: the strategy's own, else SAR, else
    out of core."""
    size = ""
    if asked := re.search(r"allocate (\d[\d.]*) ?(bytes|[KMGT]i?B)?", str(error)):
        unit = asked[2] or "bytes"
        size = f" ({float(asked[1]) / 2**30:.2f} GiB were asked for)" if unit == "bytes" else f" ({asked[1]} {unit})"
    if (less_memory := settings.strategy.capabilities.less_memory) is not None:
        remedy = less_memory(world_size)
    elif world_size > 1:
        remedy = (
            f"strategy=sar holds about (2 + prefetch)/{world_size} of the rows on a rank, whatever the cut; "
            f"strategy=sar strategy.logical_parts={4 * world_size} world_size=1 trains out of core"
        )
    else:
        remedy = (
            "strategy=sar strategy.logical_parts=4 trains out of core, a quarter of the graph on the device at a time"
        )
    return MemoryError(f"out of memory{size}: {remedy}")
