"""A folder with `topology=four`: two hosts of two devices with speeds of their own, so that nothing is measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Run

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
