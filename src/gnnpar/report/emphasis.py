"""Choose the configurations that a picture draws in colour; the rest stays grey."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gnnpar.report.colours import SIX
from gnnpar.report.groups import Group

OTHER = "other"
WIDEST = 28  # characters of a label


def strategies_in_colour(groups: Sequence[Group], baseline: str) -> list[str]:
    """Return at most six strategies: the baseline, the fastest, the most accurate, and those with the least bytes and
    memory in any task, then the others by speed. The negative control is excluded."""
    names = [baseline] if any(group.first["strategy"] == baseline for group in groups) else []
    rivals = [group for group in groups if not group.control and group.completed]
    tasks = [[group for group in rivals if group.arena == arena] for arena in dict.fromkeys(g.arena for g in rivals)]
    for rank in (_speed, _accuracy, _sends_little, _needs_little):
        for task in tasks:
            ranked = [group for group in task if rank(group) is not None]
            names += [max(ranked, key=lambda group: rank(group) or 0.0).first["strategy"]] if ranked else []
    names += [g.first["strategy"] for g in sorted(rivals, key=lambda group: -(_speed(group) or 0.0))]
    names += [group.first["strategy"] for group in groups]
    return list(dict.fromkeys(names))[: len(SIX)]


def groups_in_colour(groups: Sequence[Group], strategies: Sequence[str]) -> list[Group]:
    """Return at most six of a task: one of each strategy in colour, the negative control, then other variants."""
    known = [group for group in groups if group.first["strategy"] in strategies]
    known.sort(key=lambda group: strategies.index(group.first["strategy"]))
    controls = [group for group in known if group.control][:1]
    ones = list({group.first["strategy"]: group for group in reversed(known) if not group.control}.values())[::-1]
    others = [group for group in known if group not in ones and group not in controls]
    room = len(SIX) - len(controls)
    return [*ones[:room], *controls, *ones[room:], *others][: len(SIX)]


def six_parts(bars: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Reduce bars to at most six parts: the largest shares, and OTHER for the sum of the rest."""
    shares: dict[str, float] = {}
    for bar in bars:
        total = sum(bar.values())
        for part, value in bar.items():
            shares[part] = max(shares.get(part, 0.0), value / total if total else 0.0)
    used = [part for part, share in shares.items() if share > 0]
    if len(used) <= len(SIX):
        return [{part: bar.get(part, 0.0) for part in used} for bar in bars]
    kept = sorted((part for part in used if part != OTHER), key=lambda part: -shares[part])[: len(SIX) - 1]
    kept = [part for part in used if part in kept]
    return [
        {part: bar.get(part, 0.0) for part in kept}
        | {OTHER: sum(value for part, value in bar.items() if part not in kept)}
        for bar in bars
    ]


def short_name(group: Group, others: Sequence[Group]) -> str:
    """Return the strategy and its distinguishing settings, in at most WIDEST characters."""
    same = [other for other in others if other.first["strategy"] == group.first["strategy"]]
    parts = [group.first["strategy"]]
    for of in (lambda g: g.first["variant"], lambda g: g.changed, lambda g: g.ranks):
        if len({of(other) for other in same}) > 1:
            parts.append(of(group))
    return cut(" ".join(filter(None, parts)))


def cut(text: str) -> str:
    """Cut to WIDEST characters; first drop the groups of keys."""
    text = text if len(text) <= WIDEST else re.sub(r"[\w.]+\.(\w+=)", r"\1", text)
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "\u2026"


def _speed(group: Group) -> float | None:
    if group.timeless or group.epoch_seconds is None:
        return None
    return group.speedup.value if group.speedup is not None else 1e-9 / group.epoch_seconds.value


def _accuracy(group: Group) -> float | None:
    return group.accuracy.value if group.accuracy is not None else None


def _sends_little(group: Group) -> float | None:
    sent = group.mean("bytes_per_epoch") if group.first["world_size"] > 1 else None
    return None if sent is None else -sent


def _needs_little(group: Group) -> float | None:
    peak = group.mean("memory_peak_bytes")
    return None if peak is None else -peak
