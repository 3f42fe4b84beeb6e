"""`gnnpar plan` and strategy=tag as users call them, also with a strategy of the user's own folder."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from conftest import Run
from gnnpar.cli import check
from gnnpar.cli.main import run
from gnnpar.cli.plan import factors_of, qualities
from gnnpar.config.inputs import with_plan
from gnnpar.files import write_json_atomic
from gnnpar.models.gcn import GCN
from gnnpar.planner import calibrate
from gnnpar.planner.calibrate import Calibration, fit_calibration, nonnegative, read_calibration
from gnnpar.planner.extract import record
from gnnpar.planner.planner import Evaluated, recommend
from gnnpar.planner.registry import _read, shipped
from gnnpar.planner.samples import Samples
from gnnpar.pricing.candidate import Scope
from gnnpar.pricing.price import Price
from gnnpar.pricing.rates import NOMINAL, Rates, numbers_beyond
from gnnpar.settings import ConfigError
from planner.conftest import FOUR, Told

SMALL = ("dataset=sbm", "dataset.num_nodes=400", "model=resgcn", "model.num_layers=8", "model.hidden=16")


def parsed(file: Path) -> Any:
    return json.loads(file.read_text())


def test_plan_then_train(run_here: Run, folder: Path, four: str) -> None:
    """The plan brings its model, dataset and partition with it."""
    planned = run_here("plan", *SMALL, four, "--trace", "trace.json")
    assert planned.returncode == 0, planned.stderr
    assert "chosen" in planned.stdout
    assert "is not allowed" in planned.stdout
    data = parsed(folder / "plan.json")
    assert data["quality"] == ["exact"]
    assert data["devices"] == ["h0/0", "h0/1", "h1/0", "h1/1"]
    assert data["predicted"]["epoch_seconds"] > 0
    assert parsed(folder / "trace.json")["traceEvents"]
    ran = run_here("train", "plan=plan.json", "world_size=4", "comm=threads", "epochs=3", "hydra.run.dir=run")
    assert ran.returncode == 0, ran.stderr
    assert "planned: " in ran.stdout
    result = parsed(folder / "run" / "result.json")
    assert (result["model"], result["dataset"]) == ("resgcn", "sbm")
    assert result["predicted"]["epoch_seconds"] == data["predicted"]["epoch_seconds"]


@pytest.fixture
def searched(folder: Path) -> tuple[str, ...]:
    """A search on two slow devices and two fast ones."""
    slow = "slow: {type: cpu, memory: 4 GiB, speed: 5 Gflop/s, memory_rate: 1 GB/s}"
    hosts = "{name: s, devices: {slow: 2}, inside: bus, nic: nic}, {name: f, devices: {cpu: 2}, inside: bus, nic: nic}"
    text = FOUR.replace("devices: {cpu: {", f"devices: {{{slow}, cpu: {{").replace("1 Gbit/s", "10 Gbit/s")
    text = re.sub("hosts: .*", f"hosts: [{hosts}]", text)
    (folder / "topology" / "unequal.yaml").write_text(text)
    graph = ("model=gcn", "dataset=sbm", "dataset.num_nodes=1500")
    return "plan", *graph, "search=guided", "budget=40", "topology=unequal"


def test_a_search_finds_uneven_parts_and_says_so(run_here: Run, folder: Path, searched: tuple[str, ...]) -> None:
    """Printed and in plan.json: the search, its evaluations and seconds; parts follow the devices' speed."""
    done = run_here(*searched)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "search=guided priced" in said
    assert "recomputing instead of receiving: halos of" in said
    assert "weights by sufficient factors: 0 of 2" in said
    data = parsed(folder / "plan.json")
    found = data["predicted"]["search"]
    assert found["name"] == "guided"
    grids = shipped().candidates(Scope(ir=record(GCN().build(16, 4, seed=0), 16), nodes=1500), 4)
    assert 5 < found["evaluations"] <= 40 + 2 * len(grids)  # the uniform ones, with and without a kept first layer
    assert found["cpu_seconds"] > 0
    sizes = dict(zip(data["devices"], data["statistics"]["nodes"], strict=True))
    assert max(sizes["s/0"], sizes["s/1"]) < 0.5 * min(sizes["f/0"], sizes["f/1"])
    assert sum(sizes.values()) == 1500


@pytest.mark.slow
def test_a_plan_of_uneven_parts_runs(run_cli: Run, folder: Path, searched: tuple[str, ...]) -> None:
    planned = run_cli(*searched)
    assert planned.returncode == 0, planned.stderr
    ran = run_cli("train", "plan=plan.json", "world_size=4", "comm=threads", "epochs=3", "hydra.run.dir=run")
    assert ran.returncode == 0, ran.stderr
    assert parsed(folder / "run" / "result.json")["status"] == "completed"


@pytest.mark.parametrize(("ranks", "quality", "exactness"), [(2, "[exact]", "exact"), (4, "[sampled]", "sampled")])
def test_tag_plans_and_runs(run_here: Run, tmp_path: Path, ranks: int, quality: str, exactness: str) -> None:
    """bns sends a tenth of the halo rows of graph_parallel, which is priced beside it."""
    asked = ("strategy=tag", "strategy.rates=nominal", f"strategy.quality={quality}", f"world_size={ranks}")
    done = run_here("train", *asked, "comm=threads", "epochs=2", "dataset.num_nodes=400", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    assert "tag: " in done.stdout
    result = parsed(tmp_path / "run" / "result.json")
    assert (result["strategy"], result["exactness"]) == ("tag", [exactness])
    assert result["predicted"]["label"] in done.stdout
    plan = parsed(tmp_path / "run" / "plan.json")["strategy"]
    assert plan["name"] in result["predicted"]["label"]
    assert (plan["name"] in ("bns", "cofree")) == (exactness == "sampled")
    assert plan["_target_"] == str(shipped().yaml[plan["name"]]["_target_"])


def test_what_edges_carry_is_asked_as_training_asks(told: Told, run_here: Run, four: str) -> None:
    """No plan is written that `gnnpar train` would refuse."""
    asked = ("plan", "dataset=sbm_typed", "dataset.num_nodes=200", "search=enumerate")
    refused = run_here(*asked, four, "model=gcn")
    assert refused.returncode == 2
    assert "dataset sbm_typed has types on edges, which model=gcn does not read" in refused.stderr
    priced = told(*asked, "model=rgcn", "--quality=sampled")["candidates"]
    why = {(each["candidate"]["family"], each["refused"]) for each in priced}
    assert {reason for family, reason in why if family == "minibatch"} == {"it does not carry types of edges"}
    assert ("graph_parallel", "") in why


def test_sampled_strategies_are_chosen_where_they_are_allowed(told: Told, folder: Path) -> None:
    asked = ("plan", "dataset.num_nodes=400", "model.hidden=16", "search=enumerate")
    sampled = {"bns", "cofree", "minibatch"}
    lossless = told(*asked)
    assert sampled <= lossless["unpriced"].keys()
    assert not sampled & {each["candidate"]["family"] for each in lossless["candidates"]}
    every = told(*asked, "--quality=sampled")
    assert not sampled & every["unpriced"].keys()
    priced = {each["candidate"]["family"]: each for each in every["candidates"] if not each["refused"]}
    assert sampled <= priced.keys()
    assert all(priced[name]["epoch_seconds"] > 0 for name in sampled)
    plan = parsed(folder / "plan.json")
    assert plan["quality"] == ["exact", "sampled"]
    assert plan["predicted"]["label"] == every["candidates"][0]["label"]


TOO_MANY = "9 ranks do not fit on the topology's 4 devices: set world_size=4"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("plan strategy=sar", "strategy=sar: gnnpar plan chooses the strategy"),
        ("plan --quality exact,stail", "--quality=stail is no class, did you mean stale?"),
        ("plan world_size=9", TOO_MANY),
        ("plan search=guide", "search=guide is no search, did you mean guided?"),
        ("plan search=anneal", "search=anneal is in experiments/planner_search now: guided finds"),
        ("plan budget=0", "budget=0 must be a whole number of evaluations >= 1"),
        ("plan fewer=2", "fewer=2 must be true or false"),
        ("plan 'topology.links.nic.rate=-1 Gbit/s'", "links.nic.rate=-1 Gbit/s must be above 0"),
        ("plan 'topology.devices.cpu.memory=300 KiB'", "no plan fits: the nearest,"),
        ("estimate world_size=9", TOO_MANY),
        ("estimate plan=plan.json", "plan=plan.json: gnnpar plan has priced it"),
        ("estimate strategy=sar,single", "takes one strategy, or none"),
        ("estimate strategy=sarr", "strategy=sarr does not exist, did you mean sar?"),
        ("estimate strategy=gnnpipe model.num_layers=2", "2 layers cannot fill 4 stages"),
        ("estimate dataset=sbm_typed model=gcn", "dataset sbm_typed has types on edges, which model=gcn does not read"),
        ("estimate dataset=sbm_typed model=rgcn strategy=minibatch", "which strategy=minibatch does not carry"),
        (
            "estimate strategy=cagnet strategy.replication=2 model=gat world_size=4",
            "strategy.replication=2 adds up partial sums of ranks, but Softmax of layer 0",
        ),
    ],
)
def test_bad_input_is_one_line(words: str, line: str, run_here: Run, four: str) -> None:
    command, *given = shlex.split(words)
    usual = [each for each in (*SMALL, four) if each.split("=")[0] not in {word.split("=")[0] for word in given}]
    done = run_here(command, *usual, *given)
    assert done.returncode == 2
    assert line in done.stderr
    assert done.stderr.count("\n") == 1


def test_flags() -> None:
    assert qualities("exact,stale") == {"exact", "stale"}
    assert qualities("rounded") == {"exact", "rounded"}
    assert factors_of("stale=1.2,quantized=1") == {"stale": 1.2, "quantized": 1.0}
    for text in ("stale=0.5", "stale", "fast=2", "stale=inf"):
        with pytest.raises(ConfigError, match="must be a class"):
            factors_of(text)


def test_a_plan_gives_way_to_the_command_line(tmp_path: Path) -> None:
    setup: dict[str, Any] = {"names": {"model": "gcn"}, "model": {"hidden": 8}, "seed": 3}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"strategy": {"name": "sar"}, "setup": setup}))
    base = {"plan": str(file), "model": {"hidden": 64}, "seed": 0, "strategy": {}}
    config, names = with_plan(base, {"model": "sage"}, [])
    assert (config["model"], config["seed"], names) == ({"hidden": 8}, 3, {"model": "gcn", "strategy": "sar"})
    config, names = with_plan(base, {"model": "sage"}, ["model=sage", "seed=0"])
    assert (config["model"], config["seed"], names["model"]) == ({"hidden": 64}, 0, "sage")


def test_fits_recover_what_made_the_samples() -> None:
    rows = [(1.0, e, e * w, n * w) for e, n, w in ((1e3, 1e2, 16), (1e4, 1e3, 64), (1e5, 1e3, 32), (1e5, 1e4, 128))]
    true = (1e-5, 2e-9, 3e-11, 1e-10)
    seconds = [sum(a * b for a, b in zip(row, true, strict=True)) for row in rows]
    found, residual = nonnegative(rows, seconds)
    assert found == pytest.approx(true, rel=1e-4)
    assert residual < 1e-6


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks of each calibration, which measures nothing here."""
    found: list[int] = []

    def fitted(samples: object, *, ranks: int, threads: int) -> Calibration:
        found.append(ranks)
        return Calibration(ranks, threads, replace(NOMINAL, source="measured"), calibrate.NOMINAL_LINK)

    monkeypatch.setattr(calibrate, "world_samples", lambda *given: [])
    monkeypatch.setattr(calibrate, "fit_calibration", fitted)
    return found


def test_a_new_engine_is_measured(measured: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a machine measured before a method was added says nothing of its engine."""
    every = calibrate.candidates
    monkeypatch.setattr(calibrate, "candidates", lambda trial, ranks: every(trial, ranks)[:-1])
    for _ in range(2):
        calibrate.calibrate(2, threads=1, cache=tmp_path)
    monkeypatch.setattr(calibrate, "candidates", every)
    calibrate.calibrate(2, threads=1, cache=tmp_path)
    assert measured == [2, 2]


def test_rates_of_a_busy_machine_are_marked_and_measured_again_when_it_is_quiet(
    measured: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    others, said = ["other programs keep 1.6 of 2 cores busy"], list[str]()
    monkeypatch.setattr(calibrate, "contention", lambda threads, cores: others[0])
    made = [calibrate.calibrate(2, threads=1, cache=tmp_path, say=said.append) for _ in range(2)]
    assert [each.rates.described for each in made] == [f"measured rates of a busy machine ({others[0]})"] * 2
    assert measured == [2]
    assert any(line.startswith("rates of a busy machine") for line in said)
    assert others[0] in next((tmp_path / "calibration").iterdir()).read_text()
    others[0] = ""
    assert calibrate.calibrate(2, threads=1, cache=tmp_path, measuring=False).rates.busy  # asked not to measure
    quiet = [calibrate.calibrate(2, threads=1, cache=tmp_path).rates for _ in range(2)]
    assert [each.described for each in quiet] == ["measured rates"] * 2
    assert measured == [2, 2]


@pytest.mark.slow
def test_one_device_stands_in_the_table_and_what_experiments_advise_against_is_marked(
    told: Told, run_here: Run, four: str
) -> None:
    asked = ("plan", "dataset=sbm", "dataset.num_nodes=1500", "model=gcn", "search=enumerate", "--quality=stale")
    lines = run_here(*asked, four).stdout.splitlines()
    rows = {line.split(" ")[1]: line for line in lines if line.startswith(" ")}
    assert rows["single"].strip().endswith("it uses 1 of 4 ranks: gnnpar train strategy=single")
    assert "not recommended: inferior accuracy" in rows["digest,"]
    by_family = {each["candidate"]["family"]: each for each in reversed(told(*asked)["candidates"])}
    assert by_family["single"]["epoch_seconds"] > 0
    assert by_family["digest"]["not_recommended"] == "inferior accuracy"
    assert by_family["graph_parallel"]["not_recommended"] == ""
    fewer = told(*asked, "fewer=true")["candidates"]  # where it may be chosen
    single = next(each for each in fewer if each["candidate"]["family"] == "single")
    assert single["refused"] == ""
    assert single["epoch_seconds"] == pytest.approx(by_family["single"]["epoch_seconds"])


def test_one_device_that_is_too_small_says_so(told: Told) -> None:
    graph = ("dataset=sbm", "dataset.num_nodes=6000", "model=gcn")
    found = told("plan", *graph, "topology.devices.cpu.memory=12 MiB")["candidates"]
    single = next(each for each in found if each["candidate"]["family"] == "single")
    assert re.fullmatch(r"rank 0 needs [\d.]+ MiB of 12 MiB", single["refused"])


def test_a_near_choice_that_experiments_recommend_comes_first() -> None:
    def one(family: str, objective: float, refused: str = "") -> Evaluated:
        candidate = next(c for c in shipped().candidates(scope, 4) if c.family == family)
        return Evaluated(candidate, Price(), objective, refused)

    scope = Scope(ir=record(GCN().build(16, 4, seed=0), 16), nodes=1500)
    digest, near, far = one("digest", 1.0), one("graph_parallel", 1.09), one("graph_parallel", 1.2)
    assert recommend((digest, near, far)) == (near, digest, far)
    assert recommend((digest, far)) == (digest, far)
    assert recommend((digest, one("sar", 1.05, "too large"), far))[0] == digest
    assert recommend((near, digest)) == (near, digest)


def test_calibration_round_trip_and_sharing(tmp_path: Path) -> None:
    found = Calibration(2, 1, NOMINAL, (1e-9, 5e-5))
    write_json_atomic(tmp_path / "found.json", asdict(found))
    again = read_calibration(tmp_path / "found.json")
    assert again == found
    assert isinstance(again.rates, Rates)
    assert found.shared(4, 2).rates.scale == 2
    assert found.shared(2, 2) == found


def test_rates_of_one_rank() -> None:
    """From made-up samples: constants go where they belong."""
    samples = Samples(
        kernels={
            "gemm": [((1.0, f, n), 1e-6 + f * 1e-11) for f, n in ((1e6, 1e4), (1e8, 1e5), (1e7, 3e5))],
            "elementwise": [((1.0, n, numbers_beyond(n)), 2e-6 + n * 1e-10) for n in (1e3, 1e5, 1e6)],
            **{
                f"Sum.{way}": [((1.0, e, 64 * e, 64e3, 0.0), e * 1e-9) for e in (1e3, 1e4, 1e5)]
                for way in ("forward", "backward")
            },
        },
        per_number={
            "gather": 1e-10,
            "dropout": 2e-9,
            "undrop": 5e-10,
            "code2": 1e-9,
            "code4": 1e-9,
            "code8": 1e-9,
            "code16": 1e-10,
        },
        seconds={
            "order": 3e-9,
            "step_small": 1e-5,
            "numbers_small": 100.0,
            "step_large": 3e-5,
            "numbers_large": 2100.0,
        },
    )
    rates = fit_calibration([samples], ranks=1, threads=1).rates
    assert rates.gemm.flop == pytest.approx(1e-11, rel=0.01)
    assert rates.elementwise.number == pytest.approx(1e-10, rel=0.01)
    assert (rates.step, rates.order, rates.undrop) == pytest.approx((1e-8, 3e-9, 5e-10))
    assert rates.folds["Sum"][0].seconds(1e4, 1e3, 64) == pytest.approx(1e-5, rel=0.05)


def test_codec_that_the_chosen_strategy_refuses_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["dataset=sbm", "dataset.num_nodes=300", "topology=flat", "--no-measure", "--out", str(tmp_path)]
    code, said = run("plan", [*asked, "codec=drop"]), capsys.readouterr().err
    assert (code, said.count("\n")) in ((0, 0), (2, 1)), said


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


@pytest.fixture
def own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with strategies of the user."""
    monkeypatch.syspath_prepend(str(folder))
    (folder / "strategy").mkdir()
    for name, text in {
        "own_strategies.py": MODULE,
        "strategy/mine.yaml": "_target_: own_strategies.Mine\nseconds: 1.0e-6\n",
        "strategy/silent.yaml": "_target_: own_strategies.Silent\n",
        "strategy/wrong.yaml": "_target_: own_strategies.Mine\nseconds: soon\n",
    }.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.quick(1)
@pytest.mark.parametrize("search", ["enumerate", "guided"])
def test_a_plan_prices_it_beside_ours(own: Path, search: str, told: Told) -> None:
    found = told("plan", *ASKED, f"search={search}", "budget=30")
    best = found["candidates"][0]
    assert best["label"] == "mine"
    assert best["epoch_seconds"] == 1e-6
    assert {c["candidate"]["family"] for c in found["candidates"]} >= {"mine", "graph_parallel", "sar", "gnnpipe"}
    assert "has no cost(problem, machine)" in found["unpriced"]["silent"]
    assert "seconds=soon" in found["unpriced"]["wrong"]
    assert "sampled" in found["unpriced"]["minibatch"]
    plan = json.loads((own / "plan.json").read_text())
    assert plan["strategy"] == {"name": "mine", "_target_": "own_strategies.Mine", "seconds": 1e-6}


@pytest.mark.slow
def test_the_tables_list_all_of_them(run_here: Run, four: str, own: Path) -> None:
    said = " ".join(run_here("plan", *ASKED, four, "search=enumerate", "world_size=4").stdout.split())
    assert "chosen: mine" in said
    assert "silent is unpriced: Silent has no cost(problem, machine)" in said
    lines = run_here("estimate", *ASKED, four, "world_size=4").stdout.splitlines()
    rows = {words[0]: words for line in lines if (words := line.split())}
    assert rows["mine"][3:5] == ["1", "us"]
    assert rows["silent"][-2:] == ["not", "known"]
    assert rows["wrong"][-3:] == ["does", "not", "run"]


def test_what_it_refuses_is_a_row(own: Path, told: Told) -> None:
    (own / "topology" / "four.yaml").write_text(FOUR.replace("count: 2", "count: 3"))
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
def test_code_of_a_folder_that_nobody_named_does_not_run(command: str, own: Path, told: Told) -> None:
    (own / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    for name, text in EVIL.items():
        (own / name).parent.mkdir(exist_ok=True, parents=True)
        (own / name).write_text(text)
    out = told(command, "--no-measure", *ASKED[1:], "world_size=2")
    closed = out["unpriced"] if command == "plan" else {e["name"]: e["refused"] for e in out["estimates"]}
    for name in ("evil", "turned", "mine"):
        assert closed[name] == "it lies in this folder's strategy/, which is read with --trust, as code"
    assert {"evil"}.isdisjoint(check.model_names())
    assert not (own / "ran").exists()


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
