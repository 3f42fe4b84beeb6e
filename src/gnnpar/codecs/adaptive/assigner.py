"""Assign bits to rows: send traces of all ranks to rank 0, solve one problem per exchange, and send the bits to both
ends. Three messages of phase "assign": weighted variances of the groups to rank 0; chosen bits to the senders; one byte
per row from each sender to its receiver, so that both ends know the size of every message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from gnnpar.codecs.adaptive import solvers
from gnnpar.codecs.adaptive.importance import Scores
from gnnpar.codecs.adaptive.links import Profile
from gnnpar.codecs.adaptive.problem import Array, BitProblem, Pair, merged, split
from gnnpar.codecs.quantized import Key
from gnnpar.codecs.uniform import GridBits
from gnnpar.comm import Communicator, MessageTag, RowLists
from gnnpar.comm.clock import perf_counter
from gnnpar.files import JsonDict
from gnnpar_kernels.wire import row_nbytes

Solver = Literal["threshold", "highs"]
Objective = Literal["time", "overlap"]
Scope = Literal["exchange", "epoch"]
SOLVERS: dict[str, Callable[[BitProblem], list[Array]]] = {
    "threshold": solvers.solve_thresholds,
    "highs": solvers.solve_program,
}
Counts = list[dict[str, dict[int, int]]]  # by sender, direction, receiver: rows of a message


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The assigner's part of the codec's configuration: weights and limits."""

    menu: tuple[GridBits, ...] = (2, 4, 8)
    group_size: Annotated[int, Ge(1)] = 1
    variance_weight: Annotated[float, Ge(0), Le(1)] = 0.5
    forward_weight: Annotated[float, Gt(0)] = 4.0
    objective: Objective = "time"
    budget_bits: Annotated[float, Ge(1), Le(8)] | None = None
    gradient_budget_bits: Annotated[float, Ge(1), Le(8)] | None = None
    scope: Scope = "epoch"
    solver: Solver = "threshold"


@dataclass(frozen=True, eq=False)
class Assignment:
    """Codes [n] uint8 of the rows to and from each peer. facts: metrics of an epoch, on rank 0."""

    sending: dict[tuple[Key, int], Tensor]
    receiving: dict[tuple[Key, int], Tensor]
    facts: JsonDict


class Assigner:
    """Assigns bits. Collective in its constructor and in `assign`."""

    def __init__(self, rules: Rules, lists: RowLists, comm: Communicator, scores: Scores, profile: Profile) -> None:
        self.rules, self.lists, self.comm, self.scores, self.profile = rules, lists, comm, scores, profile
        self.own_counts = {
            "forward": {p: len(rows) for p, rows in lists.sent.items()},
            "backward": {p: len(rows) for p, rows in lists.read.items()},
        }
        for direction, counts in self.own_counts.items():
            for peer, rows in counts.items():
                check_group_size(rules.group_size, rows, direction, comm.rank, peer)
        self.counts = comm.broadcast(comm.gather(self.own_counts))

    def assign(
        self,
        traces: Mapping[tuple[Key, int], Tensor],
        energies: Mapping[tuple[Key, int], Tensor],
        widths: Mapping[Key, int],
        epoch: int,
    ) -> Assignment:
        """Assign bits from traces: variances [n, m] of sent rows, by exchange and peer, and energies [n] from their
        readers."""
        began = perf_counter()
        known = self.comm.broadcast(self.comm.gather(dict(widths)))
        all_widths: dict[Key, int] = {key: width for each in known for key, width in each.items()}
        keys = sorted(all_widths)
        tag = MessageTag(epoch, -1, 0, "assign")
        weighted = {
            (k, p): traces[k, p] * self._weight(k, p, energies)[:, None]
            for k in keys
            for p in self._peers(k, self.comm.rank)
        }
        order = {at: torch.argsort(w[:, 0], descending=True, stable=True) for at, w in weighted.items()}
        groups = {at: self._grouped(w[order[at]]) for at, w in weighted.items()}
        codes, facts = self._solve(keys, all_widths, groups, tag)
        sending: dict[tuple[Key, int], Tensor] = {}
        for (at, rows), group_codes in zip(order.items(), codes, strict=True):
            row_codes = torch.empty(len(rows), dtype=torch.uint8, device=rows.device)
            row_codes[rows] = group_codes.repeat_interleave(self.rules.group_size)[: len(rows)]
            sending[at] = row_codes
        receiving = self._tell_receivers(keys, sending, tag)
        if facts and keys:
            facts["time/assign_seconds"] = perf_counter() - began
        return Assignment(sending, receiving, facts if keys else {})

    def _peers(self, key: Key, sender: int) -> list[int]:
        return sorted(self.counts[sender][key.direction])

    def _weight(self, key: Key, peer: int, energies: Mapping[tuple[Key, int], Tensor]) -> Tensor:
        """Return energies if known, else scores by degree, scaled to the nearest layer with energies."""
        if energies and key.direction == "forward":
            return self.rules.forward_weight * self._relative(key, peer, energies)
        return self._relative(key, peer, energies)

    def _relative(self, key: Key, peer: int, energies: Mapping[tuple[Key, int], Tensor]) -> Tensor:
        if (known := energies.get((key, peer))) is not None:
            return known
        scores = self._score(key, peer)
        others = [at for at in energies if at[0].direction == key.direction and at[1] == peer]
        if not others:
            return scores
        near = min(others, key=lambda at: abs(at[0].layer - key.layer))
        return scores * (energies[near].sum() / self._score(*near).sum().clamp_min(1e-30))

    def _score(self, key: Key, peer: int) -> Tensor:
        return (self.scores.forward if key.direction == "forward" else self.scores.backward)(key.layer, peer)

    def _grouped(self, weighted: Tensor) -> Tensor:
        """Sum consecutive rows. Shapes: [n, m] -> [G, m]."""
        size = self.rules.group_size
        if size == 1:
            return weighted
        group = torch.arange(len(weighted), device=weighted.device) // size
        return weighted.new_zeros(-(-len(weighted) // size), weighted.shape[1]).index_add_(0, group, weighted)

    def _num_groups(self, keys: Iterable[Key], sender: int) -> list[int]:
        """Return the number of groups of each message of a sender, in sending order."""
        size = self.rules.group_size
        return [-(-self.counts[sender][k.direction][p] // size) for k in keys for p in self._peers(k, sender)]

    def _solve(
        self, keys: list[Key], widths: Mapping[Key, int], groups: Mapping[tuple[Key, int], Tensor], tag: MessageTag
    ) -> tuple[list[Tensor], JsonDict]:
        """Return codes of this rank's groups by message, and the facts on rank 0."""
        comm, device = self.comm, self.comm.device
        flat = torch.cat([g.flatten() for g in groups.values()] or [torch.zeros(0, device=device)]).float()
        sizes = {r: sum(self._num_groups(keys, r)) for r in range(comm.size)}
        if comm.rank != 0:
            comm.exchange({0: flat.view(torch.uint8)}, {}, tag)
            codes = comm.exchange({}, {0: sizes[comm.rank]}, tag)[0].wait()
            comm.flush(keep=0)
            return list(torch.split(codes, self._num_groups(keys, comm.rank))), {}
        others = {r: 4 * len(self.rules.menu) * n for r, n in sizes.items() if r}
        pending = comm.exchange({}, others, tag)
        received = {r: p.wait().view(torch.float32).cpu() for r, p in pending.items()} | {0: flat.cpu()}
        codes, facts = self._solve_all(keys, widths, received)
        comm.exchange({r: torch.as_tensor(codes[r], device=device) for r in others}, {}, tag)
        comm.flush(keep=0)
        return list(torch.split(torch.as_tensor(codes[0], device=device), self._num_groups(keys, 0))), facts

    def _solve_all(
        self, keys: list[Key], widths: Mapping[Key, int], flat: Mapping[int, Tensor]
    ) -> tuple[dict[int, Array], JsonDict]:
        """Return, on rank 0, codes of every rank's groups in the order of its messages, and the facts."""
        menu = np.array(self.rules.menu, dtype=np.uint8)
        rest = {r: values.double().view(-1, len(menu)).numpy() for r, values in flat.items()}
        codes: dict[int, list[Array]] = {r: [] for r in flat}
        facts: JsonDict = {"assign/bits": {}, "assign/variance": {}, "assign/seconds": {}, "assign/objective": {}}
        elements = total_bits = 0
        problems = [self._problem(key, widths[key], rest) for key in keys]
        for key, problem, choice in zip(keys, problems, self._choices(problems), strict=True):
            value = problem.value(choice)
            histogram = dict.fromkeys(map(str, self.rules.menu), 0)
            for pair, entries in zip(problem.pairs, choice, strict=True):
                codes[pair.sender].append(menu[entries])
                for entry, bits in enumerate(self.rules.menu):
                    rows = int(pair.rows[entries == entry].sum())
                    histogram[str(bits)] += rows
                    elements, total_bits = elements + rows * widths[key], total_bits + rows * widths[key] * bits
            facts["assign/bits"][key.name] = histogram
            facts["assign/variance"][key.name] = value.variance
            facts["assign/seconds"][key.name] = value.seconds
            facts["assign/objective"][key.name] = value.objective
        facts["assign/mean_bits"] = total_bits / elements if elements else 0.0
        facts["assign/numbers"] = elements
        return {r: np.concatenate([*c, menu[:0]]) for r, c in codes.items()}, facts

    def _choices(self, problems: list[BitProblem]) -> list[list[Array]]:
        """Solve every exchange separately, or with scope=epoch all together if they have the same pairs."""
        solve = SOLVERS[self.rules.solver]
        pairs = {tuple((p.sender, p.receiver) for p in problem.pairs) for problem in problems}
        if self.rules.scope == "exchange" or len(pairs) != 1:
            return [solve(problem) for problem in problems]
        return split(solve(merged(problems)), problems)

    def _problem(self, key: Key, width: int, rest: dict[int, Array]) -> BitProblem:
        """Build an exchange's problem from the first groups of each rank's list, and remove them from the list."""
        rules = self.rules
        pairs: list[Pair] = []
        bits = (key.direction != "forward" and rules.gradient_budget_bits) or rules.budget_bits
        nbytes = np.array([row_nbytes(width, bits) for bits in rules.menu], dtype=float)
        for sender in sorted(rest):
            for peer in self._peers(key, sender):
                rows = self.counts[sender][key.direction][peer]
                count = -(-rows // rules.group_size)
                sizes = np.full(count, float(rules.group_size))
                sizes[-1:] = rows - (count - 1) * rules.group_size
                theta, gamma = self.profile.links[sender, peer]
                budget = np.inf if bits is None else rows * float(np.interp(bits, rules.menu, nbytes))
                pairs.append(Pair(sender, peer, rest[sender][:count], sizes, nbytes, theta, gamma, budget))
                rest[sender] = rest[sender][count:]
        hidden = 0.0
        if rules.objective == "overlap" and self.comm.size > 1:
            hidden = width * min(self.profile.fold_seconds) / (self.comm.size - 1)
        return BitProblem(tuple(pairs), self.comm.size, rules.variance_weight, hidden)

    def _tell_receivers(
        self, keys: list[Key], sending: Mapping[tuple[Key, int], Tensor], tag: MessageTag
    ) -> dict[tuple[Key, int], Tensor]:
        me = self.comm.rank
        parts: dict[int, list[Tensor]] = {}
        for (_, peer), codes in sending.items():
            parts.setdefault(peer, []).append(codes)
        sizes = {
            (k, p): self.counts[p][k.direction][me]
            for k in keys
            for p in range(self.comm.size)
            if p != me and me in self.counts[p][k.direction]
        }
        totals: dict[int, int] = {}
        for (_, peer), rows in sizes.items():
            totals[peer] = totals.get(peer, 0) + rows
        pending = self.comm.exchange({p: torch.cat(c) for p, c in parts.items()}, totals, tag)
        arrived = {p: each.wait() for p, each in pending.items()}
        self.comm.flush(keep=0)
        receiving: dict[tuple[Key, int], Tensor] = {}
        starts = dict.fromkeys(totals, 0)
        for (key, peer), rows in sizes.items():
            receiving[key, peer] = arrived[peer][starts[peer] : starts[peer] + rows]
            starts[peer] += rows
        return receiving


def check_group_size(size: int, rows: int, direction: str, sender: int, receiver: int) -> None:
    """Raise ValueError if a group is larger than a message."""
    if size > 1 and size > rows:
        raise ValueError(
            f"codec.group_size={size}, but the {direction} message from rank {sender} to {receiver} has {rows} rows; "
            f"set it to at most {max(rows, 1)} (1: every row has bits of its own)"
        )
