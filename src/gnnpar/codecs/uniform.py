"""Bits without statistics: equal for every row, or random (AdaQP's ablations)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from gnnpar.codecs.codec import Codec, Exactness, WirePrice
from gnnpar.codecs.quantized import DIRECTIONS, Key, QuantizedRows, price_of_codes
from gnnpar.comm import Communicator, RowLists
from gnnpar_kernels import fold_key
from gnnpar_kernels.quantize.naive import random_bits
from gnnpar_kernels.wire import BF16, FP8, FP32

Bits = Literal[1, 2, 4, 8, 32, "fp8", "bf16"]
GridBits = Literal[1, 2, 4, 8]
CODES = {"fp8": FP8, "bf16": BF16, 32: FP32}


def code_of(bits: Bits) -> int:
    """Return the code of `gnnpar_kernels.wire`."""
    return CODES.get(bits, bits)  # type: ignore[return-value]  # other values are codes


def bits_of_code(code: int) -> int:
    """Return the bits per element of a code."""
    return {FP8: 8, BF16: 16, FP32: 32}.get(code, code)


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Every row in `bits`, every gradient row in `gradient_bits` (null: the same). score_bits: operands other than
    feature rows (attention scores), each with its own scale."""

    bits: Bits = 8
    gradient_bits: Bits | None = None
    score_bits: Bits = 8

    @property
    def exactness(self) -> frozenset[Exactness]:
        used = {self.bits, self.gradient_bits or self.bits, self.score_bits if self.bits != 32 else 32}
        if used == {32}:
            return frozenset({"exact"})
        return frozenset({"rounded"}) if used <= {32, "bf16"} else frozenset({"quantized"})

    def build(self, lists: RowLists, comm: Communicator, seed: int) -> Codec:
        scores = code_of(32 if self.bits == 32 else self.score_bits)
        return _Uniform(lists, seed, code_of(self.bits), code_of(self.gradient_bits or self.bits), scores)

    def price(self, num_rows: float, widths: Sequence[int], *, itemsize: int = 4, gradient: bool = False) -> WirePrice:
        first = code_of((self.gradient_bits or self.bits) if gradient else self.bits)
        scores = code_of(32 if self.bits == 32 else self.score_bits)
        return WirePrice(*price_of_codes(num_rows, widths, [first], scores, itemsize=itemsize), bits_of_code(first))


class _Uniform(QuantizedRows):
    def __init__(self, lists: RowLists, seed: int, bits: int, gradient_bits: int, score_bits: int) -> None:
        super().__init__(lists, seed=seed, score_bits=score_bits)
        self._code_of = {"forward": bits, "backward": gradient_bits, "push": gradient_bits}

    def codes(self, key: Key, peer: int, *, sending: bool) -> int:
        return self._code_of[key.direction]


@dataclass(frozen=True, kw_only=True)
class Random:
    """Each row in bits drawn from `menu` every `period` epochs. Rows pushed by SAR use the most bits."""

    menu: tuple[GridBits, ...] = (2, 4, 8)
    period: Annotated[int, Ge(1)] = 20
    score_bits: Bits = 8
    exactness = frozenset[Exactness]({"quantized"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "menu", checked_menu(self.menu))

    def build(self, lists: RowLists, comm: Communicator, seed: int) -> Codec:
        return _Random(lists, seed, self)

    def price(self, num_rows: float, widths: Sequence[int], *, itemsize: int = 4, gradient: bool = False) -> WirePrice:
        """Return the mean over the menu, since bits are drawn evenly."""
        nbytes = price_of_codes(num_rows, widths, self.menu, code_of(self.score_bits), itemsize=itemsize)
        notes = (f"bytes are the mean of the menu {list(self.menu)}, time is that of {max(self.menu)} bits",)
        return WirePrice(*nbytes, max(self.menu), "mean", notes)

    def check_run(self, epochs: int) -> None:
        check_period(self.period, epochs)


class _Random(QuantizedRows):
    def __init__(self, lists: RowLists, seed: int, config: Random) -> None:
        super().__init__(lists, seed=seed, score_bits=code_of(config.score_bits))
        self._menu, self._period, self._draw = torch.tensor(config.menu, dtype=torch.uint8), config.period, -1
        self._drawn: dict[tuple[Key, int, bool], Tensor] = {}

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        if epoch // self._period != self._draw:
            self._draw = epoch // self._period
            self._drawn.clear()
            self.forget_packings()

    def codes(self, key: Key, peer: int, *, sending: bool) -> int | Tensor:
        """Draw codes, equal on both ends: the draw is keyed by (sender, receiver, node)."""
        if key.direction == "push":
            return int(self._menu.max())
        if (drawn := self._drawn.get((key, peer, sending))) is None:
            drawn = self._drawn[key, peer, sending] = self._draws(key, peer, sending)
        return drawn

    def _draws(self, key: Key, peer: int, sending: bool) -> Tensor:
        mine = sending == (key.direction == "forward")  # whether this rank owns the nodes of the rows
        ids = self.lists.node_ids[self.lists.sent[peer]] if mine else self.lists.read[peer]
        ends = (self.lists.part, peer) if sending else (peer, self.lists.part)
        seed = fold_key(self.seed, self._draw, key.layer, key.call, DIRECTIONS.index(key.direction), *ends)
        draw = random_bits(ids, 1, key=seed)[:, 0] * len(self._menu) >> 13
        return self._menu.to(ids.device)[draw]


def checked_menu(menu: Sequence[int]) -> tuple[int, ...]:
    """Return the menu ascending, without duplicates."""
    chosen = tuple(int(bits) for bits in menu)
    if not chosen or any(bits not in (1, 2, 4, 8) for bits in chosen) or sorted(set(chosen)) != list(chosen):
        raise ValueError(f"menu={list(chosen)} must be a list of 1, 2, 4, 8 in ascending order, each at most once")
    return chosen


def check_period(period: int, epochs: int) -> None:
    """Raise ValueError for a period without a second assignment in the run."""
    if period > epochs:
        raise ValueError(
            f"codec.period={period} is longer than the run of {epochs} epochs; set it to {max(1, epochs // 5)}, "
            "or raise epochs"
        )
