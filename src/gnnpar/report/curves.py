"""Data of the pictures: parts of bars as means over the runs of a group, and curves over epochs, seconds and bytes."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gnnpar.files import JsonDict
from gnnpar.report import colours
from gnnpar.report.groups import Group, quiet
from gnnpar.report.runs import dataset_of, differing_keys, flat, is_busy, model_of
from gnnpar.track.jsonl import read_rows

MOST_POINTS = 80
_NAMED = ("world_size", "threads_per_rank", "strategy", "codec", "model", "dataset")  # shown elsewhere


class Evaluation(NamedTuple):
    """Epoch, from 1, with the training seconds and bytes sent until its end, and the validation metric in percent."""

    epoch: int
    seconds: float
    bytes: float
    val: float

    def cost(self, axis: str) -> float:
        """Return seconds or bytes, by name."""
        return self.seconds if axis == "seconds" else self.bytes


Curve = Sequence[Evaluation]


def curve_of(folder: Path) -> Curve:
    """Return at most MOST_POINTS evaluations of a run, always with the last."""
    names = ("time/train_seconds", "comm/total_bytes_so_far", "metric/val")
    rows = [row for row in read_rows(folder) if all(row.get(name) is not None for name in names)]
    rows = rows[::-1][:: -(-len(rows) // MOST_POINTS) or 1][::-1]
    found = [(row["epoch"] + 1, *(row[name] for name in names)) for row in rows]
    return [Evaluation(epoch, seconds, sent, 100 * val) for epoch, seconds, sent, val in found]


def mean_curve(runs: Sequence[Curve]) -> Curve | None:
    """Return the mean over runs at their common epochs, up to the end of the shortest."""
    at = [{each.epoch: each for each in run} for run in runs]
    common = [epoch for epoch in at[0] if all(epoch in run for run in at)]
    means = [Evaluation(epoch, *(statistics.fmean(run[epoch][k] for run in at) for k in (1, 2, 3))) for epoch in common]
    return means if len(means) > 1 else None


class Line(NamedTuple):
    """The curves of a group in a picture. averaged: the first is their mean, and the others are its runs."""

    group: Group
    label: str
    in_colour: bool
    averaged: bool
    curves: list[Curve]


def lines(groups: Sequence[Group], tint: Mapping[str, str], axis: str) -> list[Line]:
    """Return the lines of a task over seconds or bytes, grey ones first: the mean alone if there is one, and the runs
    of at most six groups in colour. Over seconds, runs on an idle machine if there are any."""
    rows_of = {group: quiet(group.rows, "busy")[0] if axis == "seconds" else group.rows for group in groups}
    curves_of = {group: [curve_of(Path(row["folder"])) for row in rows] for group, rows in rows_of.items()}
    runs_of = {group: runs for group, curves in curves_of.items() if (runs := [curve for curve in curves if curve])}
    chosen = [name for name, colour in tint.items() if colour != colours.GREY]
    in_colour = colours.groups_in_colour(list(runs_of), chosen)
    found: list[Line] = []
    for group, runs in runs_of.items():
        mean, shown = mean_curve(runs), group in in_colour
        several = runs if mean is None or (len(runs) > 1 and shown) else []
        curves = several if mean is None else [mean, *several]
        found.append(Line(group, colours.short_name(group, list(runs_of)), shown, mean is not None, curves))
    return sorted(found, key=lambda line: line.in_colour)


Parts = Callable[[Group], Mapping[str, float] | None]


def bars(groups: Sequence[Group], parts_of: Parts, *, fewer: bool = True) -> list[tuple[Group, Mapping[str, float]]]:
    """Return groups with the parts of their bars, [] if all are zero. fewer: at most six parts, small ones together."""
    found = [(group, parts) for group in groups if (parts := parts_of(group))]
    if not any(sum(parts.values()) for _, parts in found):
        return []
    few = colours.six_parts([parts for _, parts in found])
    return [(group, parts) for (group, _), parts in zip(found, few, strict=True)] if fewer else found


def _means(parts: Sequence[object], names: Iterable[str]) -> dict[str, float] | None:
    """Return the mean over runs of each entry of a mapping in result.json, or None if no run has it."""
    known = [part for part in parts if isinstance(part, Mapping)]
    return {name: statistics.fmean(part.get(name) or 0 for part in known) for name in names} if known else None


def bytes_of(group: Group) -> dict[str, float] | None:
    """Return the parts of the bytes of an epoch, mean over completed runs."""
    return _means([run.get("bytes_per_epoch") for run in group.completed], colours.BYTES)


def breakdown_of(group: Group) -> dict[str, float] | None:
    """Return the parts of the table's epoch time, by their shares of the mean epochs."""
    timed = [run for run in group.completed if not is_busy(run)] or group.completed
    parts = _means([run.get("breakdown_seconds") for run in timed], colours.TIME)
    if parts is None or group.epoch_seconds is None or not (total := sum(parts.values())):
        return parts
    return {name: value * group.epoch_seconds.value / total for name, value in parts.items()}


def live_bytes(group: Group) -> dict[str, float] | None:
    """Return live tensors by category, mean over runs, or None if none was profiled."""
    return _means([r["memory_bytes"]["live"] for r in group.completed if r["memory_bytes"]["peak"]], colours.MEMORY)


def layer_bytes(group: Group) -> list[float]:
    """Return bytes of an epoch by layer, mean over runs; empty if nothing is sent or known."""
    runs = [layers for r in group.completed if (layers := r.get("bytes_by_layer"))]
    return [statistics.fmean(layer) for layer in itertools.zip_longest(*runs, fillvalue=0)]


def tasks(groups: Sequence[Group]) -> dict[str, str]:
    """Return arena -> 'dataset / model', with the settings that distinguish equal names."""
    firsts = {group.arena: group.results[0] for group in groups}
    names = {arena: f"{dataset_of(r)} / {model_of(r)}" for arena, r in firsts.items()}
    same: dict[str, dict[str, dict[str, str]]] = {}  # name -> arena -> settings
    for arena, name in names.items():
        named, settings = json.loads(arena)
        same.setdefault(name, {})[arena] = flat({"epochs": named[2]} | settings)
    for name, flats in same.items():
        keys = differing_keys(list(flats.values()))
        names |= {arena: " ".join([name, *(f"{key}={f.get(key)}" for key in keys)]) for arena, f in flats.items()}
    return names


def varying(groups: Sequence[Group]) -> list[tuple[str, tuple[str, ...]]]:
    """Return (key, values of each group) of settings that differ between groups."""
    flats: list[JsonDict] = []
    for group in groups:
        facts = {"ranks": group.first["world_size"], "threads": group.first["threads_per_rank"]}
        facts |= flat(group.results[0].get("settings", {}))
        facts |= {"seed": ", ".join(map(str, sorted({row["seed"] for row in group.rows})))}
        flats.append({key: str(value) for key, value in facts.items() if key not in _NAMED})
    columns = {key: tuple(f.get(key, "") for f in flats) for f in flats for key in f}
    first: dict[tuple[str, ...], str] = {}  # list settings that vary together (a codec's name in two places) once
    for key, column in columns.items():
        if len(set(column)) > 1:
            first.setdefault(column, key)
    return [(key, column) for column, key in first.items()]
