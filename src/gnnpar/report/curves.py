"""Data of the pictures: parts of bars as means over the runs of a group, and curves over epochs, seconds and bytes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gnnpar.files import JsonDict
from gnnpar.report import colours
from gnnpar.report.emphasis import groups_in_colour, short_name, six_parts
from gnnpar.report.groups import Group, quiet
from gnnpar.report.runs import Result, dataset_of, flat, is_busy, model_of
from gnnpar.track.jsonl import read_rows

MOST_POINTS = 80
_NAMED = ("world_size", "threads_per_rank", "strategy", "codec", "model", "dataset")  # shown elsewhere


@dataclass(frozen=True)
class Curve:
    """Evaluations of a run: epochs, training seconds, bytes sent so far, validation metric in percent."""

    epochs: list[int]
    seconds: list[float]
    bytes: list[float]
    val: list[float]

    def along(self, axis: str) -> Sequence[float]:
        """Return seconds or bytes, by name."""
        return {"seconds": self.seconds, "bytes": self.bytes}[axis]


def curve_of(folder: Path) -> Curve | None:
    """Return at most MOST_POINTS evaluations of a run, always with the last; None without any."""
    drawn = ("metric/val", "time/train_seconds", "comm/total_bytes_so_far")
    rows = [row for row in read_rows(folder) if all(row.get(name) is not None for name in drawn)]
    if not rows:
        return None
    step = -(-len(rows) // MOST_POINTS)
    rows = rows[::-1][::step][::-1]
    return Curve(
        [row["epoch"] + 1 for row in rows],
        [row["time/train_seconds"] for row in rows],
        [row["comm/total_bytes_so_far"] for row in rows],
        [100 * row["metric/val"] for row in rows],
    )


def mean_curve(curves: Sequence[Curve]) -> Curve | None:
    """Return the mean over runs at their common epochs, up to the end of the shortest."""
    common = [epoch for epoch in (curves[0].epochs if curves else ()) if all(epoch in c.epochs for c in curves)]
    if len(common) < 2:
        return None
    at = [[curve.epochs.index(epoch) for epoch in common] for curve in curves]

    def means(of: Callable[[Curve], Sequence[float]]) -> list[float]:
        columns = zip(*([of(c)[i] for i in points] for c, points in zip(curves, at, strict=True)), strict=True)
        return [statistics.fmean(column) for column in columns]

    return Curve(common, means(lambda c: c.seconds), means(lambda c: c.bytes), means(lambda c: c.val))


def curves_of(group: Group, axis: str) -> list[Curve]:
    """Return a curve per run; over seconds, for runs on an idle machine if there are any."""
    rows = quiet(group.rows, "busy")[0] if axis == "seconds" else group.rows
    curves = [curve_of(Path(row["folder"])) for row in rows]
    return [curve for curve in curves if curve is not None]


class Line(NamedTuple):
    """The curves of a group in a picture. averaged: the first is their mean, and the others are its runs."""

    group: Group
    label: str
    in_colour: bool
    averaged: bool
    curves: list[Curve]


def lines(groups: Sequence[Group], chosen: Sequence[str], axis: str) -> list[Line]:
    """Return the lines of a task over seconds or bytes, grey ones first: the mean alone if there is one, and the runs
    of at most six groups in colour. chosen: strategies in colour."""
    runs_of = {group: runs for group in groups if (runs := curves_of(group, axis))}
    in_colour = groups_in_colour(list(runs_of), chosen)
    found: list[Line] = []
    for group, runs in runs_of.items():
        mean, shown = mean_curve(runs), group in in_colour
        several = runs if mean is None or (len(runs) > 1 and shown) else []
        curves = several if mean is None else [mean, *several]
        found.append(Line(group, short_name(group, list(runs_of)), shown, mean is not None, curves))
    return sorted(found, key=lambda line: line.in_colour)


Parts = Callable[[Group], Mapping[str, float] | None]


def bars(groups: Sequence[Group], parts_of: Parts, *, fewer: bool = True) -> list[tuple[Group, Mapping[str, float]]]:
    """Return groups with the parts of their bars, [] if all are zero. fewer: at most six parts, small ones together."""
    found = [(group, parts) for group in groups if (parts := parts_of(group))]
    if not any(sum(parts.values()) for _, parts in found):
        return []
    few = six_parts([parts for _, parts in found]) if fewer else [parts for _, parts in found]
    return [(group, parts) for (group, _), parts in zip(found, few, strict=True)]


def _means(runs: Sequence[Result], field: str, names: Sequence[str]) -> dict[str, float] | None:
    """Return the mean over runs of each entry of a mapping in result.json, or None if no run has it."""
    parts = [part for r in runs if isinstance(part := r.get(field), Mapping)]
    if not parts:
        return None
    return {name: statistics.fmean(part.get(name) or 0 for part in parts) for name in names}


def bytes_of(group: Group) -> dict[str, float] | None:
    """Return the parts of the bytes of an epoch, mean over completed runs."""
    return _means(group.completed, "bytes_per_epoch", list(colours.BYTES))


def breakdown_of(group: Group) -> dict[str, float] | None:
    """Return the parts of the table's epoch time, by their shares of the mean epochs."""
    timed = [run for run in group.completed if not is_busy(run)] or group.completed
    parts = _means(timed, "breakdown_seconds", list(colours.TIME))
    if parts is None or group.epoch_seconds is None or not (total := sum(parts.values())):
        return parts
    return {name: value * group.epoch_seconds.value / total for name, value in parts.items()}


def live_bytes(group: Group, names: Sequence[str]) -> dict[str, float] | None:
    """Return live tensors by category, mean over runs, or None if none was profiled."""
    memories = [r["memory_bytes"]["live"] for r in group.completed if r["memory_bytes"]["peak"]]
    return {name: statistics.fmean(live.get(name) or 0 for live in memories) for name in names} if memories else None


def layer_bytes(group: Group) -> list[float]:
    """Return bytes of an epoch by layer, mean over runs; empty if nothing is sent or known."""
    layers_of_runs = [layers for r in group.completed if (layers := r.get("bytes_by_layer"))]
    depth = max(map(len, layers_of_runs), default=0)
    return [statistics.fmean(layers[i] if i < len(layers) else 0 for layers in layers_of_runs) for i in range(depth)]


def tasks(groups: Sequence[Group]) -> dict[str, str]:
    """Return arena -> 'dataset / model', with the settings that distinguish equal names."""
    firsts = {group.arena: group.results[0] for group in groups}
    names = {arena: f"{dataset_of(r)} / {model_of(r)}" for arena, r in firsts.items()}
    for name in set(names.values()):
        same = [arena for arena, other in names.items() if other == name]
        if len(same) > 1:
            flats = [_arena_settings(arena) for arena in same]
            keys = [k for k in dict.fromkeys(k for f in flats for k in f) if len({f.get(k) for f in flats}) > 1]
            for arena, settings in zip(same, flats, strict=True):
                names[arena] = " ".join([name, *(f"{key}={settings.get(key)}" for key in keys)])
    return names


def _arena_settings(arena: str) -> dict[str, str]:
    named, settings = json.loads(arena)
    return flat({"epochs": named[2]} | settings)


def varying(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """Return the keys of settings that differ between groups, and the values of each group."""
    flats: list[JsonDict] = []
    for group in groups:
        seeds = sorted({row["seed"] for row in group.rows})
        facts = {"ranks": group.first["world_size"], "threads": group.first["threads_per_rank"]}
        facts |= flat(group.results[0].get("settings", {}))
        facts |= {"seed": ", ".join(map(str, seeds))}
        flats.append({key: str(value) for key, value in facts.items() if key not in _NAMED})
    columns = {key: tuple(f.get(key, "") for f in flats) for f in flats for key in f}
    first: dict[tuple[str, ...], str] = {}  # list settings that vary together (a codec's name in two places) once
    for key, column in columns.items():
        if len(set(column)) > 1:
            first.setdefault(column, key)
    return list(first.values()), [list(cells) for cells in zip(*first, strict=True)] if first else [[] for _ in flats]
