"""Epochs, memory and growth of every program."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import reports
from records import Files

OURS = ("single", "single row_order=metis")
NAMES = {"gcn": "GCN", "sage": "GraphSAGE", "gat": "GAT"}
PEERS = {
    "dgl": "DGL",
    "pyg": "PyG",
    "pyg compiled": "PyG compiled",
    "isplib": "iSpLib",
    "dgl_sar": "SAR",
    "dgl_batches": "DGL batches",
}
RATIOS = ("model", "where", "ours", "its epoch, ms", "peer", "peer's, ms", "peer / ours", "losses differ by")
BEFORE = ("model", "where", "DGL over `single` before", "after", "with `row_order=metis` before", "after")
MEMORY = ("model", "where", "program", "live peak, MiB", "resident above a bare start, MiB", "page faults")
GROWTH = ("model", "graph", "edges", *(f"`{kind}`" for kind in OURS), "DGL")
Program = Mapping[str, Any]
Cells = Mapping[tuple[str, str], Mapping[str, Program]]  # model, where -> kind -> program


def cells(rows: Sequence[Mapping[str, Any]]) -> Cells:
    """Return each program's line of memory, with its seconds and losses by round, its median and last page faults."""
    found: dict[tuple[str, str], dict[str, Program]] = {}
    for (name, kind), (*epochs, memory) in reports.by(rows, lambda row: (row["cell"], row["kind"])).items():
        model, where = name.split(" | ")
        told = {key: {row["round"]: row[key] for row in epochs} for key in ("seconds", "loss")}
        counted = {i: seconds for i, seconds in told["seconds"].items() if i >= 0}
        more = {"ms": 1e3 * statistics.median(counted.values()), "page_faults": epochs[-1]["page_faults"]}
        found.setdefault((NAMES[model], where), {})[kind] = {**memory, **told, "seconds": counted, **more}
    return found


def over(program: Program, base: Program) -> str:
    """Epoch over that of the base in the same round: median, and the order statistics that hold the median of such
    ratios with at least 95 % (range below 6)."""
    mine, others = program["seconds"], base["seconds"]
    ordered = sorted(mine[i] / others[i] for i in others if i in mine)
    place = {5: 0, 7: 0, 9: 1, 11: 1, 15: 3}.get(len(ordered), 0)
    return f"{statistics.median(ordered):.2f} ({ordered[place]:.2f} to {ordered[-1 - place]:.2f})"


def ratios(found: Cells) -> str:
    lines = []
    for name, cell in found.items():
        peers, ours = ([kind for kind in cell if (kind in PEERS) == theirs] for theirs in (True, False))
        for peer, mine in itertools.product(peers, ours):
            theirs, base = cell[peer], cell[mine]
            apart = max(abs(theirs["loss"][i] / loss - 1) for i, loss in list(base["loss"].items())[:3])
            losses = "other draws" if "batches" in name else f"{apart:.0e}"
            times = (f"{base['ms']:.0f}", PEERS[peer], f"{theirs['ms']:.0f}")
            lines.append([*name, f"`{mine}`", *times, over(theirs, base), losses])
    return reports.table(RATIOS, lines)


def memory(found: Cells) -> str:
    lines = []
    for name, cell in found.items():
        for kind, program in reversed(cell.items()):  # first rounds begin with the last program
            sizes = (f"{program['live_mib']:.0f}", f"{program['rss_mib']:.0f}", f"{program['page_faults']:,}")
            lines.append([*name, PEERS.get(kind, f"`{kind}`"), *sizes])
    return reports.table(MEMORY, lines)


def growth(found: Cells) -> str:
    lines = []
    for (model, where), cell in found.items():
        if where.startswith(("sbm", "debian", "rmat")) or where == "1 thread":
            edges = next(iter(cell.values()))["edges"]
            each = [f"{1e6 * cell[kind]['ms'] / edges:.0f}" if kind in cell else "-" for kind in (*OURS, "dgl")]
            lines.append([model, "sbm" if where == "1 thread" else where, f"{edges:,}", *each])
    return reports.table(GROWTH, lines)


def report(files: Files) -> None:
    """Print the tables. The committed folder has one more set of lines: before ADR 52."""
    found, before = (cells(files.read(name)) for name in ("results", "before"))
    print(f"### a peer's epoch over ours, in the same round\n\n{ratios(found)}")
    both = [(name, cell, found[name]) for name, cell in before.items() if name in found and "dgl" in cell]
    lines = [[*name, *(over(c["dgl"], c[kind]) for kind in OURS for c in pair)] for name, *pair in both]
    if before:
        reports.show("before and after", reports.table(BEFORE, lines))
    reports.show("memory of an epoch, and page faults of the last round", memory(found))
    reports.show("how cost grows: nanoseconds an edge, 1 thread", growth(found))
