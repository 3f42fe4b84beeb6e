"""Optimizers of torch as configuration, with learning-rate schedules, weight-decay groups, clipping and steps on a GPU.

The learning rate depends only on the epoch, so that a resumed run continues on the same curve.
"""

# torch's own optimizers use these list functions, which torch declares private
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, ClassVar, Literal, TypeVar, cast

import annotated_types as at
import torch
from torch import Tensor, nn

from gnnpar.files import JsonDict
from gnnpar.parallel.local import to_device

LayerOf = Callable[[str], int | None]  # global parameter name -> layer; None: encoder, decoder
Rate = Annotated[float, at.Gt(0)]
Share = Annotated[float, at.Ge(0), at.Lt(1)]
Kind = TypeVar("Kind", bound=torch.optim.Optimizer)
Tensors = list[Tensor] | tuple[Tensor, ...]
MOMENTS = {"Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}
"""Class name of an optimizer -> its state per parameter, besides the step count."""


def eager(kind: type[Kind]) -> type[Kind]:
    """Return an optimizer class of torch without its import of torch._dynamo, which takes as long as torch itself. The
    methods are torch's, without the wrapper that disables the compiler in them."""
    plain = {
        "add_param_group": inspect.unwrap(kind.add_param_group),
        "zero_grad": inspect.unwrap(kind.zero_grad),
        "step": torch.no_grad()(inspect.unwrap(kind.step)),
    }
    return cast("type[Kind]", type(kind.__name__, (kind,), plain))


_Adam, _AdamW, _SGD = eager(torch.optim.Adam), eager(torch.optim.AdamW), eager(torch.optim.SGD)


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """Fields of all optimizers.

    decay: the parameters that `weight_decay` acts on - all; weights (matrices, no biases and norms); first_layer.
    schedule: constant; cosine (to 0 at the last epoch); step (times gamma every step_every epochs); warmup (linear,
    then constant). `warmup_epochs` also precedes cosine and step.
    """

    lr: Rate = 0.01
    weight_decay: Annotated[float, at.Ge(0)] = 0.0
    decay: Literal["all", "weights", "first_layer"] = "all"
    clip: Rate | None = None
    schedule: Literal["constant", "cosine", "step", "warmup"] = "constant"
    warmup_epochs: Annotated[int, at.Ge(0)] = 0
    step_every: Annotated[int, at.Ge(1)] = 100
    gamma: Annotated[float, at.Gt(0), at.Le(1)] = 0.5

    def __post_init__(self) -> None:
        if self.schedule == "warmup" and not self.warmup_epochs:
            raise ValueError("schedule=warmup with warmup_epochs=0 warms up never; set optim.warmup_epochs above 0")

    def factor(self, epoch: int, epochs: int) -> float:
        """Return the learning rate of an epoch, relative to lr."""
        if epoch < self.warmup_epochs:
            return (epoch + 1) / (self.warmup_epochs + 1)
        if self.schedule == "cosine":
            done = (epoch - self.warmup_epochs) / max(1, epochs - self.warmup_epochs)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        if self.schedule == "step":
            return self.gamma ** ((epoch - self.warmup_epochs) // self.step_every)
        return 1.0

    def build(self, parameters: Iterable[tuple[str, nn.Parameter]], *, epochs: int, layer_of: LayerOf) -> Stepper:
        """Make the optimizer of some named parameters, in groups with and without weight decay."""
        named = list(parameters)
        decayed = [p for name, p in named if self._decays(name, p, layer_of)]
        others = [p for name, p in named if not self._decays(name, p, layer_of)]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return Stepper(self.of_groups(groups), config=self, epochs=epochs, names={p: name for name, p in named})

    def _decays(self, name: str, parameter: nn.Parameter, layer_of: LayerOf) -> bool:
        if self.decay == "weights":
            return parameter.ndim > 1
        return self.decay == "all" or layer_of(name) == 0 or name.startswith("encoder.")

    def of_groups(self, groups: list[JsonDict]) -> torch.optim.Optimizer:
        """Make torch's optimizer of parameter groups."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Adam(RateSchedule):
    """Adam; weight decay as a term of the gradient."""

    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Rate = 1e-8
    kind: ClassVar[type[torch.optim.Adam]] = _Adam

    def of_groups(self, groups: list[JsonDict]) -> torch.optim.Optimizer:
        return self.kind(groups, lr=self.lr, betas=self.betas, eps=self.eps)


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay."""

    kind: ClassVar[type[torch.optim.Adam]] = _AdamW


@dataclass(frozen=True, kw_only=True)
class SGD(RateSchedule):
    """Gradient descent with momentum."""

    momentum: Share = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=true needs momentum above 0; set optim.momentum or optim.nesterov=false")

    def of_groups(self, groups: list[JsonDict]) -> torch.optim.Optimizer:
        return _SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)


def numbers_of(kind: str, group: JsonDict, step: int) -> list[float]:
    """Return the numbers that change from step to step; `step` counts from 1."""
    lr = group["lr"]
    if kind == "SGD":
        return [-lr]
    beta1, beta2 = group["betas"]
    return [-lr / (1 - beta1**step), (1 - beta2**step) ** 0.5, 1 - lr * group["weight_decay"]]


def adam(
    group: JsonDict, values: Tensors, gradients: Tensors, moments: list[Tensors], numbers: Tensors, *, decoupled: bool
) -> list[Tensors]:
    """Return values and moments after a step of Adam (Kingma and Ba 2015) or AdamW (`decoupled`)."""
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    (mean, square), (minus_size, root, left) = moments, numbers
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
    return [torch._foreach_add(values, move), mean, square]


def sgd(
    group: JsonDict, values: Tensors, gradients: Tensors, moments: list[Tensors], minus_rate: Tensor
) -> list[Tensors]:
    """Return values and moments after a step of SGD with torch's momentum: its first buffer is the gradient."""
    if decay := group["weight_decay"]:
        gradients = torch._foreach_add(gradients, values, alpha=decay)
    move = gradients
    if momentum := group["momentum"]:
        move = buffer = torch._foreach_mul(moments[0], momentum)
        torch._foreach_add_(buffer, gradients)
        moments = [buffer]
        if group["nesterov"]:
            move = torch._foreach_add(gradients, buffer, alpha=momentum)
    return [[torch.addcmul(v, m, minus_rate) for v, m in zip(values, move, strict=True)], *moments]


class DeviceStep:
    """Steps of torch's optimizer on the device without waiting on the host, so that a CUDA graph can capture them.

    The arithmetic and the state equal torch's own on a CPU, to the bit. Frozen parameters have no state. `prepare`
    copies the learning rate and the numbers that depend on the step count to a tensor; `launch` runs the step, or its
    captured launch is replayed. A step refused for a non-finite gradient also counts.
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
            parameters: Tensors = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            states = [self._state_of(group, p) for p in parameters]
            gradients: Tensors = [p.grad for p in parameters if p.grad is not None]
            moments: list[Tensors] = [[s[name] for s in states] for name in self._moments(group)]
            if self._kind == "SGD":
                after = sgd(group, parameters, gradients, moments, row[0])
            else:
                adamw = self._kind == "AdamW"
                after = adam(group, parameters, gradients, moments, row.unbind(), decoupled=adamw)
            olds, news = (list(chain.from_iterable(each)) for each in ((parameters, *moments), after))
            taken = [torch.where(finite, new, old) for old, new in zip(olds, news, strict=True)]
            torch._foreach_copy_(olds, taken)

    @property
    def _groups(self) -> list[JsonDict]:
        return [group for group in self._optimizer.param_groups if any(p.requires_grad for p in group["params"])]

    def _moments(self, group: JsonDict) -> tuple[str, ...]:
        return () if self._kind == "SGD" and not group["momentum"] else MOMENTS[self._kind]

    def _state_of(self, group: JsonDict, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter, created at the first step as in torch."""
        if not (names := self._moments(group)):
            return {}
        state = self._optimizer.state[parameter]
        if not state:
            state |= {} if self._kind == "SGD" else {"step": torch.tensor(0.0)}
            state |= {name: torch.zeros_like(parameter) for name in names}
        return state


class Stepper:
    """The optimizer of an engine: zero_grad, then step once the gradient is the global one.

    refused: the last step left the weights unchanged, because a gradient was not finite. Reading it waits for a GPU. On
    a GPU, a step is `prepare` on the host, and `launch`, which a CUDA graph may capture.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, config: RateSchedule, epochs: int, names: dict[nn.Parameter, str]
    ) -> None:
        refuse_closure(optimizer)
        self.optimizer, self.config, self.epochs, self.names = optimizer, config, epochs, names
        self._refused = False
        self._finite: Tensor | None = None  # of the last step, if it ran on the device
        self._on_device = DeviceStep(optimizer)
        self._on_cpu = all(p.device.type == "cpu" for p in self.parameters)
        self.schedule(0)

    @property
    def refused(self) -> bool:
        return self._refused if self._finite is None else not bool(self._finite)

    @property
    def lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def schedule(self, epoch: int) -> None:
        """Set the learning rate of an epoch."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * self.config.factor(epoch, self.epochs)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, norm: float | None = None) -> None:
        """Clip by the global norm if configured, then update. norm: gradient norm over all stages, which act as one.
        The host does not wait for a GPU."""
        if not self._on_cpu:
            self.prepare()
            self.launch(norm)
            return
        self._refused = not (bool(self._all_finite()) and (norm is None or math.isfinite(norm)))
        if not self._refused:
            self._clip(norm)
            self.optimizer.step()

    def prepare(self) -> None:
        """Run the host's part of a step on a GPU."""
        self._on_device.prepare()

    def launch(self, norm: float | None = None) -> None:
        """Launch the GPU's part of a prepared step."""
        self._finite = self._all_finite()
        if norm is not None:
            self._finite = self._finite & torch.isfinite(self._like_parameters(norm))
        self._clip(norm)
        self._on_device.launch(self._finite)

    def _all_finite(self) -> Tensor:
        found = [p.grad for p in self.parameters if p.grad is not None and p.grad.numel() > 0]
        if not found:
            return torch.tensor(True)
        widest = functools.reduce(torch.promote_types, (gradient.dtype for gradient in found))
        largest = torch._foreach_norm(found, torch.inf)  # nan if a gradient contains one
        return torch.isfinite(torch.stack([each.to(widest) for each in largest])).all()

    def _clip(self, norm: float | None) -> None:
        if self.config.clip is not None and norm is None:
            nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        elif self.config.clip is not None and norm is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip, self._like_parameters(norm))

    def _like_parameters(self, number: float) -> Tensor:
        like = self.parameters[0]
        return to_device(torch.tensor(number, dtype=like.dtype), like.device)

    def state_dict(self) -> JsonDict:
        """Return the state by parameter name, for any division of the parameters."""
        kept = self.optimizer.state
        state = {self.names[p]: dict(kept[p]) for p in self.parameters if p in kept}
        return {"kind": type(self.optimizer).__name__, "state": state}

    def load_state_dict(self, state: JsonDict) -> None:
        """Load the state of the parameters that this rank holds."""
        by_name = {name: p for p, name in self.names.items()}
        for name, slots in state["state"].items():
            if (p := by_name.get(name)) is not None:
                self.optimizer.state[p] = {k: _placed(k, v, p) for k, v in slots.items()}


def refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer with a step that needs a closure for the loss."""
    if any(each.default is each.empty for each in inspect.signature(optimizer.step).parameters.values()):
        raise ValueError(
            f"optim={type(optimizer).__name__.lower()}: needs to evaluate the loss several times a step (an engine "
            "gives one gradient a step). Use adam, adamw, sgd or another whose step() takes nothing."
        )


def _placed(slot: str, value: object, parameter: nn.Parameter) -> object:
    """Copy moments to the device and type of their parameter; a step count stays as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if slot == "step" else value.to(parameter.device, parameter.dtype, copy=True)
