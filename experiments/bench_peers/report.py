"""Epochs, memory and growth of every program."""

import statistics
from collections.abc import Sequence
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
Rows = Sequence[dict[str, Any]]


def interval(ratios: Sequence[float]) -> str:
    """Median, and the order statistics that hold the median of such ratios with at least 95 % (range below 6)."""
    ordered, n = sorted(ratios), len(ratios)
    place = {5: 0, 7: 0, 9: 1, 11: 1, 15: 3}.get(n, 0)
    return f"{statistics.median(ordered):.2f} ({ordered[place]:.2f} to {ordered[-1 - place]:.2f})"


class Cell:
    """The lines of one cell: seconds, losses and page faults by kind and round, memory by kind."""

    def __init__(self, rows: Rows) -> None:
        epochs = reports.by((row for row in rows if "seconds" in row), lambda row: row["kind"])
        self.rounds = {kind: {row["round"]: row for row in each} for kind, each in epochs.items()}
        self.seconds = {
            kind: {i: row["seconds"] for i, row in each.items() if i >= 0} for kind, each in self.rounds.items()
        }
        self.memory = {row["kind"]: row for row in rows if "seconds" not in row}
        self.edges = rows[0]["edges"]

    def milliseconds(self, kind: str) -> float:
        return 1e3 * statistics.median(self.seconds[kind].values())

    def over(self, kind: str, base: str) -> str:
        """Epoch of a kind over that of another in the same round."""
        mine, others = self.seconds[kind], self.seconds[base]
        return interval([mine[i] / others[i] for i in sorted(others) if i in mine])

    def apart(self, kind: str, base: str) -> float:
        """Largest relative difference of the losses of the first three epochs."""
        mine, others = self.rounds[kind], self.rounds[base]
        return max(abs(mine[i]["loss"] / others[i]["loss"] - 1) for i in sorted(others)[:3])


def cells(rows: Rows) -> dict[str, Cell]:
    """(model and where) -> cell."""
    return {name: Cell(each) for name, each in reports.by(rows, lambda row: row["cell"]).items()}


def titled(name: str) -> list[str]:
    model, where = name.split(" | ")
    return [NAMES[model], where]


def ratios(found: dict[str, Cell]) -> str:
    lines = []
    for name, cell in found.items():
        for peer in (kind for kind in cell.seconds if kind in PEERS):
            for ours in (kind for kind in cell.seconds if kind not in PEERS):
                apart = "other draws" if "batches" in name else f"{cell.apart(peer, ours):.0e}"
                times = (f"{cell.milliseconds(ours):.0f}", PEERS[peer], f"{cell.milliseconds(peer):.0f}")
                lines.append([*titled(name), f"`{ours}`", *times, cell.over(peer, ours), apart])
    heads = ("model", "where", "ours", "its epoch, ms", "peer", "peer's, ms", "peer / ours", "losses differ by")
    return reports.table(heads, lines)


def memory(found: dict[str, Cell]) -> str:
    lines = []
    for name, cell in found.items():
        for kind, row in cell.memory.items():
            faults = cell.rounds[kind][max(cell.rounds[kind])]["page_faults"]
            sizes = (f"{row['live_mib']:.0f}", f"{row['rss_mib']:.0f}", f"{faults:,}")
            lines.append([*titled(name), PEERS.get(kind, f"`{kind}`"), *sizes])
    heads = ("model", "where", "program", "live peak, MiB", "resident above a bare start, MiB", "page faults")
    return reports.table(heads, lines)


def growth(found: dict[str, Cell]) -> str:
    lines = []
    for name, cell in found.items():
        model, where = titled(name)
        if where.startswith(("sbm", "debian", "rmat")) or where == "1 thread":
            each = [
                f"{1e6 * cell.milliseconds(kind) / cell.edges:.0f}" if kind in cell.seconds else "-"
                for kind in (*OURS, "dgl")
            ]
            lines.append([model, "sbm" if where == "1 thread" else where, f"{cell.edges:,}", *each])
    return reports.table(("model", "graph", "edges", *(f"`{kind}`" for kind in OURS), "DGL"), lines)


def report(files: Files) -> None:
    """Print the tables. The committed folder has two more sets of lines: before ADR 52, and compiled PyG."""
    found, before, later = (cells(files.read(name)) for name in ("results", "before", "compiled"))
    print(f"### a peer's epoch over ours, in the same round\n\n{ratios(found)}")
    if before:
        lines = [
            [*titled(name), *(each.over("dgl", kind) for kind in OURS for each in (cell, found[name]))]
            for name, cell in before.items()
            if name in found and "dgl" in cell.seconds
        ]
        heads = ("DGL over `single` before", "after", "with `row_order=metis` before", "after")
        reports.show("before and after", reports.table(("model", "where", *heads), lines))
    reports.show("memory of an epoch, and page faults of the last round", memory(found))
    reports.show("how cost grows: nanoseconds an edge, 1 thread", growth(found))
    if later:
        reports.show("PyG by torch.compile, measured later without other peers", ratios(later))
