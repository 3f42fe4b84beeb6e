"""Epochs of gnnpar beside DGL, SAR and PyG: programs with the same graph, weights and cut take turns epoch by epoch.

`make bench-peers` makes the environment. Lines go to outputs/bench_peers/results.jsonl: a go that was stopped continues
there, and one that ended is measured anew. A peer or a graph that is not there is named in a line and left out.
"""

import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import records
from bench_peers.ours import DEBIAN, write
from bench_peers.serve import Job
from epochs import facts
from records import Files

HERE = Path(__file__).parent
OUT = HERE.parents[1] / "outputs" / "bench_peers"  # where this folder has lines; a copy without has its own here
ROUNDS, WARMUP = 11, 2
OURS = ("single", "single row_order=metis")
RANKED = ("graph_parallel", "sar", "dgl_sar")  # kinds of several ranks
SCRIPTS = {"dgl": "peer_dgl.py", "pyg": "peer_pyg.py", "isplib": "peer_pyg.py"}
KEY = secrets.token_hex(32)  # by which ranks know each other: in their environment, which no other user reads
Cell = Mapping[str, Any]


def all_cells() -> dict[str, Cell]:
    """Name -> graph, threads and the kinds of workers that take turns."""
    models, found = ("gcn", "sage", "gat"), dict[str, Cell]()
    for model, threads in itertools.product(models, (1, 2)):
        kinds = (*OURS, "dgl", "pyg", "pyg compiled", *(["isplib"] if model != "gat" else []))
        found[f"{model} | {threads} thread{'s' * (threads > 1)}"] = {"graph": "sbm", "threads": threads, "kinds": kinds}
    for model in models:
        found[f"{model} | 2 ranks"] = {"graph": "sbm", "threads": 1, "ranks": 2, "kinds": RANKED}
    found["sage | batches"] = {"graph": "sbm", "threads": 2, "kinds": ("minibatch", "dgl_batches"), "rounds": 5}
    for graph, model in itertools.product(("sbm_tenth", "sbm_four", "debian", "rmat"), models):
        found[f"{model} | {graph}"] = {"graph": graph, "threads": 1, "kinds": (*OURS, "dgl"), "rounds": 7}
    return found


class Worker:
    """A program under measurement: one process for each rank, idle until it is asked."""

    def __init__(self, kind: str, model: str, cell: Cell, folder: Path, pythons: Mapping[str, str]) -> None:
        self.kind = kind
        where, ranks = kind.split()[0].split("_")[0], cell.get("ranks", 1) if kind in RANKED else 1
        threads = 2 if "threads=2" in kind else cell["threads"]
        job = Job(str(folder), kind, cell["graph"], model, threads, cell.get("dropout", 0.0), ranks)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore", "BENCH_KEY": KEY}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "DGLBACKEND": "pytorch"}
        command = [pythons.get(where, sys.executable), str(HERE / SCRIPTS.get(where, "ours.py"))]
        asked = [[*command, json.dumps(asdict(replace(job, rank=rank)))] for rank in range(ranks)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes = [subprocess.Popen(each, env=environment, **pipes) for each in asked]
        self.answers()  # each has loaded

    def answers(self) -> list[Any]:
        """Return the next answer of each rank. SystemExit if one has ended."""
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            raise SystemExit(f"a rank of {self.kind} ended")
        return list(map(json.loads, lines))

    def ask(self, what: str) -> list[dict[str, Any]]:
        for process in self.processes:
            process.stdin.write(f"{what}\n")
            process.stdin.flush()
        return self.answers()

    def stop(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(timeout=60)


def measure(name: str, cell: Cell, pythons: Mapping[str, str], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """The lines of one cell: an epoch of every program a round, then its memory."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dataset = write(cell["graph"], folder)
        workers = [Worker(kind, name.split(" | ")[0], cell, folder, pythons) for kind in kinds]
        rows: list[dict[str, Any]] = []
        about = {"cell": name, "edges": dataset.num_edges, "nodes": dataset.num_nodes, **facts()}
        for number in range(-WARMUP, cell.get("rounds", ROUNDS)):
            for worker in workers if number % 2 else workers[::-1]:
                answers = worker.ask("epoch")
                told = {"seconds": max(each["seconds"] for each in answers), "loss": answers[0]["loss"]}
                told["page_faults"] = sum(each["page_faults"] for each in answers)
                rows.append({**about, "kind": worker.kind, "round": number, **told})
        for worker in workers:
            found = worker.ask("memory")
            rows.append({**about, "kind": worker.kind} | {key: max(each[key] for each in found) for key in found[0]})
            worker.stop()
        return rows


def has(python: str, module: str) -> bool:
    command = [python, "-P", "-W", "ignore", "-c", f"import {module}"]
    return bool(python) and subprocess.run(command, capture_output=True).returncode == 0


def run(files: Files, *, dgl: str = "", isplib: str = "", cells: tuple = ()) -> None:
    """Measure all cells, or these; in a rehearsal on a tenth of the graph, two rounds.

    dgl: Python of an environment with DGL 1.1.3, and with SAR for its rows. isplib: of one with iSpLib and PyG.
    """
    files = replace(files, folder=OUT) if files.folder == HERE and records.parts(HERE / "results.jsonl") else files
    needed = {"dgl": (dgl, "dgl"), "dgl_sar": (dgl, "sar.comm"), "pyg": (sys.executable, "torch_geometric")}
    needed["isplib"] = (isplib, "isplib")
    missing = [kind for kind, (python, module) in needed.items() if not has(python, module)]
    if missing:
        print(f"not in their environments, rows are left out: {', '.join(missing)}", flush=True)
    known = all_cells()
    if unknown := set(cells) - set(known):
        raise SystemExit(f"no cell {sorted(unknown)}; there are {', '.join(known)}")
    if not Path(DEBIAN.path).exists():
        print(f"{DEBIAN.path} is not there: the cells of debian are left out", flush=True)
        known = {name: cell for name, cell in known.items() if cell["graph"] != "debian"}
    chosen = {name: known[name] for name in cells or known if name in known}
    files.folder.mkdir(parents=True, exist_ok=True)
    rows = files.read()
    if not chosen.keys() - {row["cell"] for row in rows}:  # an earlier go ended
        records.replace(files(), rows := [row for row in rows if row["cell"] not in chosen])
    done = {row["cell"] for row in rows} & chosen.keys()
    print(f"{len(chosen) - len(done)} of {len(chosen)} cells are measured now -> {files()}", flush=True)
    for name, cell in chosen.items():
        kinds = [kind for kind in cell["kinds"] if kind.split()[0].replace("dgl_batches", "dgl") not in missing]
        if name not in done and kinds:
            small = {"graph": "sbm_tenth", "rounds": 2} if files.smoke else {}
            records.append(files(), measure(name, {**cell, **small}, {"dgl": dgl, "isplib": isplib}, kinds))
            print(f"{name}: {', '.join(kinds)}", flush=True)
