"""The verdict of a comparison in one or two sentences per task, with the evidence."""

from __future__ import annotations

from collections.abc import Sequence

from gnnpar.report import curves
from gnnpar.report import formatting as words
from gnnpar.report.groups import Group
from gnnpar.report.runs import is_busy
from gnnpar.report.statistics import FEWEST_BLOCKS, FEWEST_SEEDS
from gnnpar.track.console import num_bytes, seconds
from gnnpar.track.text import counted

_SURE = 0.2  # relative error above which a prediction counts as misleading


def answers(groups: Sequence[Group], baseline: str) -> list[str]:
    """Return one line per task, and another if `tag` did not choose the fastest."""
    names = curves.tasks(groups)
    lines = []
    for arena, name in names.items():
        rivals = [group for group in groups if group.arena == arena and not group.control and group.completed]
        if len(rivals) > 1:
            lines.append(f"{name}: {_answer(rivals, baseline)}")
            lines += [f"{name}: {line}" for line in _tag(rivals)]
    return lines


def _answer(rivals: Sequence[Group], baseline: str) -> str:
    meaningful = [group for group in rivals if group.epoch_seconds is not None and not group.timeless]
    if not meaningful:
        return (
            "no strategy is faster or slower by these runs: their ranks are threads, or have more threads than cores. "
            f"Bytes and accuracy stand: {_least_sent(rivals)}"
        )
    timed = [group for group in meaningful if group.speedup is not None and group.is_fair]
    if len(timed) < 2:
        return f"not settled, as no ratio is fair: {_reason(meaningful, baseline)}. {_least_sent(rivals)}"
    doubtful = [g for g in timed if g.speedup and g.ratio_busy and not (g.speedup.low > 1 or g.speedup.high < 1)]
    if any(group.first["world_size"] > 1 for group in doubtful):
        return f"not settled, as {_busy(timed)[0]}: train again on a quiet machine. {_least_sent(rivals)}"
    usable = [group for group in timed if group.verdict != "inferior"]
    best = max(usable or timed, key=_speedup)
    if best.first["world_size"] == 1 and all(group.first["world_size"] == 1 for group in timed):
        first = f"{_name(best)} is the fastest on one device ({_evidence(best, baseline)})"
    elif best.first["world_size"] == 1:
        several = [group for group in timed if group.first["world_size"] > 1]
        second = max([group for group in several if group in usable] or several, key=_speedup)
        share = f"{_speedup(second) / _speedup(best):.2f}"
        alone = f"one device holds this graph: use {best.first['strategy']}. The fastest of several ranks"
        first = f"{alone}, {_name(second)}, has {share} times its speed ({_evidence(second, baseline)})"
    else:
        first = f"use {_name(best)} ({_evidence(best, baseline)})"
    race = words.race(best, timed)
    return f"{first}{race and f'. {best.title} is {race}'}. {_open(best, timed, baseline)}"


def _open(best: Group, timed: Sequence[Group], baseline: str) -> str:
    """Return open questions, and the next step for them."""
    blocks = min(len(group.ratios) + group.left_out for group in timed)  # the line on load names blocks left out
    seeds = min((g.difference.n for g in timed if g.difference is not None), default=len(best.accuracies))
    wanted, doubts = [], _busy(timed)
    if blocks < FEWEST_BLOCKS:
        doubts.append(f"{counted(blocks, 'block')} of {FEWEST_BLOCKS}: block=0,1,2")
    elif not doubts and "speedup" not in best.best:
        doubts.append(f"{counted(blocks, 'block')} do not tell it from the next")
    if doubts:
        wanted.append(f"speed ({'; '.join(doubts)})")
    if best.verdict == "baseline":
        pass  # its accuracy supports no claim
    elif best.verdict in ("not enough runs", "inconclusive") or (not best.verdict and seeds < FEWEST_SEEDS):
        few = f"{counted(seeds, 'seed')} of {FEWEST_SEEDS}: seed=0,1,2,3,4" if seeds < FEWEST_SEEDS else best.verdict
        wanted.append(f"accuracy ({few})")
    elif best.control_verdict == "not inferior":
        wanted.append("accuracy (the negative control, codec=drop, passes too)")
    elif best.control_verdict != "inferior":
        wanted.append("accuracy (no verdict on the negative control, codec=drop)")
    settled = f"Not settled: {' and '.join(wanted)}" if wanted else f"The comparison with {baseline} is settled"
    return f"{settled}. Other machines and links: gnnpar plan topology=NAME"


def _busy(timed: Sequence[Group]) -> list[str]:
    """Return how many of the runs with a known load began on a busy machine."""
    runs = [run for group in timed for run in group.completed if run.get("load")]
    busy = sum(map(is_busy, runs))
    return [f"the machine was busy when {busy} of {counted(len(runs), 'run')} began"] if busy else []


def _tag(rivals: Sequence[Group]) -> list[str]:
    """Return the planner's choice and its reason, if another strategy is at least 5 % faster."""
    timed = [group for group in rivals if group.speedup is not None and not group.timeless and group.is_fair]
    tags = [group for group in timed if group.first["strategy"] == "tag"]
    if not tags:
        return []
    tag, best = tags[0], max(timed, key=_speedup)
    predicted = next((r["predicted"] for r in tag.completed if r.get("predicted")), None)
    if best is tag or predicted is None or _speedup(best) < 1.05 * _speedup(tag):
        return []
    chose = f"tag chose {predicted['label']}, and {_name(best)} is {_speedup(best) / _speedup(tag):.2f} times as fast"
    exactness = set(best.results[0]["exactness"])
    quality = (tag.results[0].get("settings", {}).get("strategy") or {}).get("quality")
    allowed = {"exact", *(map(str, quality) if isinstance(quality, list) else ())}
    if not exactness <= allowed:
        return [f"{chose}: it was not allowed what is {', '.join(sorted(exactness - allowed))} (strategy.quality)"]
    error, took = predicted.get("epoch_error"), seconds(predicted["epoch_seconds"])
    if error is not None and abs(error) > _SURE:
        measure = "topology=measured topology.refresh=true measures the machine again"
        return [f"{chose}: it expected {took} an epoch and was off by {error:+.0%}; {measure}"]
    return [f"{chose}: it expected {took} an epoch of its choice, and more of the others"]


def _reason(meaningful: Sequence[Group], baseline: str) -> str:
    why = next((group.why_no_speedup for group in meaningful if group.why_no_speedup), f"{baseline} alone has a time")
    return f"{why}; train strategy={baseline} in the same sweep" if why.startswith("no completed run") else why


def _evidence(group: Group, baseline: str) -> str:
    blocks = counted(len(group.ratios), "block")
    ratio = f"{words.speedup_of(group)} x {baseline} over {blocks}"
    return ratio if group.verdict in ("", "baseline") else f"{ratio}; accuracy {group.verdict}"


def _least_sent(rivals: Sequence[Group]) -> str:
    several = [group for group in rivals if group.first["world_size"] > 1]
    sent = [(value, group) for group in several if (value := group.mean("bytes_per_epoch")) is not None]
    if not sent:
        return "nothing is sent by one rank"
    value, least = min(sent, key=lambda pair: pair[0])
    return f"{_name(least)} sends least, {num_bytes(value)} an epoch"


def _speedup(group: Group) -> float:
    assert group.speedup is not None
    return group.speedup.value


def _name(group: Group) -> str:
    return f"{group.title} on {counted(group.first['world_size'], 'rank')}"
