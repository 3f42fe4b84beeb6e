"""Colours of strategies and parts of the epoch, for colour-blind readers (Okabe and Ito), dark pages and paper; the
strategies, configurations and parts that a picture shows in colour, and their names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from gnnpar.report.groups import Group
from gnnpar.report.runs import by
from gnnpar.track.keys import BYTE_PHASES, PHASES

SIX = ("#2b7bba", "#d1602b", "#16916c", "#8064b8", "#c65f98", "#a87a10")  # contrast 3:1 or more on light and dark pages
GREY = "#8b949d"  # for items without a colour, and for times that do not measure speed
_PREFERRED = {"graph_parallel": 0, "hybrid": 1, "sar": 2, "single": 3, "gnnpipe": 4, "adaqp": 5}

TIME: Mapping[str, str] = dict(
    zip(PHASES, ("#5f7fa3", "#8fae5d", "#a98bc4", "#d9663b", "#f0b48c", "#e3c84f", "#6bab8f", "#b9bfc6"), strict=True)
)
_SENT = ("#3f7fb5", "#8db8dc", "#a98bc4", "#d9663b", "#e3c84f", "#6bab8f", "#b9bfc6", "#5f7fa3", "#8fae5d")
BYTES: Mapping[str, str] = dict(zip(BYTE_PHASES, _SENT, strict=True))
MEMORY = {
    "features": "#5f7fa3",
    "activations": "#d9663b",
    "halo": "#e3c84f",
    "history": "#a98bc4",
    "structure": "#6bab8f",
    "parameters": "#8db8dc",
    "optimizer": "#b9bfc6",
    "host": "#e6d9c2",
}
SHADES = ("#1f5d91", "#4f92c9", "#2f7f9e", "#7fb6d9", "#3f6fb5", "#a3c7e3")  # layers in order
OTHER = "other"  # small parts together
OF_OTHER = "#b9bfc6"
DASHES = ("none", "7 4", "2 3", "7 3 2 3", "12 4", "12 3 2 3")  # of SVG
WIDEST = 28  # characters of a label


def tints(groups: Sequence[Group], baseline: str) -> Mapping[str, str]:
    """Return strategy -> colour, those in colour first."""
    return of_strategies(strategies_in_colour(groups, baseline), [group.first["strategy"] for group in groups])


def of_strategies(chosen: Sequence[str], names: Iterable[str]) -> Mapping[str, str]:
    """Return a colour for each of at most six strategies, grey for the others. Strategies in _PREFERRED have the same
    colour on every page; the rest take free colours in order."""
    tints = {name: SIX[_PREFERRED[name]] for name in chosen if name in _PREFERRED}
    free = [tint for tint in SIX if tint not in tints.values()]
    tints |= dict(zip([name for name in chosen if name not in tints], free, strict=False))
    return {name: tints[name] for name in chosen} | {name: GREY for name in names if name not in tints}


def strategies_in_colour(groups: Sequence[Group], baseline: str) -> list[str]:
    """Return at most six strategies: the baseline, the fastest, the most accurate, and those with the least bytes and
    memory in any task, then the others by speed. The negative control is excluded."""
    names = [baseline] if any(group.first["strategy"] == baseline for group in groups) else []
    ranks = {group: _ranks(group) for group in groups if not group.control and group.completed}
    for k in range(4):
        for rivals in by(ranks, lambda group: group.arena).values():
            best = max(rivals, key=lambda group: ranks[group][k])
            names += [best.first["strategy"]] if ranks[best][k] > -math.inf else []
    names += [group.first["strategy"] for group in sorted(ranks, key=lambda group: -ranks[group][0])]
    names += [group.first["strategy"] for group in groups]
    return list(dict.fromkeys(names))[: len(SIX)]


def _ranks(group: Group) -> list[float]:
    """Return numbers that are largest for the fastest, the most accurate, the least bytes and memory; -inf: unknown."""
    speed = None
    if group.epoch_seconds is not None and not group.timeless:
        speed = group.speedup.value if group.speedup else 1e-9 / group.epoch_seconds.value
    sent = group.mean("bytes_per_epoch") if group.first["world_size"] > 1 else None
    costs = [None if cost is None else -cost for cost in (sent, group.mean("memory_peak_bytes"))]
    known = [speed, group.accuracy.value if group.accuracy else None, *costs]
    return [-math.inf if rank is None else rank for rank in known]


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
    kept = used = [part for part, share in shares.items() if share > 0]
    if len(used) > len(SIX):
        largest = sorted((part for part in used if part != OTHER), key=lambda part: -shares[part])[: len(SIX) - 1]
        kept = [part for part in used if part in largest]
    few = [{part: bar.get(part, 0.0) for part in kept} for bar in bars]
    if kept is not used:
        for parts, bar in zip(few, bars, strict=True):
            parts[OTHER] = sum(value for part, value in bar.items() if part not in kept)
    return few


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
