"""Link prediction: strategies equal the single device, it equals a plain loop; rows of pairs are exact and counted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gnnpar
from checkpoints import SMALL, train
from composing import configured, names, settings_of
from conftest import Run
from gnnpar.codecs.uniform import Uniform
from gnnpar.comm import ThreadWorld
from gnnpar.data.dataset import Dataset
from gnnpar.data.links import Link
from gnnpar.models.gat import GAT
from gnnpar.models.gcn import GCN
from gnnpar.models.pairs import pair_scores
from gnnpar.parallel import pairs
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.local import Pass
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Strategy
from gnnpar.partition.shard import Shard
from gnnpar.settings import ConfigError
from gnnpar.training.checks import check_strategy
from gnnpar.training.result.result import fault, read_result
from gnnpar.verify.conformance import Outcome, make_job, merge_ranks, small_graph, train_in_threads
from gnnpar.verify.differences import relative_error

SEED = 3


def example(**fields) -> tuple[Link, Dataset]:
    task = Link(**{"width": 4, "eval_negatives": 5, **fields})
    return task, task.prepare(small_graph(), 0)


def worst(got: Outcome, expected: Outcome) -> float:
    """Largest relative difference of losses, gradients and output rows."""
    errors = [abs(a / b - 1) for a, b in zip(got.losses, expected.losses, strict=True)]
    for mine, theirs in zip(got.gradients, expected.gradients, strict=True):
        errors += [relative_error(mine[name], gradient) for name, gradient in theirs.items()]
    return max(*errors, relative_error(got.logits, expected.logits))


REFUSING = {"cofree", "gnnpipe", "hybrid", "minibatch", "tag"}  # no capability pair_loss


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", sorted({*names("strategy")} - {"single", "adaqp_p", "adaqp_q"} - REFUSING))
def test_ranks_train_as_the_single_device(name: str) -> None:
    strategy: Strategy = configured("strategy", name).exact_limit()
    assert strategy.capabilities.pair_loss
    (task, data), model = example(decoder="mlp"), GCN(hidden=8)
    whole = train_in_threads(Single(), model, data, world=1, task=task)
    assert worst(train_in_threads(strategy, model, data, world=3, task=task), whole) < 1e-9


def test_rounds_of_destinations_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    (task, data), model = example(negatives=3), GAT(hidden=8, heads=2)
    whole = train_in_threads(Single(), model, data, world=1, task=task)
    monkeypatch.setattr(pairs, "LEAST_ROWS", 8)
    for world in (1, 4):
        assert worst(train_in_threads(GraphParallel(), model, data, world=world, task=task), whole) < 1e-9


def test_more_ranks_than_sources() -> None:
    task, data = example(val_fraction=0.49, test_fraction=0.49)
    whole = train_in_threads(Single(), GCN(hidden=8), data, world=1, task=task)
    assert data.pairs is not None
    assert len(data.pairs.train[0].unique()) < 8
    assert worst(train_in_threads(GraphParallel(), GCN(hidden=8), data, world=8, task=task), whole) < 1e-9


@pytest.mark.parametrize("decoder", ["dot", "mlp"])
def test_the_single_device_is_a_plain_loop(decoder: str) -> None:
    task, data = example(decoder=decoder, negatives=2)
    got = train_in_threads(Single(), GCN(hidden=8, dropout=0.0), data, world=1, task=task, epochs=3)
    job = make_job(Single(), GCN(hidden=8, dropout=0.0), data, world=1, task=task)
    (comm,), part_of = ThreadWorld(1).communicators(), torch.zeros(data.num_nodes).long()
    shard = Shard.open(data, part_of, comm).to(torch.device("cpu"), torch.float64)
    model = job.model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert shard.pairs is not None
    assert data.pairs is not None
    source = data.pairs.train[0]
    for epoch in range(3):
        rows = model(WholeGraph(shard, Pass(SEED)), shard.x)
        candidates = shard.pairs.candidates(slice(None), 2, seed=SEED, epoch=epoch)
        scores = torch.stack([pair_scores(model, rows[source], rows[each]) for each in candidates.T], 1)
        labels = torch.tensor([1.0, 0.0, 0.0]).double().expand_as(scores)
        loss = F.binary_cross_entropy_with_logits(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        assert loss.item() == pytest.approx(got.losses[epoch], rel=1e-12)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert relative_error(got.gradients[epoch][name], parameter.grad) < 1e-9
        optimizer.step()
    rows = model(WholeGraph(shard, Pass(SEED)), shard.x)
    assert relative_error(got.logits, rows.detach()) < 1e-9


def test_bytes_of_pairs_are_those_of_the_rows_that_ranks_lack() -> None:
    sent = {}
    for width in (4, 8):
        task, data = example(width=width)
        job = make_job(GraphParallel(codec=Uniform(bits=8)), GCN(hidden=8), data, world=3, task=task)
        sent[width] = [phases["pairs"] for phases in merge_ranks(job, ThreadWorld(3).run(job)).traffic]
        assert data.pairs is not None
        lacking = []
        for epoch in range(2):
            count = 0
            for part in range(3):
                ids = (job.plan.part_of == part).nonzero().flatten()
                own = data.pairs.share(ids, job.plan.part_of.new_zeros(data.num_nodes))
                wanted = own.candidates(slice(None), task.negatives, seed=SEED, epoch=epoch).unique()
                count += int((job.plan.part_of[wanted] != part).sum())
            lacking.append(count)
    differences = [wide - narrow for wide, narrow in zip(sent[8], sent[4], strict=True)]
    assert differences == [2 * 4 * 8 * count for count in lacking], "fp64 rows there and gradients back, not quantized"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Folders of runs on so many ranks."""
    folder = tmp_path_factory.mktemp("link")
    common = ("task=link", "task.eval_negatives=9", "task.hits=5", "precision=fp64", "epochs=3", "eval_every=1")
    for world in (1, 3):
        outcome = train(folder / str(world), "strategy=graph_parallel", f"world_size={world}", *common)
        assert outcome.exit_code == 0, outcome.error
    return lambda world: folder / str(world)


def test_a_run_reports_both_metrics_which_do_not_depend_on_the_ranks(results: Callable[[int], Path]) -> None:
    one, three = (read_result(results(world)) for world in (1, 3))
    assert one is not None
    assert three is not None
    assert not fault(one)
    assert not fault(three)
    metric = three["metric"]
    assert (metric["name"], metric["train"]) == ("mrr", None)
    assert metric["more"].keys() == {"mrr", "hits@5"}
    assert metric["val"] == metric["more"]["mrr"]["val"] is not None
    assert metric["more"] == {name: pytest.approx(values, rel=1e-9) for name, values in one["metric"]["more"].items()}
    assert three["loss"]["last"] == pytest.approx(one["loss"]["last"], rel=1e-9)
    assert one["hashes"]["split"] == three["hashes"]["split"]
    assert three["bytes_per_epoch"]["pairs"] > 0
    assert "pairs" not in one["bytes_per_epoch"]


def test_a_trained_model_gives_rows_and_goes_on_with_its_task_alone(results, run_here: Run, tmp_path: Path) -> None:
    folder = results(3)
    settings = settings_of(*SMALL, "task=link", "task.eval_negatives=9", "task.hits=5", "precision=fp64")
    data = settings.load_dataset()
    rows = gnnpar.load(folder, which="last")(data.x.double(), data.edge_index, prepared=True).detach()
    done = run_here("predict", str(folder), "--which=last", "world_size=2", "comm=threads", "--out", "rows.npy")
    assert (done.returncode, done.stderr) == (0, "")
    assert relative_error(torch.from_numpy(np.load(tmp_path / "rows.npy")), rows) < 1e-9
    result = read_result(folder)
    assert result is not None
    assert f"mrr val {result['metric']['val']:.4f}, test {result['metric']['test']:.4f}" in done.stdout
    pairs = torch.randint(0, len(rows), (37, 2), generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "pairs.npy", pairs.numpy())
    asked = ("predict", str(folder), "--which=last", "world_size=3", "comm=threads", "--pairs", "pairs.npy")
    done = run_here(*asked, "--out", "scores.npy")
    assert (done.returncode, done.stderr) == (0, "")
    expected = (rows[pairs[:, 0]] * rows[pairs[:, 1]]).sum(1)
    assert relative_error(torch.from_numpy(np.load(tmp_path / "scores.npy")), expected) < 1e-9
    np.save(tmp_path / "pairs.npy", pairs.numpy() * 1000)
    assert re.search(r"pairs.npy names node \d+ of 200: give ids from 0", run_here(*asked).stderr)
    np.save(tmp_path / "pairs.npy", pairs.numpy()[:, :1])
    assert "is int64 [37, 1]; give node ids [pairs, 2], integers" in run_here(*asked).stderr
    refused = run_here("predict", str(folder), "dataset=sbm")
    assert "with rows from its own training edges; leave it out" in refused.stderr
    outcome = train(tmp_path / "on", f"resume={folder}", "task=link", "task.negatives=2", "task.eval_negatives=9")
    assert "is of a task with hits=5, this run's has hits=20: set task.hits as it was" in (outcome.error or "")


@pytest.mark.parametrize("name", sorted(REFUSING))
def test_strategies_without_all_output_rows_say_so(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^strategy={name} never has the output rows of all nodes .*; choose single"):
        check_strategy(settings_of(f"strategy={name}", "task=link"), 2)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("task.hits=0",), r"task.hits=0 must be a whole number >= 1"),
        (("task.val_fraction=1.0",), r"task.val_fraction=1.0 must be a number >= 0 and < 1"),
        (("task.val_fraction=0.6", "task.test_fraction=0.4"), "leave no training edges; lower one"),
        (("task.decoder=tensor",), r"task.decoder=tensor must be one of dot, mlp"),
    ],
)
def test_settings_out_of_range_are_one_line(overrides: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        settings_of("task=link", *overrides)
