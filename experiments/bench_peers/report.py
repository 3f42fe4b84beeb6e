"""The tables of README.md from the raw lines: `python experiments/bench_peers/report.py [FILE]`."""

import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records
import reports

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
    """The lines of one cell: seconds and losses by kind and round, memory by kind."""

    def __init__(self, rows: Rows) -> None:
        self.seconds: dict[str, dict[int, float]] = defaultdict(dict)
        self.losses: dict[str, dict[int, float]] = defaultdict(dict)
        self.faults: dict[str, dict[int, int]] = defaultdict(dict)
        self.memory: dict[str, dict[str, float]] = {}
        for row in rows:
            kind = row["kind"]
            if "seconds" not in row:
                self.memory[kind] = row
                continue
            self.losses[kind][row["round"]] = row["loss"]
            self.faults[kind][row["round"]] = row["page_faults"]
            if row["round"] >= 0:
                self.seconds[kind][row["round"]] = row["seconds"]
        self.edges = rows[0]["edges"]

    def milliseconds(self, kind: str) -> float:
        return 1e3 * statistics.median(self.seconds[kind].values())

    def over(self, kind: str, base: str) -> str:
        """Epoch of a kind over that of another in the same round."""
        mine, others = self.seconds[kind], self.seconds[base]
        return interval([mine[i] / others[i] for i in sorted(others) if i in mine])

    def apart(self, kind: str, base: str, rounds: int = 3) -> float:
        """Largest relative difference of the losses of the first epochs."""
        mine, others = self.losses[kind], self.losses[base]
        return max(abs(mine[i] / others[i] - 1) for i in sorted(others)[:rounds])


def cells(rows: Rows) -> dict[str, Cell]:
    of: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        of[row["cell"]].append(row)
    return {name: Cell(each) for name, each in of.items()}


def ratios(found: dict[str, Cell]) -> None:
    print("| model | where | ours | its epoch, ms | peer | peer's, ms | peer / ours | losses differ by |")
    print("|---|---|---|---|---|---|---|---|")
    for name, cell in found.items():
        model, where = name.split(" | ")
        for peer in (kind for kind in cell.seconds if kind in PEERS):
            for ours in (kind for kind in cell.seconds if kind not in PEERS):
                apart = "other draws" if "batches" in name else f"{cell.apart(peer, ours):.0e}"
                print(
                    f"| {NAMES[model]} | {where} | `{ours}` | {cell.milliseconds(ours):.0f} | {PEERS[peer]} "
                    f"| {cell.milliseconds(peer):.0f} | {cell.over(peer, ours)} | {apart} |"
                )


def main() -> None:
    committed = HERE / "results.jsonl"
    file = reports.asked(HERE, file=committed.name).file
    found = cells(records.read(file))
    before = cells(records.read(HERE / "before.jsonl")) if file == committed else {}
    print("### a peer's epoch over ours, in the same round\n")
    ratios(found)
    if before:
        print("\n### before and after\n")
        print("| model | where | DGL over `single` before | after | with `row_order=metis` before | after |")
        print("|---|---|---|---|---|---|")
    for name, cell in before.items():
        if name in found and "dgl" in cell.seconds:
            model, where = name.split(" | ")
            pairs = [
                each.over("dgl", kind) for kind in ("single", "single row_order=metis") for each in (cell, found[name])
            ]
            print(f"| {NAMES[model]} | {where} | {' | '.join(pairs)} |")
    print("\n### memory of an epoch, and page faults of the last round\n")
    print("| model | where | program | live peak, MiB | resident above a bare start, MiB | page faults |")
    print("|---|---|---|---|---|---|")
    for name, cell in found.items():
        model, where = name.split(" | ")
        for kind, row in cell.memory.items():
            last = cell.faults[kind][max(cell.faults[kind])]
            print(
                f"| {NAMES[model]} | {where} | {PEERS.get(kind, f'`{kind}`')} | {row['live_mib']:.0f} "
                f"| {row['rss_mib']:.0f} | {last:,} |"
            )
    print("\n### how cost grows: nanoseconds an edge, 1 thread\n")
    print("| model | graph | edges | `single` | `single row_order=metis` | DGL |")
    print("|---|---|---|---|---|---|")
    for name, cell in found.items():
        model, where = name.split(" | ")
        if where.startswith(("sbm", "debian", "rmat")) or where == "1 thread":
            graph = "sbm" if where == "1 thread" else where
            each = [
                f"{1e6 * cell.milliseconds(kind) / cell.edges:.0f}" if kind in cell.seconds else "-"
                for kind in ("single", "single row_order=metis", "dgl")
            ]
            print(f"| {NAMES[model]} | {graph} | {cell.edges:,} | {' | '.join(each)} |")
    if file == committed:
        print("\n### PyG by torch.compile, measured later without other peers\n")
        ratios(cells(records.read(HERE / "compiled.jsonl")))


if __name__ == "__main__":
    main()
