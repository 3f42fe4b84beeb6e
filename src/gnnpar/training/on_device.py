"""Run steps of torch's optimizers on the device without waiting on the host, so that a CUDA graph can capture them.

Before a step, the host copies the learning rate and the numbers that depend on the step count to a tensor. Nothing is
read back: with a non-finite gradient, parameters and their state stay unchanged.

The arithmetic equals torch's own step on a CPU, to the bit.
"""

# torch's own optimizers use these list functions, which torch declares private
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from gnnpar.files import JsonDict
from gnnpar.parallel.keys import to_device

Group = JsonDict
"""A parameter group of torch.optim: parameters, rates and decay by name."""

MOMENTS: dict[str, tuple[str, ...]] = {
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "SGD": ("momentum_buffer",),
}
"""Class name of an optimizer -> its state per parameter, besides the step count."""


class Before(NamedTuple):
    """Values, gradients and moments of the parameters of a group."""

    values: list[Tensor]
    gradients: list[Tensor]
    moments: list[list[Tensor]]


def largest_of(tensors: list[Tensor]) -> list[Tensor]:
    """Return the largest magnitude of each tensor, nan if it contains one. Shapes: [...], not empty -> []."""
    return list(torch._foreach_norm(tensors, torch.inf))


def numbers_of(kind: str, group: Group, step: int) -> list[float]:
    """Return the numbers that change from step to step; `step` counts from 1."""
    lr = group["lr"]
    if kind == "SGD":
        return [-lr]
    beta1, beta2 = group["betas"]
    return [-lr / (1 - beta1**step), (1 - beta2**step) ** 0.5, 1 - lr * group["weight_decay"]]


def adam(group: Group, before: Before, numbers: Sequence[Tensor], *, decoupled: bool) -> list[list[Tensor]]:
    """Return values and moments after a step of Adam (Kingma and Ba 2015) or AdamW (`decoupled`)."""
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    values, gradients, (mean, square) = before
    minus_size, root, left = numbers
    if decay and decoupled:
        values = torch._foreach_mul(values, left)
    elif decay:
        gradients = torch._foreach_add(gradients, values, alpha=decay)
    mean = torch._foreach_lerp(mean, gradients, 1 - beta1)
    square = torch._foreach_mul(square, beta2)
    torch._foreach_addcmul_(square, gradients, gradients, 1 - beta2)
    size = torch._foreach_sqrt(square)
    torch._foreach_div_(size, root)
    torch._foreach_add_(size, group["eps"])
    move = torch._foreach_mul(mean, minus_size)
    torch._foreach_div_(move, size)
    return [list(each) for each in (torch._foreach_add(values, move), mean, square)]


def sgd(group: Group, before: Before, numbers: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return values and moments after a step of SGD with torch's momentum: its first buffer is the gradient."""
    values, gradients, moments = before
    (minus_rate,) = numbers
    if decay := group["weight_decay"]:
        gradients = torch._foreach_add(gradients, values, alpha=decay)
    move = gradients
    if momentum := group["momentum"]:
        move = buffer = torch._foreach_mul(moments[0], momentum)
        torch._foreach_add_(buffer, gradients)
        moments = [list(buffer)]
        if group["nesterov"]:
            move = torch._foreach_add(gradients, buffer, alpha=momentum)
    return [[torch.addcmul(v, m, minus_rate) for v, m in zip(values, move, strict=True)], *moments]


class DeviceStep:
    """Steps of one optimizer, with its state as in torch. Frozen parameters have no state.

    `prepare` runs the host's part of a step, `launch` the device's. A captured `launch` is replayed after each
    `prepare`. A refused step also counts.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._kind = optimizer, type(optimizer).__name__
        self._numbers: Tensor | None = None  # [groups, numbers]

    def prepare(self) -> None:
        """Count a step, and copy its numbers to the device without waiting."""
        rows: list[list[float]] = []
        for group in self._groups:
            states = [self._state_of(group, p) for p in group["params"] if p.requires_grad]
            for state in states:
                if "step" in state:
                    state["step"] += 1
            rows.append(numbers_of(self._kind, group, max(int(s.get("step", 0)) for s in states)))
        first = self._groups[0]["params"][0]
        new = to_device(torch.tensor(rows, dtype=first.dtype), first.device)
        self._numbers = new if self._numbers is None else self._numbers.copy_(new)

    @torch.no_grad()
    def launch(self, finite: Tensor) -> None:
        """Launch the prepared step; it has no effect unless `finite` [] is true."""
        assert self._numbers is not None, "prepare comes first"
        for group, row in zip(self._groups, self._numbers, strict=True):
            parameters: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            numbers = row.unbind()
            states = [self._state_of(group, p) for p in parameters]
            moments = [[s[name] for s in states] for name in self._moments(group)]
            before = Before(parameters, [p.grad for p in parameters if p.grad is not None], moments)
            if self._kind == "SGD":
                after = sgd(group, before, numbers)
            else:
                after = adam(group, before, numbers, decoupled=self._kind == "AdamW")
            olds, news = (list(chain.from_iterable(each)) for each in ((parameters, *moments), after))
            taken = [torch.where(finite, new, old) for old, new in zip(olds, news, strict=True)]
            torch._foreach_copy_(olds, taken)

    @property
    def _groups(self) -> list[Group]:
        return [group for group in self._optimizer.param_groups if any(p.requires_grad for p in group["params"])]

    def _moments(self, group: Group) -> tuple[str, ...]:
        return () if self._kind == "SGD" and not group["momentum"] else MOMENTS[self._kind]

    def _state_of(self, group: Group, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter, created at the first step as in torch."""
        if not (names := self._moments(group)):
            return {}
        state = self._optimizer.state[parameter]
        if not state:
            state |= {} if self._kind == "SGD" else {"step": torch.tensor(0.0)}
            state |= {name: torch.zeros_like(parameter) for name in names}
        return state
