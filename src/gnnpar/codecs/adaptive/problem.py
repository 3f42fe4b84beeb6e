"""The assignment of bits in one exchange: variance against time, one number of bits per group of rows.

minimise  w (V - V_u) / (V_n - V_u) + (1 - w) (T - T_u) / (T_n - T_u)

V is the sum of the groups' weighted variances. T = sum of Z_r over ring rounds r = 1 .. W - 1; Z_r is the slowest of
the pairs (s, s + r), each theta bytes + gamma. V_n, V_u: V with the fewest and with the most bits in all groups. T_n: T
with the most bits. T_u: the same sum of each round's fastest pair with the fewest bits (AdaQP's scaling; T is larger).

overlap: a round costs max(Z_r, h_r), with h_r its share of the compute that hides it. budget: minimise the variance
only; each pair sends at most its budget of bytes. All exchanges of an epoch may be one problem (`merged`); then a
round's slowest pair is the slowest over the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Pair:
    """The groups one rank sends to another. Times in seconds.

    budget_nbytes: most bytes to send; infinite without a budget.

    Shapes: variance [G, m] weighted, by group and menu entry; rows [G]; row_nbytes [m], or [G, m] if widths differ.
    """

    sender: int
    receiver: int
    variance: Array
    rows: Array
    row_nbytes: Array
    seconds_per_byte: float
    latency_seconds: float
    budget_nbytes: float = np.inf

    @cached_property
    def nbytes(self) -> Array:
        """Return bytes by group and menu entry, [G, m]."""
        return self.rows[:, None] * np.atleast_2d(self.row_nbytes)

    def seconds(self, nbytes: float) -> float:
        return self.seconds_per_byte * nbytes + self.latency_seconds

    def uniform_seconds(self, entry: int) -> float:
        return self.seconds(float(self.nbytes[:, entry].sum()))


@dataclass(frozen=True)
class Value:
    """The value of a choice. seconds: sum over rounds of messages, or of the compute that hides them if longer."""

    objective: float
    variance: float
    seconds: float


@dataclass(frozen=True, eq=False)
class BitProblem:
    """One exchange of one direction. variance_weight: w. hidden_seconds: of compute that hides a round."""

    pairs: tuple[Pair, ...]
    num_ranks: int
    variance_weight: float
    hidden_seconds: float = 0.0

    @cached_property
    def rounds(self) -> list[list[int]]:
        """Return the pairs by ring round."""
        rounds: dict[int, list[int]] = {}
        for i, pair in enumerate(self.pairs):
            rounds.setdefault((pair.receiver - pair.sender) % self.num_ranks, []).append(i)
        return [rounds[r] for r in sorted(rounds)]

    @cached_property
    def scales(self) -> tuple[float, float, float, float]:
        """Return (V_u, V_n - V_u, T_u, T_n - T_u); a span is 0 without a choice."""
        v_n = sum(float(p.variance[:, 0].sum()) for p in self.pairs)
        v_u = sum(float(p.variance[:, -1].sum()) for p in self.pairs)
        t_n = sum(self.hidden(max(self.pairs[i].uniform_seconds(-1) for i in r)) for r in self.rounds)
        t_u = sum(self.hidden(min(self.pairs[i].uniform_seconds(0) for i in r)) for r in self.rounds)
        return v_u, max(v_n - v_u, 0.0), t_u, max(t_n - t_u, 0.0)

    @property
    def weights(self) -> tuple[float, float]:
        """Return the weights of one unit of variance and of one second in the objective."""
        _, variances, _, seconds = self.scales
        if any(np.isfinite(pair.budget_nbytes) for pair in self.pairs):
            return (1.0 / variances if variances else 0.0), 0.0
        w = self.variance_weight
        return (w / variances if variances else 0.0), ((1 - w) / seconds if seconds else 0.0)

    def hidden(self, seconds: float) -> float:
        return max(seconds, self.hidden_seconds)

    def value(self, choice: Sequence[Array]) -> Value:
        """Return the value of menu entries [G] for every pair."""
        variance = 0.0
        times: list[float] = []
        for pair, entries in zip(self.pairs, choice, strict=True):
            each = np.arange(len(entries))
            variance += float(pair.variance[each, entries].sum())
            times.append(pair.seconds(float(pair.nbytes[each, entries].sum())))
        seconds = sum(self.hidden(max(times[i] for i in r)) for r in self.rounds)
        per_variance, per_second = self.weights
        v_u, _, t_u, _ = self.scales
        objective = per_variance * (variance - v_u) + per_second * (seconds - t_u)
        return Value(objective, variance, seconds)


def merged(problems: Sequence[BitProblem]) -> BitProblem:
    """Merge problems with the same pairs into one, with their groups concatenated."""
    pairs: list[Pair] = []
    for several in zip(*(p.pairs for p in problems), strict=True):
        first = several[0]
        nbytes = [np.broadcast_to(np.atleast_2d(p.row_nbytes), p.variance.shape) for p in several]
        pairs.append(
            Pair(
                first.sender,
                first.receiver,
                np.concatenate([p.variance for p in several]),
                np.concatenate([p.rows for p in several]),
                np.concatenate(nbytes),
                first.seconds_per_byte,
                sum(p.latency_seconds for p in several),
                sum(p.budget_nbytes for p in several),
            )
        )
    hidden = sum(p.hidden_seconds for p in problems)
    return BitProblem(tuple(pairs), problems[0].num_ranks, problems[0].variance_weight, hidden)


def split(choice: Sequence[Array], problems: Sequence[BitProblem]) -> list[list[Array]]:
    """Split a choice of the merged problem into one per problem."""
    ends = [
        np.cumsum([len(p.rows) for p in several])[:-1] for several in zip(*(p.pairs for p in problems), strict=True)
    ]
    parts = [np.split(entries, at) for entries, at in zip(choice, ends, strict=True)]
    return [[part[i] for part in parts] for i in range(len(problems))]
