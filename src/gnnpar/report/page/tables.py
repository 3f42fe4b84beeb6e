"""The cells of the page's tables: formatted texts, with exact values as attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gnnpar.files import JsonDict, JsonObject
from gnnpar.report import formatting as words
from gnnpar.report.formatting import NOTHING
from gnnpar.report.groups import Group
from gnnpar.report.runs import no_speed

_ALWAYS = ("strategy", "model", "seed", "world_size", "epoch_seconds", "bytes_per_epoch", "status")


class Cell(NamedTuple):
    """A text, a smaller one below it, the classes of its style, and the reason if it is blank."""

    text: str
    below: str = ""
    style: str = ""
    why: str = ""


class GroupRow(NamedTuple):
    group: Group
    colour: str
    cells: dict[str, Cell]


def group_rows(groups: Sequence[Group], baseline: str, tint: Mapping[str, str]) -> tuple[list[str], list[GroupRow]]:
    """Return the headings of columns that are not empty, and the rows."""
    mixed = len({words.times_of(group.first) for group in groups}) > 1
    rows = [GroupRow(group, tint[group.first["strategy"]], _group_cells(group, baseline, mixed)) for group in groups]
    used = [name for name in rows[0].cells if any(row.cells[name].text not in (NOTHING, "") for row in rows)]
    return used, rows


def _group_cells(group: Group, baseline: str, mixed: bool) -> dict[str, Cell]:
    first, grey, table = group.first, "grey" if group.timeless else "", words.group_cells(group)
    value, _, interval = words.ratio(group.speedup).partition(" ")
    ratio = words.bracketed(words.marked(value, group.ratio_busy), group.timeless)
    details = [first["variant"], group.changed, first["exactness"], words.times_of(first) if mixed else ""]
    best = dict.fromkeys(group.best, " best")
    judged = not group.control and group.verdict not in ("", "baseline")
    style = f"text verdict-{group.verdict.replace(' ', '-')}" if judged else "text"
    return {
        "strategy": Cell(first["strategy"], " · ".join(filter(None, details)), "text"),
        "verdict": Cell(table["verdict"], f"control: {group.control_verdict}" if judged else "", style),
        **{name: Cell(table[name]) for name in ("ranks", "runs")},
        "epoch": Cell(table["epoch"], style=grey),
        f"x {baseline}": Cell(ratio, interval, grey + best.get("speedup", ""), group.why_no_speedup),
        **{name: Cell(table[name]) for name in ("sent/epoch", "peak/rank")},
        "test at best val, %": Cell(table["test at best val, %"], style=best.get("accuracy", "")),
        "difference": Cell(table["difference"], why=group.why_no_difference),
        "to target": Cell(table["to target"], "" if table["to target"] == NOTHING else table["sent to target"], grey),
        "gradient": Cell(table["cosine"], "" if table["error"] == NOTHING else f"error {table['error']}"),
    }


def run_columns(rows: Sequence[JsonObject]) -> list[tuple[str, str, bool]]:
    """Return the columns that are neither empty nor constant."""
    texts = {column: {words.run_text(row, column) for row in rows} for _, column, _ in words.RUN_COLUMNS}
    same = [name for name in ("dataset", "provenance") if len(texts[name]) == 1 and len(rows) > 1]
    return [c for c in words.RUN_COLUMNS if c[1] in _ALWAYS or (c[1] not in same and texts[c[1]] != {NOTHING})]


def run_row(row: JsonObject, columns: Sequence[tuple[str, str, bool]], tint: Mapping[str, str]) -> JsonDict:
    """Return the texts of the cells, and the exact values of result.json as attributes."""
    exact = {name: "" if value is None else value for name, value in row.items()}
    cells = [(column, words.run_text(row, column), is_text) for _, column, is_text in columns]
    return {"exact": exact, "cells": cells, "colour": tint[row["strategy"]], "grey": no_speed(row)}
