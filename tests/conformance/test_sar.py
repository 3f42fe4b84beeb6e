"""SAR equals the single device whatever its rounds, and graph_parallel to the bit where no peer's block is cut."""

import pytest
import torch

from composing import configured, covering, in_turn, rest_slow
from gnnpar.codecs.codec import BFloat16, Drop
from gnnpar.comm import CodedExchange, ThreadWorld
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.verify.conformance import (
    check,
    make_job,
    merge_ranks,
    relative_error,
    small_graph,
    train_in_threads,
)
from graphs import ODD
from outcomes import assert_equal, assert_passed, assert_same_bits
from worlds import Several, run_world

SMALL = ("model.hidden=8", "model.num_layers=2")
MODELS = {
    "gcn": ("gcn",),
    "gat": ("gat", "model.heads=2", "model.attention_dropout=0.4"),
    "gatv2": ("gatv2", "model.heads=2", "model.attention_dropout=0.4"),
    "sage_max": ("sage_max",),
}
TINY = 400 / 2**20  # MiB; rows here have 24 to 176 bytes: pieces of a few rows
WAYS = [("push", "gat"), *(("pull", model) for model in MODELS)]  # only attention has something to push


def model_of(name, *overrides):
    return configured("model", MODELS[name][0], *SMALL, *MODELS[name][1:], *overrides)


@pytest.fixture(scope="module")
def references():
    """The single device, once per model."""
    return {name: train_in_threads(Single(), model_of(name), small_graph(), world=1, epochs=1) for name in MODELS}


@pytest.mark.parametrize(("way", "rounds", "prefetch"), covering(WAYS, ["peer", "one", "part", TINY], range(4)))
def test_every_schedule_equals_the_single_device(way, rounds, prefetch, references):
    backward, model = way
    strategy = SAR(rounds=rounds, prefetch=prefetch, backward=backward)
    assert_equal(train_in_threads(strategy, model_of(model), small_graph(), world=4, epochs=1), references[model])


def test_the_tiny_budget_cuts_peers(monkeypatch):
    """What the test above means by it: blocks are cut, forward and pushed."""
    seen = set()
    true = CodedExchange.take

    def watching(self, posted, peer):
        seen.add((posted.site.phase, posted.incoming[peer].first > 0))
        return true(self, posted, peer)

    monkeypatch.setattr(CodedExchange, "take", watching)
    train_in_threads(SAR(rounds=TINY), model_of("gat"), small_graph(), world=4, epochs=1)
    assert {("forward", True), ("push", True)} <= seen


@pytest.mark.parametrize("model", rest_slow(MODELS, "gatv2"))
@pytest.mark.parametrize("rounds", ["peer", "one", "part"])
def test_pulling_has_the_bits_of_graph_parallel(rounds, model):
    config, data = model_of(model), small_graph()
    expected = train_in_threads(GraphParallel(), config, data, world=4)
    for prefetch in (0, 2):
        strategy = SAR(rounds=rounds, prefetch=prefetch, backward="pull")
        assert_same_bits(train_in_threads(strategy, config, data, world=4), expected)
    kept = train_in_threads(SAR(rounds=rounds, backward="pull", remat=False), config, data, world=4)
    assert_same_bits(kept, expected)


@pytest.mark.parametrize("codec", [BFloat16(), Drop()], ids=["bf16", "drop"])
@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_a_codec_means_what_it_means_to_graph_parallel(model, codec):
    """Pulled: the same bits. Pushed: gradients are rounded elsewhere, by as much; drop sends nothing at all."""
    config, data = model_of(model), small_graph()
    expected = train_in_threads(GraphParallel(codec=codec), config, data, world=4)
    assert_same_bits(train_in_threads(SAR(codec=codec, backward="pull"), config, data, world=4), expected)
    pushed = train_in_threads(SAR(codec=codec), config, data, world=4)
    assert pushed.losses[0] == expected.losses[0]
    if isinstance(codec, Drop):
        assert pushed.traffic[1].keys() == {"reduce"}
        assert_equal(pushed, expected)
    exact = train_in_threads(Single(), config, data, world=1)
    name = "layers.0.conv.weight"
    error = relative_error(pushed.gradients[0][name], exact.gradients[0][name])
    theirs = relative_error(expected.gradients[0][name], exact.gradients[0][name])
    assert theirs / 3 < error < 3 * theirs


@pytest.mark.parametrize(("graph", "backward"), in_turn(ODD, ["push", "pull"]))
def test_odd_graphs(graph, backward):
    data, config = ODD[graph](), model_of("gat")
    reference = train_in_threads(Single(), config, data, world=1)
    for world in (w for w in (2, 3) if w <= data.num_nodes):
        got = train_in_threads(SAR(backward=backward), config, data, world=world)
        assert got.losses == pytest.approx(reference.losses, rel=1e-9, abs=1e-12)
        for mine, theirs in zip(got.gradients, reference.gradients, strict=True):
            for key, expected in theirs.items():
                torch.testing.assert_close(mine[key], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_a_cached_first_layer_is_exact_and_sends_no_constant_rows_again(model):
    config = model_of(model, *(["model.order=aggregate_first"] if model == "gcn" else []))
    assert_passed(check(SAR(), {model: config}, worlds=(1, 3), first_layer="cached"))
    got = train_in_threads(SAR(), config, small_graph(), world=3, epochs=2, first_layer="cached")
    live = train_in_threads(SAR(), config, small_graph(), world=3, epochs=2)
    assert got.traffic[0] == live.traffic[0]
    sent, sent_live = got.traffic[1]["forward"], live.traffic[1]["forward"]
    dropout = model == "gat" or config.input_dropout > 0
    assert sent == sent_live if dropout else sent < sent_live


def test_gloo_processes_equal_threads():
    """Real messages in real order, deeper prefetch than rounds included."""
    ways = [SAR(rounds=TINY, prefetch=2), SAR(rounds=TINY, backward="pull"), SAR(backward="pull", prefetch=5)]
    jobs = [make_job(way, model_of("gat"), small_graph(), world=3) for way in ways]
    jobs.append(make_job(SAR(prefetch=0), model_of("gcn"), small_graph(), world=3))
    ranks = run_world("gloo", 3, Several(tuple(jobs)))
    for i, job in enumerate(jobs):
        got, expected = merge_ranks(job, [results[i] for results in ranks]), merge_ranks(job, ThreadWorld(3).run(job))
        assert_equal(got, expected, tolerance=1e-12)
        for mine, theirs in zip(got.traffic, expected.traffic, strict=True):
            mine.pop("evaluate", None)  # the job before predicted on the same communicators
            assert mine == theirs
