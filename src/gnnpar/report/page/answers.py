"""Which strategy is best for this task, and how sure is that: a few lines at the top of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

from gnnpar.report import formatting as words
from gnnpar.report.groups import Group
from gnnpar.report.statistics import FEWEST_BLOCKS, FEWEST_SEEDS, Verdict
from gnnpar.track.console import num_bytes


class Answer(NamedTuple):
    """One question, who answers it best, with which figure, and what is to be kept in mind."""

    question: str
    name: str
    figure: str
    caveat: str


def answers(groups: Sequence[Group], baseline: str) -> list[Answer]:
    """Fastest, least sent, least memory, accuracy; the negative control competes in none."""
    rivals = [group for group in groups if not group.control and group.completed]
    if not rivals:
        return []
    answers = [fastest(rivals, baseline), least_sent(rivals), least_memory(rivals), accuracy(rivals)]
    return [answer for answer in answers if answer is not None]


def fastest(groups: Sequence[Group], baseline: str) -> Answer | None:
    sound = [group for group in groups if group.epoch_seconds is not None and not group.timeless]
    if not sound:
        return Answer(
            "fastest", words.NOTHING, "", "no statement on speed: more threads than cores, or ranks as threads"
        )
    timed = [(g.speedup.value, g) for g in sound if g.speedup is not None]
    if not timed:
        return Answer("fastest", words.NOTHING, "", f"no fair ratio: {sound[0].why_no_speedup}")
    best = max(timed, key=lambda pair: pair[0])[1]
    provenances = {g.first["provenance"] for _, g in timed if g.first["world_size"] > 1}
    if len(timed) == 1:
        caveat = "the only one with a time"
    elif "speedup" in best.best:
        caveat = "ahead of all others by a paired test"
    elif len(provenances) > 1:
        caveat = f"{' and '.join(sorted(provenances))} times do not compare"
    else:
        count = len(best.ratios)
        few = "not enough runs: " if count < FEWEST_BLOCKS else "not settled by "
        caveat = f"{few}{count} block{'s' if count > 1 else ''}"
    caveat = "; ".join(filter(None, (caveat, words.race(best, sound), words.BUSY if best.ratio_busy else "")))
    ratio = f", {words.speedup_of(best)} x {baseline}" if best.first["strategy"] != baseline else ""
    return Answer("fastest", best.title, words.time_of(best) + ratio, caveat)


def least_sent(groups: Sequence[Group]) -> Answer | None:
    several = [(_mean(g, "bytes_per_epoch"), g) for g in groups if g.first["world_size"] > 1]
    several = [(value, g) for value, g in several if value is not None]
    if not several:
        return None
    value, best = min(several, key=lambda pair: pair[0])
    return Answer("least sent", best.title, f"{num_bytes(value)} an epoch", _equals(several, value, "several ranks"))


def least_memory(groups: Sequence[Group]) -> Answer | None:
    known = [(value, g) for g in groups if (value := _mean(g, "memory_peak_bytes")) is not None]
    if not known:
        return None
    value, best = min(known, key=lambda pair: pair[0])
    return Answer("least memory", best.title, f"{num_bytes(value)} a rank", _equals(known, value, "peak of an epoch"))


def accuracy(groups: Sequence[Group]) -> Answer | None:
    """How many show no loss; the best by name only where a paired test says so."""
    judged = [g for g in groups if g.verdict not in ("", "baseline")]
    if not judged:
        return None
    counts = {v: sum(g.verdict == v for g in judged) for v in get_args(Verdict)}
    text = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
    control = judged[0].control_verdict
    caveats = {
        "not inferior": "unfit for the claim: the negative control passes too",
        "none": "no negative control beside it",
        "inferior": "the negative control is inferior, as it must be",
        "not enough runs": f"a verdict needs {FEWEST_SEEDS} seeds",
    }
    best = next((g for g in groups if "accuracy" in g.best), None)
    name = f"best: {best.title}" if best else "no best by a paired test"
    return Answer("accuracy", name, text, caveats.get(control, "the negative control is inconclusive"))


def _mean(group: Group, column: str) -> float | None:
    values = [row[column] for row in group.rows if row["status"] == "completed" and row[column] is not None]
    return sum(values) / len(values) if values else None


def _equals(values: Sequence[tuple[float, Group]], best: float, otherwise: str) -> str:
    count = sum(value == best for value, _ in values)
    return f"{count} are equal" if count > 1 else f"of {len(values)}, {otherwise}"
