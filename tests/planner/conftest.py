"""Models and machines that tests of the planner price, and a folder with `topology=four`: two hosts of two devices with
speeds of their own, so that nothing is measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composing import configured
from conftest import Run
from gnnpar.planner.extract import record
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.rates import NOMINAL
from gnnpar.pricing.statistics import GraphStats
from gnnpar.pricing.topology import one_host

FOUR = """
_target_: gnnpar.pricing.topology.Machines
cores: auto
devices: {cpu: {type: cpu, memory: 4 GiB, speed: 50 Gflop/s, memory_rate: 10 GB/s}}
hosts: [{name: h, devices: {cpu: 2}, inside: bus, nic: nic, count: 2}]
links: {bus: {rate: 5 GB/s}, nic: {rate: 1 Gbit/s, latency: 50 us}}
racks: {}
wires: []
"""
Told = Callable[..., dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "topology").mkdir()
    (tmp_path / "topology" / "four.yaml").write_text(FOUR)
    return tmp_path


@pytest.fixture
def four(folder: Path) -> str:
    return "topology=four"


@pytest.fixture
def told(run_here: Run, four: str) -> Told:
    """The JSON that a command prints."""

    def run(*words: str) -> dict[str, Any]:
        done = run_here(words[0], "--json", four, *words[1:])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


QUIET = replace(NOMINAL, message=0.0, interference=0.0, epoch=0.0, step=0.0, reduce=(0.0, 0.0))
GRAPH = GraphStats(nodes=4000, edges=60000, features=32, classes=8, train=2000)


def ir_of(name: str = "resgcn", layers: int = 8, hidden: int = 64) -> ModelIR:
    """A model of the widths of GRAPH, traced."""
    config = configured("model", name, f"model.num_layers={layers}", f"model.hidden={hidden}")
    return record(config.build(GRAPH.features, GRAPH.classes, seed=0), GRAPH.features)


def machine(ranks: int, *, rate: float = 1e9, latency: float = 5e-5) -> Machine:
    """One host of as many devices."""
    return Machine(one_host(ranks, memory_bytes=1e12, rate=rate, latency=latency), (NOMINAL,) * ranks)
