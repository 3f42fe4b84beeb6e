"""Initial weights: each module's own initialisation, with a generator that depends only on the seed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gnnpar.models.dense import dense
from gnnpar.seeding import torch_seeded
from gnnpar_kernels import fold_key

T = TypeVar("T", bound=nn.Module)

_EMPTY = frozenset({torch.empty, torch.empty_like, torch.Tensor.new_empty})


@runtime_checkable
class Glorot(Protocol):
    """A module with matrices for `draw_glorot` to fill. glorot: names of their attributes."""

    glorot: ClassVar[tuple[str, ...]]


class Linear(nn.Linear):
    """A dense layer with Glorot-uniform weights and zero bias."""

    glorot = ("weight",)

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return dense(input, self.weight, self.bias)


def construct(make: Callable[[], T], seed: int) -> T:
    """Return the module that `make` builds, with initial weights that depend on `seed` alone.

    Seed torch's generator for the module's own random numbers and restore it afterwards. Fill the matrices in `glorot`.
    ValueError if a parameter stays uninitialised.
    """
    with torch_seeded(fold_key(seed, zlib.crc32(b"construct")) & 0xFFFFFFFF), _EmptyIsNaN():
        model = make()
    draw_glorot(model, seed)
    for name, parameter in model.named_parameters():
        if bool(parameter.isnan().any()):
            prefix, _, leaf = name.rpartition(".")
            raise ValueError(
                f"{name} of the model has no initial values: let {type(model.get_submodule(prefix)).__name__} set them "
                f'(torch.nn.init), or name them there as glorot = ("{leaf}",).'
            )
    return model


def draw_glorot(model: nn.Module, seed: int) -> None:
    """Fill the matrices that modules list in `glorot` with Glorot-uniform values. A draw depends only on (seed, name of
    the matrix), so a layer has the same initial weights on any rank."""
    for prefix, module in model.named_modules():
        matrices = dict(module.named_parameters(recurse=False))
        for name in module.glorot if isinstance(module, Glorot) else ():
            key = fold_key(seed, zlib.crc32(f"{prefix}.{name}".encode()))
            low = key & 0xFFFFFFFF  # the CPU's generator ignores other bits of a seed
            with torch.no_grad():
                nn.init.xavier_uniform_(matrices[name], generator=torch.Generator().manual_seed(low))


class _EmptyIsNaN(TorchFunctionMode):
    """Fill uninitialised memory with NaN."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY and isinstance(out, Tensor) and out.is_floating_point():
            out.detach().fill_(torch.nan)
        return out
