"""AdaQP's codec: bits per row, chosen to balance variance and time, and chosen again during training.

Wan, Zhao, Wu, MLSys 2023 (arXiv 2306.01381). Epochs before `warmup` use `first_bits`. Then, every `period` epochs, the
rows of each exchange get 2, 4 or 8 bits that minimise variance_weight variance + (1 - variance_weight) time.

Deviations: metadata are unbiased and codes clamped; bits are chosen after `warmup` epochs, not a fifth of the training;
variances are traced only in training and in the `trace_epochs` before a choice, and exactly by default (trace=range is
the paper's D/6 proxy); groups have one row by default; thresholds replace the mixed-integer program, which is
solver=highs; rows are weighted by the gradients returned for them, and all exchanges of an epoch are one problem
(the paper: importance=square_of_sum scope=exchange); metadata count as bytes; links are profiled with a few megabytes.
objective=overlap and budget_bits are additions.

Traces: a row's variance under stochastic rounding at every width of a menu.

With step S_b and p_i the fraction of (x_i - zero) / S_b, the variance of the decoded row is exactly S_b^2 sum p(1 - p).
AdaQP traces D/6 (max - min)^2 / (2^b - 1)^2 instead, which assumes uniform p. Rows with many exact zeros, as after a
ReLU, have about half of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from gnnpar.codecs.adaptive.assigner import Assigner, Rules
from gnnpar.codecs.adaptive.importance import Convolutional, Importance, Powers, Scores, powers_of
from gnnpar.codecs.adaptive.links import Profile, open_profile
from gnnpar.codecs.codec import Codec, CodecConfig, Exactness, WirePrice
from gnnpar.codecs.quantized import Key, QuantizedRows, is_wide, price_of_codes
from gnnpar.codecs.uniform import Bits, GridBits, check_period, checked_menu, code_of
from gnnpar.comm import Communicator, MessageTag, Outgoing, RowLike, RowLists
from gnnpar.comm.rows import Decoder
from gnnpar.files import JsonDict, StateDict
from gnnpar.folds.block import Rows
from gnnpar_kernels.quantize.naive import ranges

Trace = Literal["exact", "range"]
_CHUNK = 1 << 18  # entries at a time: they stay in cache


def row_variances(x: Tensor, menu: Sequence[int], *, trace: Trace) -> Tensor:
    """Return the variance of each row's quantization error, summed over entries. x [n, D] -> [n, len(menu)] fp32."""
    if not x.numel():
        return torch.zeros(len(x), len(menu), device=x.device)
    of = _exact if trace == "exact" else _range
    return torch.cat([of(part.float(), menu) for part in torch.split(x, max(1, _CHUNK // x.shape[1]))])


def _exact(x: Tensor, menu: Sequence[int]) -> Tensor:
    columns: list[Tensor] = []
    for bits in menu:
        step, zero, _, _ = ranges(x, bits)
        share = (x - zero).div_(step)
        share = share.sub_(share.floor())
        columns.append(share.addcmul_(share, share, value=-1).sum(1, keepdim=True) * step.square())
    return torch.cat(columns, 1)


def _range(x: Tensor, menu: Sequence[int]) -> Tensor:
    spread = x.amax(1, keepdim=True) - x.amin(1, keepdim=True)
    levels = torch.tensor([2.0**bits - 1 for bits in menu], device=x.device)
    return x.shape[1] / 6 * (spread / levels).square()


@dataclass(frozen=True, kw_only=True)
class Adaptive(Rules):
    """Configuration with the fields of conf/codec/adaptive.yaml. powers: exponents of edge weights, per layer."""

    first_bits: GridBits = 8
    warmup: Annotated[int, Ge(1)] = 2
    period: Annotated[int, Ge(1)] = 20
    trace_epochs: Annotated[int, Ge(1)] = 3
    trace: Trace = "exact"
    importance: Importance = "energy"
    score_bits: Bits = 8
    profile: Path | None = None
    powers: tuple[Powers, ...] = ()
    exactness = frozenset[Exactness]({"quantized"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "menu", checked_menu(self.menu))
        for name, bits in (("budget_bits", self.budget_bits), ("gradient_budget_bits", self.gradient_budget_bits)):
            if bits is not None and not self.menu[0] <= bits <= self.menu[-1]:
                raise ValueError(f"{name}={bits:g} is outside menu={list(self.menu)}; give a number between its ends")

    def price(self, num_rows: float, widths: Sequence[int], *, itemsize: int = 4, gradient: bool = False) -> WirePrice:
        """Return an upper bound: every row in the most bits of the menu, or in `first_bits`."""
        bits = max(*self.menu, self.first_bits)
        nbytes = price_of_codes(num_rows, widths, [bits], code_of(self.score_bits), itemsize=itemsize)
        notes = (
            f"bits are chosen from {list(self.menu)} while it trains: bytes and time are those of {max(bits, 2)} bits, "
            "without what choosing takes",
        )
        return WirePrice(*nbytes, bits, "most", notes)

    def check_run(self, epochs: int) -> None:
        check_period(self.period, epochs)

    def build(self, lists: RowLists, comm: Communicator, seed: int) -> Codec:
        profile = open_profile(self.profile, lists, comm)
        scores = Scores(lists, comm, self.powers, self.importance)
        return AdaptiveRows(self, Assigner(self, lists, comm, scores, profile), lists, seed)


def with_edge_weights(config: CodecConfig, model: Convolutional) -> CodecConfig:
    """Return the codec with the edge weights of the model's convolutions, if it weights rows."""
    if isinstance(config, Adaptive) and not config.powers:
        return replace(config, powers=powers_of(model.convolutions))
    return config


class AdaptiveRows(QuantizedRows):
    """The runtime codec. Rows that SAR pushes, and rows without an assignment, use `first_bits`."""

    decodes_late = False  # decoding records energies for the assignment of the next epoch

    def __init__(self, config: Adaptive, assigner: Assigner, lists: RowLists, seed: int) -> None:
        super().__init__(lists, seed=seed, score_bits=code_of(config.score_bits))
        self._config, self._assigner = config, assigner
        self._codes: dict[tuple[Key, int, bool], Tensor] = {}  # by exchange, peer, sending
        self._traces: dict[tuple[Key, int], Tensor] = {}
        self._energies: dict[tuple[Key, int], Tensor] = {}
        self._widths: dict[Key, int] = {}
        self._tracing = False
        self._assigned_at: int = -1
        self._facts: JsonDict = {}

    @property
    def profile(self) -> Profile:
        return self._assigner.profile

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        if self._assigns(epoch) and epoch != self._assigned_at and self._has_traces():
            self._assign(epoch)
        self._tracing = self._next_after(epoch) - epoch <= self._config.trace_epochs

    def facts(self) -> JsonDict:
        """Return the metrics of the assignment of this epoch, once and on rank 0; else none."""
        facts, self._facts = self._facts, {}
        return facts

    def codes(self, key: Key, peer: int, *, sending: bool) -> int | Tensor:
        return self._codes.get((key, peer, sending), self._config.first_bits)

    def nbytes(self, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> int:
        self._note(like, tag)
        return super().nbytes(num_rows, like, tag, peer)

    def encode(self, rows: Rows, index: Tensor | None, tag: MessageTag, peer: int) -> Tensor:
        self._note(RowLike.of(rows), tag)
        if self._tracing and tag.phase in ("forward", "backward") and Key.of(tag) in self._widths:
            self._trace(rows[0].detach().flatten(1), index, tag, peer)
        return super().encode(rows, index, tag, peer)

    def encode_all(self, outgoing: Mapping[int, Outgoing], tag: MessageTag) -> Mapping[int, Tensor]:
        if self._tracing:
            return Codec.encode_all(self, outgoing, tag)
        return super().encode_all(outgoing, tag)

    def decode(self, buffer: Tensor, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> Rows:
        rows = super().decoder(num_rows, like, tag, peer)(buffer)
        if self._tracing and self._config.importance == "energy" and tag.phase in ("forward", "backward"):
            back = "backward" if tag.phase == "forward" else "forward"
            key = Key(tag.layer, tag.call, back)
            total = self._list(self._energies, key, peer, (), rows[0].device)
            total[tag.first : tag.first + num_rows] += rows[0].flatten(1).square().sum(1)
        return rows

    def decoder(self, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> Decoder:
        return lambda buffer: self.decode(buffer, num_rows, like, tag, peer)

    def state_dict(self) -> StateDict:
        """Return bits, traces, the epoch of the last assignment, and the profile, which later assignments use."""
        return {
            "codes": self._codes,
            "traces": self._traces,
            "energies": self._energies,
            "widths": self._widths,
            "assigned_at": self._assigned_at,
            "profile": self.profile.as_json(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        # loaded keys may be plain tuples
        self._codes = {(Key(*key), peer, sending): codes for (key, peer, sending), codes in state["codes"].items()}
        self._traces = {(Key(*key), peer): total for (key, peer), total in state["traces"].items()}
        self._energies = {(Key(*key), peer): total for (key, peer), total in state["energies"].items()}
        self._widths = {Key(*key): width for key, width in state["widths"].items()}
        self._assigned_at = state["assigned_at"]
        profile = Profile.of_json(state["profile"])
        profile.check(self._assigner.comm.size, "the profile of a checkpoint")
        self._assigner.profile = profile
        self.forget_packings()

    def _assigns(self, epoch: int) -> bool:
        return epoch >= self._config.warmup and (epoch - self._config.warmup) % self._config.period == 0

    def _next_after(self, epoch: int) -> int:
        """Return the next epoch that assigns."""
        warmup, period = self._config.warmup, self._config.period
        return warmup if epoch < warmup else epoch + period - (epoch - warmup) % period

    def _has_traces(self) -> bool:
        """Return True if any rank may have traces; equal on all ranks."""
        return bool(self._widths) or self._assigner.comm.size > 1

    def _assign(self, epoch: int) -> None:
        assignment = self._assigner.assign(self._traces, self._energies, self._widths, epoch)
        for (key, peer), codes in assignment.sending.items():
            self._codes[key, peer, True] = codes
        for (key, peer), codes in assignment.receiving.items():
            self._codes[key, peer, False] = codes
        self._traces, self._energies, self._widths = {}, {}, {}
        self._assigned_at, self._facts = epoch, assignment.facts
        self.forget_packings()

    def _note(self, like: Sequence[RowLike], tag: MessageTag) -> None:
        """Record the row width of an exchange, on its senders and receivers."""
        if self._tracing and tag.phase in ("forward", "backward") and like:
            width, itemsize = like[0].width, like[0].dtype.itemsize
            if is_wide(width, itemsize):
                self._widths[Key.of(tag)] = width

    def _trace(self, x: Tensor, index: Tensor | None, tag: MessageTag, peer: int) -> None:
        """Add the variances of rows, possibly a slice of the peer's list."""
        rows = x if index is None else x.index_select(0, index)
        total = self._list(self._traces, Key.of(tag), peer, (len(self._config.menu),), x.device)
        part = row_variances(rows, self._config.menu, trace=self._config.trace)
        total[tag.first : tag.first + len(rows)] += part

    def _list(
        self, of: dict[tuple[Key, int], Tensor], key: Key, peer: int, shape: tuple[int, ...], device: torch.device
    ) -> Tensor:
        """Return the table with an entry per row of a peer's list in an exchange, to which slices are added."""
        if (key, peer) not in of:
            of[key, peer] = torch.zeros(self._assigner.own_counts[key.direction][peer], *shape, device=device)
        return of[key, peer]
