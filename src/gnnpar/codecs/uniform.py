"""Bits that no statistics choose: the same for every row, or drawn at random (AdaQP's ablations)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from gnnpar.codecs.codec import Codec, Exactness
from gnnpar.codecs.quantized import DIRECTIONS, Key, QuantizedRows
from gnnpar.comm import Communicator
from gnnpar.partition.shard import Shard
from gnnpar_kernels import fold_key
from gnnpar_kernels.quantize.naive import random_bits
from gnnpar_kernels.wire import BF16, FP8, FP32

Bits = Literal[1, 2, 4, 8, 32, "fp8", "bf16"]
GridBits = Literal[1, 2, 4, 8]
CODES = {"fp8": FP8, "bf16": BF16, 32: FP32}


def code_of(bits: Bits) -> int:
    """The code of `gnnpar_kernels.wire`."""
    return CODES.get(bits, bits)  # type: ignore[return-value]  # what is not in the table is a code


def bits_of(code: int) -> int | str:
    """The other way round, for people."""
    return {code: name for name, code in CODES.items()}.get(code, code)


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Every row in `bits`, every gradient row in `gradient_bits` (null: the same).

    `score_bits`: operands beside the feature rows (attention scores), each with a scale of its own.
    """

    bits: Bits = 8
    gradient_bits: Bits | None = None
    score_bits: Bits = 8

    @property
    def exactness(self) -> frozenset[Exactness]:
        used = {self.bits, self.gradient_bits or self.bits, self.score_bits if self.bits != 32 else 32}
        if used == {32}:
            return frozenset({"exact"})
        return frozenset({"rounded"}) if used <= {32, "bf16"} else frozenset({"quantized"})

    def build(self, shard: Shard, comm: Communicator, seed: int) -> Codec:
        scores = code_of(32 if self.bits == 32 else self.score_bits)
        return _Uniform(shard, seed, code_of(self.bits), code_of(self.gradient_bits or self.bits), scores)


class _Uniform(QuantizedRows):
    def __init__(self, shard: Shard, seed: int, bits: int, gradient_bits: int, score_bits: int) -> None:
        super().__init__(shard, seed=seed, score_bits=score_bits)
        self._code_of = {"forward": bits, "backward": gradient_bits, "push": gradient_bits}

    def codes(self, key: Key, peer: int, *, sending: bool) -> int:
        return self._code_of[key.direction]


@dataclass(frozen=True, kw_only=True)
class Random:
    """Each row in bits drawn from `menu`, anew every `period` epochs. Rows pushed by SAR travel in the most bits."""

    menu: tuple[GridBits, ...] = (2, 4, 8)
    period: Annotated[int, Ge(1)] = 20
    score_bits: Bits = 8
    exactness = frozenset[Exactness]({"quantized"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "menu", checked_menu(self.menu))

    def build(self, shard: Shard, comm: Communicator, seed: int) -> Codec:
        return _Random(shard, seed, self)

    def check_run(self, epochs: int) -> None:
        check_period(self.period, epochs)


class _Random(QuantizedRows):
    def __init__(self, shard: Shard, seed: int, config: Random) -> None:
        super().__init__(shard, seed=seed, score_bits=code_of(config.score_bits))
        self._menu, self._period, self._draw = torch.tensor(config.menu, dtype=torch.uint8), config.period, -1
        self._drawn: dict[tuple, Tensor] = {}

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        if epoch // self._period != self._draw:
            self._draw = epoch // self._period
            self._drawn.clear()
            self.forget_packings()

    def codes(self, key: Key, peer: int, *, sending: bool) -> int | Tensor:
        """Both ends draw the same: the draw is keyed by (sender, receiver, node)."""
        if key.direction == "push":
            return int(self._menu.max())
        if (found := self._drawn.get((key, peer, sending))) is None:
            found = self._drawn[key, peer, sending] = self._draws(key, peer, sending)
        return found

    def _draws(self, key: Key, peer: int, sending: bool) -> Tensor:
        mine = sending == (key.direction == "forward")  # are they rows of nodes that this rank owns?
        ids = self.shard.node_ids[self.shard.boundary[peer]] if mine else self.shard.halo[peer].src_ids
        assert ids is not None
        ends = (self.shard.part, peer) if sending else (peer, self.shard.part)
        seed = fold_key(self.seed, self._draw, key.layer, key.call, DIRECTIONS.index(key.direction), *ends)
        draw = random_bits(ids, 1, key=seed)[:, 0] * len(self._menu) >> 13
        return self._menu.to(ids.device)[draw]


def checked_menu(menu: tuple) -> tuple[int, ...]:
    """Ascending, without doubles."""
    chosen = tuple(int(bits) for bits in menu)
    if not chosen or any(bits not in (1, 2, 4, 8) for bits in chosen) or sorted(set(chosen)) != list(chosen):
        raise ValueError(f"menu={list(chosen)} must be a list of 1, 2, 4, 8 in ascending order, each at most once")
    return chosen


def check_period(period: int, epochs: int) -> None:
    """Refuse a period in which a run has no second assignment."""
    if period > epochs:
        raise ValueError(
            f"codec.period={period} is longer than the run of {epochs} epochs; set it to {max(1, epochs // 5)}, "
            "or raise epochs"
        )
