"""A strategy of the user's own folder: with a cost it is priced beside ours, without one it is listed as unpriced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Run
from gnnpar.cli import check
from gnnpar.planner.registry import _read
from planner.conftest import FOUR, Told

MODULE = '''
from dataclasses import dataclass

from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.declared import Problem
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
ASKED = ("--trust", "model=gcn", "model.num_layers=4", "model.hidden=16", "dataset.num_nodes=600")


@pytest.fixture(autouse=True)
def _own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    (folder / "strategy").mkdir()
    for name, text in {
        "own_strategies.py": MODULE,
        "strategy/mine.yaml": "_target_: own_strategies.Mine\nseconds: 1.0e-6\n",
        "strategy/silent.yaml": "_target_: own_strategies.Silent\n",
        "strategy/wrong.yaml": "_target_: own_strategies.Mine\nseconds: soon\n",
    }.items():
        (folder / name).write_text(text)


@pytest.mark.quick(1)
@pytest.mark.parametrize("search", ["enumerate", "guided"])
def test_a_plan_prices_it_beside_ours(folder: Path, search: str, told: Told) -> None:
    found = told("plan", *ASKED, f"search={search}", "budget=30")
    best = found["candidates"][0]
    assert best["label"] == "mine"
    assert best["epoch_seconds"] == 1e-6
    assert {c["candidate"]["family"] for c in found["candidates"]} >= {"mine", "graph_parallel", "sar", "gnnpipe"}
    assert "has no cost(problem, machine)" in found["unpriced"]["silent"]
    assert "seconds=soon" in found["unpriced"]["wrong"]
    assert "sampled" in found["unpriced"]["minibatch"]
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["strategy"] == {"name": "mine", "_target_": "own_strategies.Mine", "seconds": 1e-6}


@pytest.mark.slow
def test_the_tables_list_all_of_them(run_here: Run, four: str) -> None:
    said = " ".join(run_here("plan", *ASKED, four, "search=enumerate", "world_size=4").stdout.split())
    assert "chosen: mine" in said
    assert "silent is unpriced: Silent has no cost(problem, machine)" in said
    lines = run_here("estimate", *ASKED, four, "world_size=4").stdout.splitlines()
    rows = {words[0]: words for line in lines if (words := line.split())}
    assert rows["mine"][3:5] == ["1", "us"]
    assert rows["silent"][-2:] == ["not", "known"]
    assert rows["wrong"][-3:] == ["does", "not", "run"]


def test_what_it_refuses_is_a_row(folder: Path, told: Told) -> None:
    (folder / "topology" / "four.yaml").write_text(FOUR.replace("count: 2", "count: 3"))
    found = told("plan", *ASKED, "search=enumerate")
    (mine,) = [c for c in found["candidates"] if c["label"] == "mine"]
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
def test_code_of_a_folder_that_nobody_named_does_not_run(command: str, folder: Path, told: Told) -> None:
    (folder / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    for name, text in EVIL.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    out = told(command, "--no-measure", *ASKED[1:], "world_size=2")
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
    (read := tmp_path / "read" / "strategy").mkdir(parents=True)
    (read / "gone.yaml").symlink_to(tmp_path / "nowhere")
    (read / "odd.yaml").write_text(text)
    found = _read((read.parent,))
    assert line in found.broken["odd"]
    assert found.strategies == {}
