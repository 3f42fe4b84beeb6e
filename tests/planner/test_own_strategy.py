"""A strategy of the user's own folder: with a cost it is priced beside ours, without one it is listed as unpriced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnnpar.__main__ import main
from gnnpar.cli import check
from gnnpar.planner.registry import _read

MODULE = '''
from dataclasses import dataclass

from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.strategy import Capabilities
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Price, Traffic


class Base:
    """Graph parallelism under another name, without its price."""

    exactness = frozenset({"exact"})
    capabilities = Capabilities()
    check = GraphParallel.check
    describe = GraphParallel.describe
    plan = GraphParallel.plan
    build = GraphParallel.build
    exact_limit = GraphParallel.exact_limit
    codec = GraphParallel().codec
    overlap = "edges"


@dataclass(frozen=True, kw_only=True)
class Mine(Base):
    seconds: float = 1.0

    def cost(self, problem: Problem, machine: Machine) -> Price:
        if problem.ranks > 4:
            raise ValueError("mine knows 4 ranks at most")
        work = problem.work_of(problem.ranks)
        sent = sum(n for i in range(work.ir.num_layers) for _, _, n in work.flows(i, "forward"))
        memory = tuple(Memory(features=4.0 * n * work.ir.in_dim) for n in work.parts.nodes)
        return Price(phases={"wire": self.seconds}, memory=memory, traffic=Traffic(forward=sent))


@dataclass(frozen=True, kw_only=True)
class Silent(Base):
    pass
'''
FOUR = """
_target_: gnnpar.pricing.topology.Machines
cores: auto
devices: {cpu: {type: cpu, memory: 4 GiB, speed: 50 Gflop/s, memory_rate: 10 GB/s}}
hosts: [{name: h, devices: {cpu: 2}, inside: bus, nic: nic, count: 2}]
links: {bus: {rate: 5 GB/s}, nic: {rate: 1 Gbit/s, latency: 50 us}}
racks: {}
wires: []
"""
ASKED = ("topology=four", "model=gcn", "model.num_layers=4", "model.hidden=16", "dataset.num_nodes=600")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {
        "own_strategies.py": MODULE,
        "topology/four.yaml": FOUR,
        "strategy/mine.yaml": "_target_: own_strategies.Mine\nseconds: 1.0e-6\n",
        "strategy/silent.yaml": "_target_: own_strategies.Silent\n",
        "strategy/wrong.yaml": "_target_: own_strategies.Mine\nseconds: soon\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.quick(1)
@pytest.mark.parametrize("search", ["enumerate", "guided"])
def test_a_plan_prices_it_beside_ours(folder: Path, search: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--trust", "--json", *ASKED, f"search={search}", "budget=30"]) == 0
    told = json.loads(capsys.readouterr().out)
    best = told["candidates"][0]
    assert best["label"] == "mine"
    assert best["epoch_seconds"] == 1e-6
    assert {c["candidate"]["family"] for c in told["candidates"]} >= {"mine", "graph_parallel", "sar", "gnnpipe"}
    assert "has no cost(problem, machine)" in told["unpriced"]["silent"]
    assert "seconds=soon" in told["unpriced"]["wrong"]
    assert "sampled" in told["unpriced"]["minibatch"]
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["strategy"] == {"name": "mine", "_target_": "own_strategies.Mine", "seconds": 1e-6}


@pytest.mark.slow
def test_the_tables_list_all_of_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--trust", *ASKED, "search=enumerate", "world_size=4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "chosen: mine" in said
    assert "silent is unpriced: Silent has no cost(problem, machine)" in said
    assert main(["estimate", "--trust", *ASKED, "world_size=4"]) == 0
    rows = {words[0]: words for line in capsys.readouterr().out.splitlines() if (words := line.split())}
    assert rows["mine"][3:5] == ["1", "us"]
    assert rows["silent"][-2:] == ["not", "known"]
    assert rows["wrong"][-3:] == ["does", "not", "run"]


def test_what_it_refuses_is_a_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = FOUR.replace("count: 2", "count: 3")
    (folder / "topology" / "four.yaml").write_text(wide)
    assert main(["plan", "--trust", "--json", *ASKED, "search=enumerate"]) == 0
    told = json.loads(capsys.readouterr().out)
    (mine,) = [c for c in told["candidates"] if c["label"] == "mine"]
    assert mine["refused"] == "unpriced: mine knows 4 ranks at most"
    assert mine["objective"] is None


EVIL = {
    "strategy/evil.yaml": "_target_: evil.Evil\n",
    "strategy/turned.yaml": """
defaults: [_self_, parts@codec: evil]
_target_: gnnpar.parallel.halo.strategy.GraphParallel
overlap: edges
codec: {_target_: gnnpar.codecs.codec.Identity}
""",
    "strategy/parts/evil.yaml": "_target_: evil.Evil\n",
    "model/evil.yaml": "_target_: evil.Evil\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", [pytest.param("plan", marks=pytest.mark.slow), "estimate"])
def test_code_of_a_folder_that_nobody_named_does_not_run(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    for name, text in EVIL.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    assert main([command, "--json", "--no-measure", *ASKED, "world_size=2"]) == 0
    out = json.loads(capsys.readouterr().out)
    closed = out["unpriced"] if command == "plan" else {e["name"]: e["refused"] for e in out["estimates"]}
    for name in ("evil", "turned", "mine"):
        assert closed[name] == "it lies in this folder's strategy/, which is read with --trust, as code"
    assert {"evil"}.isdisjoint(check.model_names())
    assert not (folder / "ran").exists()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[1, 2]", "it must hold keys"),
        ("text", "it must hold keys"),
        ("defaults: 5", "it must hold keys, and its defaults be a list"),
        ("defaults: [odd]", "it extends itself: odd -> odd"),
        ("a: " + 1200 * "[" + 1200 * "]", "it is nested too deeply"),
    ],
)
def test_yaml_that_nobody_named_ends_no_table(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "gone.yaml").symlink_to(tmp_path / "nowhere")
    file = tmp_path / "strategy" / "odd.yaml"
    file.write_text(text)
    found = _read((tmp_path,))
    assert line in found.broken["odd"]
    assert found.strategies == {}
