"""Epochs of gnnpar beside DGL, SAR and PyG: programs with the same graph, weights and cut take turns epoch by epoch.

    python experiments/bench_peers/run.py --dgl ENV/bin/python [--cells 'gcn | 1 thread' ...]

`make bench-peers` makes the environment. Lines go to outputs/bench_peers/results.jsonl: a go that was stopped continues
there, and one that ended is measured anew. A peer or a graph that is not there is named in a line and left out.
"""

import argparse
import datetime
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import records
import torch
from study import DEBIAN, write

from gnnpar.training.result.result import commit, processor

COMMITTED = HERE / "results.jsonl"  # read by report.py alone; a copy without lines (reproduce.sh) has its own there
OUT = HERE.parents[1] / "outputs" / "bench_peers" / "results.jsonl" if records.parts(COMMITTED) else COMMITTED
ROUNDS, WARMUP = 11, 2
OURS = ("single", "single row_order=metis")
RANKS = ("graph_parallel", "sar")
Kinds = Sequence[str]


def cells() -> dict[str, dict[str, Any]]:
    """Name -> graph, model, threads and the kinds of workers that take turns."""
    found: dict[str, dict[str, Any]] = {}
    for model in ("gcn", "sage", "gat"):
        for threads, name in ((1, "1 thread"), (2, "2 threads")):
            found[f"{model} | {name}"] = {
                "graph": "sbm",
                "model": model,
                "threads": threads,
                "kinds": (*OURS, "dgl", "pyg", "pyg compiled", *(["isplib"] if model != "gat" else [])),
            }
    for model in ("gcn", "sage", "gat"):
        found[f"{model} | 2 ranks"] = {
            "graph": "sbm",
            "model": model,
            "threads": 1,
            "ranks": 2,
            "kinds": (*RANKS, "dgl_sar"),
        }
    found["sage | batches"] = {
        "graph": "sbm",
        "model": "sage",
        "threads": 2,
        "kinds": ("minibatch", "dgl_batches"),
        "rounds": 5,
    }
    for graph in ("sbm_tenth", "sbm_four", "debian", "rmat"):
        for model in ("gcn", "sage", "gat"):
            found[f"{model} | {graph}"] = {
                "graph": graph,
                "model": model,
                "threads": 1,
                "kinds": (*OURS, "dgl"),
                "rounds": 7,
            }
    return found


KEY = secrets.token_hex(32)  # by which ranks know each other: in their environment, which no other user reads


class Worker:
    """A program under measurement: one process for each rank, idle until it is asked."""

    def __init__(self, kind: str, cell: dict[str, Any], folder: Path, pythons: dict[str, str]) -> None:
        self.kind, self.processes, self.connections = kind, [], []
        where = kind.split()[0].split("_")[0]
        script = {"dgl": "peer_dgl.py", "pyg": "peer_pyg.py", "isplib": "peer_pyg.py"}.get(where, "ours.py")
        self.python = pythons.get(where, sys.executable)
        address = str(folder / f"{len(list(folder.iterdir()))}.{kind.replace(' ', '_')}")
        with Listener(address, family="AF_UNIX") as listener:
            for rank in range(cell.get("ranks", 1)):
                job = {
                    "folder": str(folder),
                    "address": address,
                    "kind": kind,
                    "graph": cell["graph"],
                    "model": cell["model"],
                    "threads": cell["threads"],
                    "ranks": cell.get("ranks", 1),
                    "rank": rank,
                }
                environment = os.environ | {"OMP_NUM_THREADS": str(cell["threads"]), "PYTHONWARNINGS": "ignore"}
                environment |= {"GLOO_SOCKET_IFNAME": "lo", "BENCH_KEY": KEY}
                command = [self.python, str(HERE / script), json.dumps(job)]
                self.processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
            for _ in self.processes:
                self.connections.append(self._accepted(listener))

    def _accepted(self, listener: Listener) -> Connection:
        """The next rank that has loaded; SystemExit where one ended before."""
        listener._listener._socket.settimeout(1)  # Listener has no timeout of its own
        while True:
            try:
                return listener.accept()
            except TimeoutError:
                if any(process.poll() is not None for process in self.processes):
                    raise SystemExit(f"a rank of {self.kind} ended before its first epoch") from None

    def ask(self, what: str) -> list[dict[str, Any]]:
        for connection in self.connections:
            connection.send(what)
        return [connection.recv() for connection in self.connections]

    def stop(self) -> None:
        for connection in self.connections:
            connection.send("stop")
        for process in self.processes:
            process.wait(timeout=60)


def measure(name: str, cell: dict[str, Any], pythons: dict[str, str], kinds: Kinds) -> list[dict[str, Any]]:
    """The lines of one cell: an epoch of every program a round, then its memory."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dataset = write(cell["graph"], folder)
        workers = [Worker(kind, cell, folder, pythons) for kind in kinds]
        rows: list[dict[str, Any]] = []
        about = {"cell": name, "edges": dataset.num_edges, "nodes": dataset.num_nodes, **stamp()}
        for round_number in range(-WARMUP, cell.get("rounds", ROUNDS)):
            for worker in workers if round_number % 2 else workers[::-1]:
                answers = worker.ask("epoch")
                rows.append(
                    {
                        **about,
                        "kind": worker.kind,
                        "round": round_number,
                        "seconds": max(each["seconds"] for each in answers),
                        "loss": answers[0]["loss"],
                        "page_faults": sum(each["page_faults"] for each in answers),
                    }
                )
        for worker in workers:
            found = worker.ask("memory")
            rows.append({**about, "kind": worker.kind} | {key: max(each[key] for each in found) for key in found[0]})
            worker.stop()
        return rows


def stamp() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "commit": commit(),
        "hardware": f"{processor()}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "versions": {"torch": torch.__version__},
        "date": datetime.date.today().isoformat(),
    }


def has(python: str, module: str) -> bool:
    return subprocess.run([python, "-P", "-W", "ignore", "-c", f"import {module}"], capture_output=True).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dgl", help="Python of an environment with DGL 1.1.3, and with SAR for its rows")
    parser.add_argument("--isplib", help="Python of an environment with iSpLib, torch_sparse and PyG")
    parser.add_argument("--cells", nargs="*", help="default: all")
    parser.add_argument("--out", type=Path, default=OUT, help="lines (outputs/bench_peers/results.jsonl)")
    parser.add_argument("--smoke", action="store_true", help="a tenth of the graph, two rounds: does it run?")
    options = parser.parse_args()
    os.environ.setdefault("DGLBACKEND", "pytorch")
    missing: dict[str, str] = {}
    if options.dgl is None or not has(options.dgl, "dgl"):
        missing["dgl"] = "DGL"
    if missing or not has(options.dgl, "sar.comm"):
        missing["dgl_sar"] = "SAR"
    if not has(sys.executable, "torch_geometric"):
        missing["pyg"] = "PyG"
    if options.isplib is None or not has(options.isplib, "isplib"):
        missing["isplib"] = "iSpLib"
    for name in missing.values():
        print(f"{name} is not in its environment: its rows are left out", flush=True)
    pythons = {"dgl": options.dgl, "isplib": options.isplib}
    out, known = options.out.with_name("smoke.jsonl") if options.smoke else options.out, cells()
    if unknown := set(options.cells or ()) - set(known):
        raise SystemExit(f"no cell {sorted(unknown)}; there are {', '.join(known)}")
    if not Path(DEBIAN.path).exists():
        print(f"{DEBIAN.path} is not there: the cells of debian are left out", flush=True)
        known = {name: cell for name, cell in known.items() if cell["graph"] != "debian"}
    chosen = {name: known[name] for name in options.cells or known if name in known}
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = records.read(out)
    if not chosen.keys() - {row["cell"] for row in rows}:  # an earlier go ended
        records.replace(out, rows := [row for row in rows if row["cell"] not in chosen])
    done = {row["cell"] for row in rows} & chosen.keys()
    print(f"{len(chosen) - len(done)} of {len(chosen)} cells are measured now -> {out}", flush=True)
    for name, cell in chosen.items():
        kinds = [kind for kind in cell["kinds"] if kind.split()[0].replace("dgl_batches", "dgl") not in missing]
        if name in done or not kinds:
            continue
        if options.smoke:
            cell = {**cell, "graph": "sbm_tenth", "rounds": 2}
        records.append(out, measure(name, cell, pythons, kinds))
        print(f"{name}: {', '.join(kinds)}", flush=True)


if __name__ == "__main__":
    main()
