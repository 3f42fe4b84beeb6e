"""Batch normalisation over all ranks: nn.BatchNorm1d on one device, in fp64, running statistics included."""

import pytest
import torch

from checkpoints import last, train
from composing import configured
from conformance.test_exact import NORMED
from engines import on_ranks
from gnnpar.models.pyg.model import PyG
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.single.strategy import Single
from gnnpar.planner.extract import record
from gnnpar.training.result.trained import load
from gnnpar.verify.conformance import check, make_job, small_graph, train_in_threads

DATA = small_graph()
RESIDUAL = configured("model", "resgcn", "model.hidden=8", "model.num_layers=2", "model.norm=batch")


def torchs_own(norm, moments_of, x):
    return norm.train(moments_of(x) is not None)(x)


@pytest.fixture(scope="module")
def reference():
    """What torch's own module gives, on one device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gnnpar.models.norm.batch_norm", torchs_own)
        return {config: train_in_threads(Single(), config, DATA, world=1, epochs=3) for config in (NORMED, RESIDUAL)}


@pytest.mark.parametrize("config", [NORMED, RESIDUAL], ids=["post", "pre"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_is_torchs_module_on_one_device(reference, config, world):
    wanted, got = reference[config], train_in_threads(GraphParallel(), config, DATA, world=world, epochs=3)
    assert got.losses == pytest.approx(wanted.losses, rel=1e-9)
    for mine, theirs in zip(got.gradients, wanted.gradients, strict=True):
        scale = max(float(g.abs().max()) for g in theirs.values())
        for name, gradient in theirs.items():
            assert torch.allclose(mine[name], gradient, rtol=0, atol=1e-9 * scale), name
    assert torch.allclose(got.logits, wanted.logits, rtol=1e-9, atol=1e-9)  # of running statistics


def test_bytes_are_two_sums_forwards_and_two_backwards():
    plain = train_in_threads(GraphParallel(), configured("model", "sage", "model.hidden=8"), DATA, world=3, epochs=1)
    normed = configured("model", "sage", "model.hidden=8", "model.norm=batch")
    got = train_in_threads(GraphParallel(), normed, DATA, world=3, epochs=1)
    ring, affine = 2 * (3 - 1) * 8, 2 * 8  # bytes of a number; weight and bias
    assert got.traffic[0]["reduce"] - plain.traffic[0]["reduce"] == ring * (4 * 8 + affine)
    ir = record(normed.build(6, 3, seed=0), 6)
    assert (ir.moments, ir.summed_moments) == ((8,), 32)


def test_a_probe_and_an_evaluation_leave_the_running_statistics():
    job = make_job(GraphParallel(), NORMED, DATA, world=2)

    def look(rank):
        engine, ledger = rank.engine, rank.engine._comm.ledger
        rank.train(1)
        before = {name: tensor.clone() for name, tensor in engine.named_weights()}
        ledger.drain()
        engine.exact_gradient(1)
        engine.predict()
        counted = ledger.drain().bytes
        return before, dict(engine.named_weights()), counted

    for before, after, counted in on_ranks(job, look):
        assert "layers.0.norm.running_mean" in before and "reduce" not in counted
        assert before["layers.1.norm.running_var"].ne(1).all() and before["layers.1.norm.num_batches_tracked"] == 1
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_running_statistics_are_part_of_a_trained_model(tmp_path):
    assert train(tmp_path, "strategy=graph_parallel", "model.norm=batch", "epochs=2").exit_code == 0
    found, (saved, _) = load(tmp_path), last(tmp_path).merged(torch.device("cpu"))
    mean = found.model.state_dict()["layers.0.norm.running_mean"]
    assert torch.equal(mean, saved["layers.0.norm.running_mean"]) and mean.any()


def test_norms_of_rows_of_edges_mix_rows():
    """On one device it trains as in PyG (test_met_by_users.py)."""
    (case,) = check(GraphParallel(), {"pyg": PyG(target="pyg_nets.normed_messages")}, worlds=(1, 2))
    assert case.error is not None and case.error.startswith("net.convs.0 mixes rows")
