"""Checkpoints: a resumed run is the uninterrupted one bit for bit; damaged and foreign checkpoints are passed over."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gnnpar
from checkpoints import ADAPTIVE, SMALL, damage, hashes, hashes_of, last, result, rows, strategy_of, train, tree_hash
from composing import PRESETS, configured, names, rest_slow, settings_of
from gnnpar.cli.train import run_training
from gnnpar.comm.world import Outcome
from gnnpar.files import JsonDict
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.objective import Objective
from gnnpar.parallel.pipeline.strategy import stages_of
from gnnpar.report.fairness import differences, unequal_accuracy
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.checkpoint.policy import CheckpointPolicy
from gnnpar.training.checks import check_strategy
from gnnpar.training.meter import evaluate
from gnnpar.training.result.result import fault

OF_CODEC = " ".join(ADAPTIVE).replace("strategy.", "")
# beside every YAML of conf/strategy: state that only some settings have
_CLUSTERS = "strategy.clusters=6 strategy.clusters_per_batch=2"
VARIANTS = {
    "random bits": "strategy=graph_parallel codec=random codec.period=3",
    "uniform bits": "strategy=sar codec=uniform codec.bits=4",
    "differences": "strategy=graph_parallel codec=delta codec.least_bits=1 model.dropout=0",
    "kept features": "strategy=graph_parallel first_layer=cached model=gat codec=bf16",
    "kept sums, adaptive": f"strategy=adaqp first_layer=cached {' '.join(ADAPTIVE)}",
    "out of core": "strategy=sar strategy.logical_parts=3 model=gat",
    "out of core, adaptive": f"strategy=sar strategy.logical_parts=3 codec=adaptive {OF_CODEC}",
    "rounds of peers": "strategy=sar strategy.rounds=peer strategy.backward=pull model=gat world_size=3",
    "steps of batches": "strategy=minibatch strategy.batch_size=24 strategy.fanout=[3,2] model=gat",
    "steps of clusters": f"strategy=minibatch strategy.sampler=cluster {_CLUSTERS} model=gat",
    "steps of random nodes": f"strategy=minibatch strategy.sampler=uniform {_CLUSTERS}",
    "steps of drawn subgraphs": "strategy=minibatch strategy.sampler=saint strategy.batch_size=40",
    "masks of a vertex cut": "strategy=cofree strategy.drop_edge=0.4 strategy.masks=3 partition=dbh",
    "smoothed, random bits": "strategy=pipegcn strategy.smooth_features=true strategy.smooth_gradients=true "
    "strategy.staleness=2 codec=random codec.period=2",
    "late, adaptive": f"strategy=pipegcn codec=adaptive {OF_CODEC}",
    "partial rows, adaptive": f"strategy=adaqp strategy.halo=cover {' '.join(ADAPTIVE)} model=gat world_size=3",
    "late partial rows": "strategy=pipegcn strategy.halo=cover strategy.smooth_features=true codec=uniform",
    "kept partial rows": "strategy=digest strategy.halo=cover strategy.period=3 first_layer=cached",
    "partial rows, differences": "strategy=graph_parallel strategy.halo=cover codec=delta codec.least_bits=1 "
    "model.dropout=0",
    "copies by their change": "strategy=sancus strategy.period=4 strategy.bound=0.3 model.dropout=0",
    "rows of 16 bits": "strategy=gnnpipe precision=bf16",
    "batch normalisation": "strategy=graph_parallel model.norm=batch",
    "pairs of nodes": "strategy=graph_parallel task=link task.decoder=mlp task.eval_negatives=5",
    "momentum and warm-up": "strategy=graph_parallel optim=sgd optim.momentum=0.9 optim.schedule=cosine "
    "optim.warmup_epochs=2",
}


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Trains until the end of an epoch in which the run is asked to end."""

    def train_until(folder: Path, done: int, *overrides: str) -> Outcome:
        decide = CheckpointPolicy.decide

        def asked(self, comm, now, everyone, *, ends):
            told = everyone and [{**each, "asked": now == done} for each in everyone]
            return decide(self, comm, now, told, ends=ends)

        with monkeypatch.context() as patch:
            patch.setattr(CheckpointPolicy, "decide", asked)
            return train(folder, *overrides)

    return train_until


RARE = ("out of core, adaptive", "steps of clusters", "steps of random nodes", "rounds of peers", "kept features")


@pytest.mark.quick(5)
@pytest.mark.parametrize("case", rest_slow([*names("strategy"), *VARIANTS], *RARE))
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, interrupt, case: str) -> None:
    common = (*(VARIANTS[case].split() if case in VARIANTS else strategy_of(case)), "epochs=6", "fidelity_every=4")
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert train(whole, *common).exit_code == 0
    for done in (2, 3):
        outcome = interrupt(parted, done, "resume=auto", *common)
        assert (outcome.status, outcome.error) == ("interrupted", "interrupted by a signal")
        assert len(rows(parted)) == done == last(parted).epoch
    assert train(parted, "resume=auto", *common).exit_code == 0
    assert rows(parted) == rows(whole)
    assert hashes(parted) == hashes(whole)
    assert result(parted)["metric"] == result(whole)["metric"]


KINDS = ["buffers", "batch_norm", "frozen", "shared", "tied", "weight_norm", "spectral_norm", "extra_state"]
ENGINES = {"graph_parallel": ("strategy=graph_parallel",), "gnnpipe": ("strategy=gnnpipe", "strategy.chunks=one")}
EVERY = [(strategy, "all") for strategy in names("strategy") if strategy != "tag"]
EACH = [(engine, kind) for engine in ENGINES for kind in KINDS]
NEVER = {("gnnpipe", "batch_norm"), ("gnnpipe", "spectral_norm")}  # refused before training, in one line
# engines whose parameters lie as in those that remain
ALIKE = (*PRESETS, "adaqp", "bns", "cagnet", "digest", "pipegcn", "sancus")
SLOW = {*EACH, *((name, "all") for name in ALIKE)} - {("gnnpipe", "buffers"), ("graph_parallel", "batch_norm")}


CASES = [each for each in (*EVERY, *EACH) if each not in NEVER]


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("case", "kind"), [pytest.param(*each, marks=pytest.mark.slow) if each in SLOW else each for each in CASES]
)
def test_a_checkpoint_has_all_weights_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, kind: str
) -> None:
    """Of frozen, shared, parametrized ones and buffers: opened, it gives what the run gave; resumed, it goes on."""
    model = ("model=pyg", "model.target=pyg_nets.partly", f"model.kwargs.of={kind}", "dataset.self_loops=false")
    common = (*(ENGINES.get(case) or strategy_of(case)), *model, "precision=fp64", "optim.weight_decay=0.1")
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def noted(engine: Engine, objective: Objective) -> JsonDict:
        seen.append((engine.node_ids, engine.predict()))
        return evaluate(engine, objective)

    monkeypatch.setattr("gnnpar.training.loop.evaluate", noted)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    for folder, further in ((parted, ("epochs=2",)), (parted, ("epochs=4", "resume=auto")), (whole, ("epochs=4",))):
        folder.mkdir(exist_ok=True)
        settings = settings_of(*(each for each in SMALL if "model." not in each), *common, *further)
        outcome = run_training(settings, folder)
        assert outcome.exit_code == 0, outcome.error
    assert rows(parted) == rows(whole)
    assert hashes(parted) == hashes(whole)
    data = settings.load_dataset()
    expected = torch.full((data.num_nodes, 8), torch.nan, dtype=torch.float64)
    for ids, logits in seen[-last(whole).manifest["run"]["world_size"] :]:
        expected[ids] = logits
    opened = [gnnpar.load(folder, which="last", trust=True) for folder in (whole, parted)]
    with torch.no_grad():
        found = [trained(data.x.double(), data.edge_index, prepared=True) for trained in opened]
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["batch_norm", "spectral_norm"])
def test_what_a_pipeline_cannot_train_is_refused_before_it_begins(tmp_path: Path, kind: str) -> None:
    overrides = ("model=pyg", "model.target=pyg_nets.partly", f"model.kwargs.of={kind}", *ENGINES["gnnpipe"])
    settings = settings_of(*(each for each in SMALL if "model." not in each), *overrides)
    with pytest.raises(ValueError, match=r"strategy=gnnpipe (never holds all rows|runs a model layer by layer)"):
        check_strategy(settings, 2)


def test_a_parameter_of_two_stages_is_refused(tmp_path: Path) -> None:
    """gnnpar's own models have none; one of a user's own may."""
    config = configured("model", "gcn", "model.hidden=12", "model.num_layers=2")
    model = config.build(12, 12, seed=0)
    model.layers[1].conv.weight = model.layers[0].conv.weight
    with pytest.raises(ValueError, match=r"layers\.0\S+ and layers\.1\S+ are one parameter, and two stages"):
        stages_of(model, (range(1), range(1, 2)))
    assert set(stages_of(model, (range(2),)).values()) == {0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six epochs of GCN on two ranks, with checkpoints after the second, fourth and last."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    job = ("strategy=graph_parallel", "checkpoint.every=2", "checkpoint.keep=3", "epochs=6")
    assert train(folder, *job).exit_code == 0
    assert [p.name for p in checkpoint.folders(folder)] == ["epoch-000006", "epoch-000004", "epoch-000002"]
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    assert train(tmp_path, "checkpoint.every=1", "checkpoint.keep=2", "epochs=9", "optim.lr=0.5").exit_code == 0
    found = [p.name for p in checkpoint.folders(tmp_path)]
    evaluated = {row["epoch"] + 1: row["metric/val"] for row in rows(tmp_path) if "metric/val" in row}
    best = max(evaluated, key=lambda epoch: (evaluated[epoch], -epoch))
    assert found == sorted({"epoch-000009", "epoch-000008", f"epoch-{best:06d}"}, reverse=True)
    chosen = checkpoint.best(tmp_path, pytest.fail)
    assert chosen is not None
    assert chosen.epoch == best
    assert train(tmp_path / "none", "checkpoint.keep=0", "epochs=2").exit_code == 0
    assert not (tmp_path / "none" / "checkpoint").exists()


def test_a_longer_run_goes_on_in_another_folder(run: Path, tmp_path: Path) -> None:
    more = ("strategy=graph_parallel", "epochs=9")
    assert train(tmp_path / "more", f"resume={run}", *more).exit_code == 0
    assert train(tmp_path / "whole", *more).exit_code == 0
    whole = rows(tmp_path / "whole")
    whole[5] = rows(run)[5]  # the last epoch of the shorter run was evaluated
    assert rows(tmp_path / "more") == whole
    assert hashes(tmp_path / "more") == hashes(tmp_path / "whole")
    assert train(tmp_path / "one", f"resume={run}/checkpoint/epoch-000004", *more).exit_code == 0
    assert hashes(tmp_path / "one") == hashes(tmp_path / "whole")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("overrides", "dropped"),
    [
        (("strategy=graph_parallel", "world_size=3"), "history, caches), because world_size 2 -> 3, partition "),
        (("strategy=sar",), "history, caches), because strategy graph_parallel -> sar"),
        (("strategy=single",), "history, caches), because world_size 2 -> 1, strategy graph_parallel -> single"),
        (("strategy=graph_parallel", "strategy.overlap=none"), "because settings of strategy graph_parallel"),
        (("strategy=graph_parallel", "optim=sgd"), "dropped: the optimizer's (Adam, this run has SGD)"),
    ],
)
def test_elsewhere_model_and_optimizer_go_on_and_the_rest_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], dropped: str
) -> None:
    before = last(run)
    weights, moments = before.merged(torch.device("cpu"))
    outcome = train(run, "resume=auto", "epochs=7", *overrides)
    said = capsys.readouterr().out
    assert outcome.exit_code == 0, outcome
    (line,) = [each for each in said.splitlines() if each.startswith("resumed from")]
    assert dropped in line
    assert f"{before.folder} at epoch 6; dropped: " in line
    assert [row["epoch"] for row in rows(run)] == list(range(7))
    # the seventh step is the one that the two-rank run makes with the same moments, up to rounding
    after, _ = last(run).merged(torch.device("cpu"))
    assert any(not torch.equal(after[name], weights[name]) for name in weights)
    if "optim=sgd" not in overrides:
        shutil.rmtree(run / "checkpoint" / "epoch-000007")
        assert train(run, "resume=auto", "epochs=7", "strategy=graph_parallel").exit_code == 0
        expected, _ = last(run).merged(torch.device("cpu"))
        for name in weights:
            torch.testing.assert_close(after[name], expected[name], rtol=1e-4, atol=1e-6)
        assert moments["state"].keys() == weights.keys()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("dataset.graph_seed=1",), "is of graph "),
        (("dataset.train_fraction=0.5",), "is of split "),
        (("model.hidden=16",), "is of a model with hidden=8, this run's has hidden=16: set model.hidden as it was, or"),
        (("model=sage",), "is of a model with _target_=gnnpar.models.gcn.GCN, this run's has _target_=gnnpar.mod"),
        (("epochs=5",), "has 6 epochs behind it, and epochs=5: set epochs=6 or more"),
    ],
)
def test_another_graph_split_or_model_is_refused(run: Path, overrides: tuple[str, ...], line: str) -> None:
    outcome = train(run, "resume=auto", "epochs=7", "strategy=graph_parallel", *overrides)
    assert outcome.exit_code == 1
    assert line in str(outcome.error)
    assert "\n" not in str(outcome.error)
    assert last(run).epoch == 6


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped byte of a rank": lambda folder: damage(folder / "rank-1.pt"),
    "a flipped byte of the manifest": lambda folder: damage(folder / "manifest.json"),
    "a cut rank": lambda folder: os.truncate(folder / "rank-0.pt", 1000),
    "a missing rank": lambda folder: (folder / "rank-1.pt").unlink(),
    "an empty manifest": lambda folder: (folder / "manifest.json").write_text(""),
    "a manifest of another kind": lambda folder: (folder / "manifest.json").write_text("[1, 2]"),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_corrupt_checkpoint_gives_way_to_the_one_before(run: Path, trained: Path, capsys, how: str) -> None:
    DAMAGE[how](run / "checkpoint" / "epoch-000006")
    assert train(run, "resume=auto", "epochs=6", "strategy=graph_parallel").exit_code == 0
    said = capsys.readouterr().out
    assert "epoch-000006 is no good checkpoint: " in said
    assert "; going back to the one before" in said
    assert f"resumed from {run / 'checkpoint' / 'epoch-000004'} at epoch 4" in said
    assert (hashes(run), rows(run)) == (hashes(trained), rows(trained))


def test_a_new_run_in_an_old_folder_moves_the_checkpoints_away(run: Path, capsys) -> None:
    assert train(run, "strategy=graph_parallel", "epochs=2").exit_code == 0
    assert "checkpoint is of an earlier run: moved to checkpoint-before" in capsys.readouterr().out
    assert [p.name for p in checkpoint.folders(run)] == ["epoch-000002"]
    assert (run / "checkpoint-before" / "epoch-000006").is_dir()


def test_going_on_from_elsewhere_in_an_old_folder_leaves_no_stale_checkpoints(run: Path, tmp_path: Path) -> None:
    common = ("strategy=graph_parallel", "checkpoint.every=1", "checkpoint.keep=9")
    assert train(tmp_path / "old", *common, "epochs=8", "seed=3").exit_code == 0
    assert train(tmp_path / "old", f"resume={run}/checkpoint/epoch-000002", *common, "epochs=4").exit_code == 0
    assert [p.name for p in checkpoint.folders(tmp_path / "old")] == ["epoch-000004", "epoch-000003"]
    assert hashes(tmp_path / "old") == hashes_of(checkpoint.read(run / "checkpoint" / "epoch-000004"))


def test_trees_come_back_bit_for_bit_and_tell_their_bits_apart(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    tree = {
        (("forward", 1), 2): base[2:4],
        "b": [None, True, 3, 1e-300, "x", (float("nan"),)],
        "half": torch.tensor([float("nan"), -0.0]).half(),
        "empty": torch.empty(0, 3, dtype=torch.int64),
    }
    checkpoint.write_tree(tmp_path / "tree", tree)
    back = checkpoint.read_tree(tmp_path / "tree", torch.device("cpu"))
    assert back.keys() == tree.keys()
    assert (tmp_path / "tree").stat().st_size < 4000
    assert tree_hash(back) == tree_hash(tree)
    assert back["b"][:5] == tree["b"][:5]
    for other in (1.0, -1.0):
        tree["half"] = torch.tensor([float("nan"), other * 0.0]).half()
        assert (tree_hash(back) == tree_hash(tree)) == (other < 0)
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\] is a float64: a state holds tensors"):
        checkpoint.plain({"a": [1, np.float64(2.0)]})


def test_run_resumed_from_a_folder_below_moves_older_checkpoints(tmp_path: Path) -> None:
    train(tmp_path, "strategy=single", "epochs=4")
    train(tmp_path / "first", "strategy=single", "epochs=2")
    train(tmp_path, "strategy=single", "epochs=3", f"resume={tmp_path}/first")
    assert checkpoint.folders(tmp_path)[0].name == "epoch-000003"
    assert (tmp_path / "checkpoint-before" / "epoch-000004").is_dir()


def test_resume_leaves_the_random_numbers_of_the_program_unchanged(tmp_path: Path) -> None:
    small = {"dataset.num_nodes": 60, "strategy": "single", "threads_per_rank": 1}
    gnnpar.train("gcn", "sbm", epochs=1, folder=tmp_path / "first", **small)
    torch.randperm(10)
    before = torch.get_rng_state()
    gnnpar.train("gcn", "sbm", epochs=2, folder=tmp_path / "second", resume=str(tmp_path / "first"), **small)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("first", "then", "changed", "timed"),
    [
        ("strategy=single epochs=3", "strategy=single epochs=4 eval_every=3", ["eval_every"], 1),
        ("epochs=4", "epochs=5 threads_per_rank=2", ["threads_per_rank"], 1),
        ("strategy=single epochs=2", "strategy=graph_parallel world_size=2 epochs=2", None, 0),
    ],
)
def test_result_of_a_resumed_run_names_other_settings_and_times_its_own_epochs(
    tmp_path: Path, first: str, then: str, changed: list[str] | None, timed: int
) -> None:
    train(tmp_path / "a", *first.split())
    train(tmp_path / "b", *then.split(), f"resume={tmp_path}/a")
    done, mine = result(tmp_path / "a")["epochs_done"], result(tmp_path / "b")
    if changed is not None:
        assert mine["begun_otherwise"] == {"epochs": done, "settings": changed}
        otherwise = "what it went on from" in differences(mine, {**mine, "begun_otherwise": None})
        assert otherwise == (changed == ["eval_every"]), "threads do not change an accuracy"
    seconds = mine["epoch_seconds"]
    assert 0 < result(tmp_path / "a")["epoch_seconds"]["num_epochs"] <= done and seconds["num_epochs"] == timed
    assert timed or [seconds[name] for name in ("median", "mean", "p20", "p80", "warmup_epochs")] == [None] * 4 + [0]


def test_new_checkpoints_stay_where_all_earlier_ones_are_damaged(tmp_path: Path) -> None:
    train(tmp_path, "epochs=4")
    for part in (tmp_path / "checkpoint").rglob("*.pt"):
        part.write_bytes(b"damaged")
    train(tmp_path, "epochs=2", "resume=auto")
    assert last(tmp_path).epoch == 2
    assert (tmp_path / "checkpoint-before").is_dir(), "nothing is deleted"


def test_rank_with_another_checkpoint_file_than_rank_0_is_refused(run: Path) -> None:
    found, name = last(run), checkpoint.name_of(0)
    found.rank(0, torch.device("cpu"))
    other = {**found.manifest, "files": {name: {**found.manifest["files"][name], "sha256": "0" * 64}}}
    with pytest.raises(ValueError, match="of another checkpoint than rank 0's"):
        replace(found, manifest=other).rank(0, torch.device("cpu"))


def test_run_that_has_stopped_early_trains_no_further_on_resume(tmp_path: Path) -> None:
    stopping = ("epochs=60", "early_stopping.patience=1", "early_stopping.min_delta=1")
    train(tmp_path, *stopping)
    before = result(tmp_path)["epochs_done"]
    assert before < 60
    assert train(tmp_path, *stopping, "resume=auto").exit_code == 0
    assert result(tmp_path)["epochs_done"] == before
    train(tmp_path, *stopping, "resume=auto", "early_stopping.patience=3")
    assert result(tmp_path)["epochs_done"] > before


def test_result_of_a_run_resumed_with_other_settings_names_them(tmp_path: Path) -> None:
    for name in ("exact", "alike"):
        train(tmp_path / name, "strategy=single", "seed=3", "epochs=4")
    train(tmp_path / "lossy", "strategy=graph_parallel", "codec=drop", "world_size=2", "seed=0", "epochs=4")
    resume = f"resume={tmp_path / 'exact'}"
    train(tmp_path / "other", "strategy=graph_parallel", "codec=drop", "world_size=2", "seed=0", "epochs=6", resume)
    said = result(tmp_path / "other")
    assert said["begun_otherwise"] == {"epochs": 4, "settings": ["seed", "strategy"]} and not fault(said)
    assert last(tmp_path / "other").manifest["progress"]["begun_otherwise"] == ["seed", "strategy"]
    assert "what it went on from" in unequal_accuracy(said, result(tmp_path / "lossy"))
    train(tmp_path / "on", "strategy=single", "seed=3", "epochs=6", resume)
    assert "begun_otherwise" not in result(tmp_path / "on")
    again = ("strategy=graph_parallel", "codec=drop", "world_size=2", "seed=0", "epochs=8")
    train(tmp_path / "third", *again, f"resume={tmp_path / 'other'}")
    assert result(tmp_path / "third")["begun_otherwise"]["settings"] == ["seed", "strategy"], "by way of"
