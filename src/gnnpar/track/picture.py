"""Print a plan: mesh, layers with widths and modes, parts, and halo rows between parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gnnpar.files import JsonObject
from gnnpar.track.text import counted, printable_tree

_MOST_RANKS = 8  # rows and columns of the heat table
_HEAT = ("dim", "", "yellow", "bold red")  # by quarter of the largest entry
_PART = {"nodes": "nodes", "edges": "edges", "train_nodes": "train"}  # columns of the table of parts
_TOLD = ("strategy", "model", "dataset", "nodes", "edges", "ranks", "threads", "transport", "links")


def picture(facts: JsonObject) -> Group:
    """Return at most 15 lines on a run's layout. facts: as passed to Tracker.start."""
    facts = printable_tree(facts)  # names come from datasets, plans and shards
    shown = [Text(line) for line in (head(facts), mesh(facts), layers(facts)) if line]
    table = [parts(facts)] if facts.get("parts") else []
    foot = {k: v for k, v in facts.items() if k not in _TOLD and isinstance(v, (int, float, str)) and k != "parts"}
    last = [Text("  ".join(f"{k.replace('_', ' ')} {figure(v)}" for k, v in foot.items()))] if foot else []
    return Group(*shown, *table, *last)


def head(facts: JsonObject) -> str:
    """Return 'graph_parallel gcn sbm  3,000 nodes  50,214 edges  2 ranks x 1 thread over gloo'."""
    named = " ".join(str(facts[name]) for name in ("strategy", "model", "dataset") if facts.get(name))
    sizes = [f"{figure(facts[name])} {name}" for name in ("nodes", "edges") if name in facts]
    if "ranks" in facts:
        ranks = f"{counted(facts['ranks'], 'rank')} x {counted(facts.get('threads', 1), 'thread')}"
        over = facts.get("transport", "none")
        sizes.append(ranks + (f" over {over}" if over != "none" else ""))
    sizes += [str(facts["links"])] if "links" in facts else []
    return "  ".join(filter(None, [named, *sizes]))


def mesh(facts: JsonObject) -> str:
    """Return 'stage 0: ranks 0 1, layers 0 to 1; stage 1: ...' for several stages."""
    stages = facts.get("mesh") or []
    if len(stages) < 2:
        return ""
    lines = []
    for i, stage in enumerate(stages):
        first, stop = stage["layers"]
        lines.append(f"stage {i}: ranks {' '.join(map(str, stage['ranks']))}, layers {first} to {stop - 1}")
    return "; ".join(lines)


def layers(facts: JsonObject) -> str:
    """Return '64 -halo-> 64 -halo-> 8  (bfloat16, overlap edges)'; equal layers in a row are counted."""
    layers: Sequence[JsonObject] = facts.get("layers") or ()
    if not layers:
        return ""
    text = str(layers[0]["in"])
    for (mode, out), same in itertools.groupby(layers, key=lambda layer: (layer["mode"], layer["out"])):
        count = len(list(same))
        text += f" -{mode}-> {out}" + (f" ({count} layers)" if count > 1 else "")
    how = dict.fromkeys(layer["how"] for layer in layers if layer["how"])
    return f"layers: {text}" + (f"  ({'; '.join(how)})" if how else "")


def parts(facts: JsonObject) -> Table:
    """Return one row per part; on the right the rows it reads from each other part, in warm colours if many."""
    rows: Sequence[JsonObject] = facts["parts"]
    halo: Sequence[Sequence[int]] | None = facts.get("halo_from")
    columns = [name for name in rows[0] if name in _PART] if halo else [name for name in rows[0] if name != "part"]
    table = Table(box=None, show_edge=False, pad_edge=False)
    table.add_column("part", justify="right")
    for name in columns:
        table.add_column(_PART.get(name, name.replace("_", " ")), justify="right")
    heat = halo if halo and len(rows) > 1 else None
    few = range(min(len(rows), _MOST_RANKS))
    for j in few if heat else ():
        table.add_column(f"{'halo from ' if j == 0 else ''}{j}", justify="right")
    most = max(max(row) for row in heat) if heat else 0
    for i in few:
        cells: list[Text | str] = [str(rows[i].get("part", i)), *(figure(rows[i][name]) for name in columns)]
        cells += ["." if i == j else warm(heat[i][j], most) for j in few] if heat else []
        table.add_row(*cells)
    if len(rows) > _MOST_RANKS:
        table.add_row("...", f"{len(rows)} parts")
    return table


def warm(value: int, most: int) -> Text:
    """Return a number in the colour of its quarter of the largest."""
    quarter = min(3, 4 * value // most) if most else 0
    return Text(figure(value), style=_HEAT[quarter])


def figure(value: object) -> str:
    """Return a number with separators and four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
