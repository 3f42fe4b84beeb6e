"""Every strategy YAML in its exact limit x every model YAML x worlds 1 to 4 equals the single device (fp64).

A fourth rank is a stage more, and one peer more of the same kind: of flat strategies the long suite has it, and two
ranks, which golden losses have as well.

Ranks are threads; dropout is on, so the keyed masks are compared too.
"""

import dataclasses

import pytest
import torch

from composing import ALIKE, PRESETS, REFUSED, configured, names, rest_slow
from gnnpar.codecs.codec import BFloat16, Drop
from gnnpar.models.gcn import GCN
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.oracle import WithOracle, WithOracleEngine
from gnnpar.parallel.single.strategy import Single
from gnnpar.verify.conformance import check, make_job, merge_ranks, relative_error, small_graph, train_in_threads
from gnnpar.verify.differences import rounding
from outcomes import assert_passed
from worlds import Several, run_world

MODELS = names("model")
SMALL = ("model.hidden=8", "model.num_layers=3")
STAGED = ("gnnpipe", "hybrid", "tag")


def model_of(name: str, *overrides: str):
    return configured("model", name, *SMALL, *overrides)


def strategies_worlds_and_models():
    """By default: every model on the single device and on halos, and under the engines and views that differ most one
    of each fold, on three ranks, or four stages. A policy of when rows travel meets all folds in the same code: a sum,
    attention and one more fold in turn. Other worlds with a GCN, as ranks do not know which model runs."""
    folds = [m for m in MODELS if m not in {*ALIKE, "gcn", "gat"}]
    for i, strategy in enumerate(names("strategy")):
        alone = strategy == "single"
        quick, rest = ((1,), ()) if alone else ((4,), (1, 2, 3)) if strategy in STAGED else ((3,), (1, 2, 4))
        engine = strategy in ("sar", "gnnpipe", "minibatch", "cagnet", "feature")
        for model in (m for m in MODELS if (strategy, m) not in REFUSED):
            usual = strategy in ("single", "graph_parallel") or model in ("gcn", "gat", folds[i % len(folds)])
            usual |= engine and (model in (*folds, "gcnii", "hgt"))
            usual &= strategy not in PRESETS
            given = {quick: usual, rest: usual and model == "gcn"} if rest else {quick: usual}
            for worlds, by_default in given.items():
                marks = () if by_default else pytest.mark.slow
                yield pytest.param(strategy, worlds, model, marks=marks, id=f"{strategy}-{model}-{worlds}")


@pytest.mark.quick(22)
@pytest.mark.parametrize(("strategy", "worlds", "model"), strategies_worlds_and_models())
def test_exact_limit_equals_the_single_device_and_the_configured_strategy_its_oracle(strategy, worlds, model):
    config = configured("strategy", strategy)
    stages = ("model.num_layers=4",) if strategy in STAGED else ()
    cases = check(config, {model: model_of(model, *stages)}, worlds=worlds)
    has_oracle = config.exactness != {"exact"} and isinstance(config, WithOracle | WithOracleEngine)
    assert cases and ("its oracle" in {case.reference for case in cases}) == has_oracle
    assert_passed(cases)


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", rest_slow(MODELS, *ALIKE))
def test_every_overlap_has_the_bits_of_overlap_edges(model):
    config, data = model_of(model), small_graph()
    none, edges, central = (
        train_in_threads(GraphParallel(overlap=overlap), config, data, world=3)
        for overlap in ("none", "edges", "central_marginal")
    )
    assert torch.equal(edges.logits, none.logits), "the same folds in the same order"
    for other in (none, central):
        for mine, theirs in zip(other.gradients, edges.gradients, strict=True):
            assert max(relative_error(mine[k], g) for k, g in theirs.items()) < 1e-12


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", ["gat", "gatv2"])
def test_attention_dropout_changes_gradients(model):
    config = model_of(model, "model.attention_dropout=0.4")
    without = train_in_threads(Single(), model_of(model), small_graph(), world=1)
    masked = train_in_threads(Single(), config, small_graph(), world=1)
    assert relative_error(masked.gradients[0]["layers.0.conv.bias"], without.gradients[0]["layers.0.conv.bias"]) > 1e-3


def test_gloo_processes_equal_the_single_device():
    data = small_graph()
    jobs = [make_job(GraphParallel(), model_of(model), data, world=2) for model in MODELS]
    ranks = run_world("gloo", 2, Several(tuple(jobs)))
    for i, (model, job) in enumerate(zip(MODELS, jobs, strict=True)):
        reference = train_in_threads(Single(), model_of(model), data, world=1)
        got = merge_ranks(job, [results[i] for results in ranks])
        assert got.losses == pytest.approx(reference.losses, rel=1e-12), model
        for mine, theirs in zip(got.gradients, reference.gradients, strict=True):
            least = rounding(theirs.values(), data.num_nodes)  # hgt's bias of keys: a gradient of rounding alone
            assert max(relative_error(mine[k], g, least=least) for k, g in theirs.items()) < 1e-9, model
        assert relative_error(got.logits, reference.logits) < 1e-9, model


def test_inexact_codecs_differ():
    """The suite can fail: bf16 is off by its rounding, drop by far more."""
    config, data = GCN(hidden=8), small_graph()
    exact = train_in_threads(Single(), config, data, world=1)
    errors = {}
    for codec in (BFloat16(), Drop()):
        got = train_in_threads(GraphParallel(codec=codec), config, data, world=2)
        errors[type(codec)] = relative_error(
            got.gradients[0]["layers.0.conv.weight"], exact.gradients[0]["layers.0.conv.weight"]
        )
    assert 1e-5 < errors[BFloat16] < 2e-2
    assert errors[Drop] > 5e-2


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_the_suite_notices_a_strategy_that_is_wrong(broken, monkeypatch):
    from gnnpar.parallel.engine import FlatEngine

    true = FlatEngine.train_epoch

    def wrong(self, epoch, optimizer, *, keep_gradient=False):
        report = true(self, epoch, optimizer, keep_gradient=keep_gradient)
        if self._comm.size == 1:
            return report
        if broken == "loss":
            return dataclasses.replace(report, loss=report.loss * (1 + 1e-7))
        return dataclasses.replace(report, gradient={k: g * (1 + 1e-7) for k, g in (report.gradient or {}).items()})

    monkeypatch.setattr(FlatEngine, "train_epoch", wrong)
    assert not any(c.passed for c in check(GraphParallel(), {"gcn": GCN(hidden=8)}, worlds=(2,)))
