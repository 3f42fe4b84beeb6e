"""Codecs of the rows that parts of a stage send each other: graph parallelism's numbers, whatever the stages."""

import dataclasses
from typing import Any

import pytest
import torch

from composing import configured
from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import BFloat16, Drop, Identity
from gnnpar.codecs.uniform import Random, Uniform
from gnnpar.config.compose import compose
from gnnpar.models.gat import GAT
from gnnpar.models.gcnii import GCNII
from gnnpar.models.resgcn import ResGCN
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.partition.partition import Range
from gnnpar.training.checks import check_strategy
from gnnpar.verify.conformance import make_job, merge_ranks, relative_error, small_graph, train_in_threads
from gnnpar_kernels.wire import row_nbytes
from outcomes import assert_close, assert_same_bits
from worlds import run_world

DEEP: dict[str, Any] = {"hidden": 8, "num_layers": 4, "encoder": "linear", "decoder": "linear"}
LOSSY = (Uniform(bits=8), Uniform(bits=4, gradient_bits=8), Uniform(bits=2), Random(period=1), BFloat16(), Drop())


@pytest.mark.parametrize(
    ("codec", "config"),
    [*((codec, GCNII(**DEEP, dropout=0.4)) for codec in LOSSY), (LOSSY[1], GAT(hidden=16, num_layers=3, heads=2))],
    ids=lambda each: f"{type(each).__name__}{getattr(each, 'bits', '')}",
)
def test_one_stage_and_one_chunk_is_graph_parallelism(codec, config):
    """Rows and gradients are rounded to the same numbers, by node and not by where a message has them."""
    data = small_graph()
    ours = train_in_threads(Hybrid(stages=1, parts=3, chunks="one", codec=codec), config, data, world=3)
    theirs = train_in_threads(GraphParallel(codec=codec), config, data, world=3)
    assert_close(ours, theirs.losses, theirs.gradients)
    for mine, others in zip(ours.traffic, theirs.traffic, strict=True):
        assert mine.get("forward", 0) == others.get("forward", 0)
        assert mine.get("backward", 0) == others.get("backward", 0)


@pytest.mark.parametrize(
    ("codec", "rules"),
    [
        (Random(period=2), {"virtual": 2, "remat": "layer"}),
        *(
            pytest.param(codec, rules, marks=pytest.mark.slow)
            for codec, rules in (
                (Random(period=2), {}),
                (Random(period=2), {"remat": "chunk"}),
                (Uniform(bits=4), {"remat": "chunk"}),
                (Uniform(bits=4), {"virtual": 2, "remat": "layer"}),
            )
        ),
    ],
    ids=str,
)
def test_stages_and_remat_do_not_change_a_bit(codec, rules):
    data, config = small_graph(), ResGCN(**DEEP, norm="layer", dropout=0.4)
    given: dict[str, Any] = {"parts": 2, "chunks": 8, "refresh": 2}
    cases: list[dict[str, Any]] = [{"stages": 1}, {"stages": 1, "codec": codec}, {"stages": 2, "codec": codec, **rules}]
    exact, one, two = (
        train_in_threads(Hybrid(**given, **more), config, data, world=2 * more["stages"], epochs=3) for more in cases
    )
    assert_same_bits(two, one)
    assert one.losses[0] != exact.losses[0]
    assert relative_error(one.logits, exact.logits) > 1e-6


@pytest.mark.parametrize(("bits", "gradient_bits"), [(8, 8), (4, 4), (2, 8), ("bf16", "bf16")])
def test_bytes_are_the_formula(bits, gradient_bits):
    """Every row once a layer and direction, L N alpha of them, in the bytes of a packed row and its metadata."""
    from gnnpar.codecs.uniform import code_of

    data = small_graph(num_nodes=80)
    codec = Uniform(bits=bits, gradient_bits=gradient_bits)
    strategy = Hybrid(stages=2, parts=2, chunks=8, codec=codec)
    config = ResGCN(hidden=32, num_layers=4, encoder="linear", decoder="linear")
    job = make_job(strategy, config, data, world=4, partition=Range(), dtype=torch.float32)
    rows = DEEP["num_layers"] * round(data.num_nodes * job.plan.statistics["alpha"])
    for sent in merge_ranks(job, run_world("threads", 4, job)).traffic:
        assert sent["forward"] == rows * row_nbytes(32, code_of(bits))
        assert sent["backward"] == rows * row_nbytes(32, code_of(gradient_bits))


def test_dropped_rows_are_not_sent_and_evaluation_stays_exact():
    data, config = small_graph(), ResGCN(**DEEP)
    strategy = Hybrid(stages=2, parts=2, chunks=8, codec=Drop())
    got = train_in_threads(strategy, config, data, world=4)
    assert all("forward" not in sent and "backward" not in sent for sent in got.traffic)
    untrained, exact = (
        train_in_threads(dataclasses.replace(strategy, codec=c), config, data, world=4, epochs=0).logits
        for c in (Drop(), Identity())
    )
    assert torch.equal(untrained, exact)


def test_what_it_says_and_refuses():
    hybrid = configured("strategy", "hybrid", "strategy.parts=2", "codec=uniform", "codec.bits=4")
    assert hybrid.codec == Uniform(bits=4)
    assert hybrid.exactness == {"stale", "quantized"}
    assert hybrid.exact_limit().exactness == {"exact"}
    with pytest.raises(ValueError, match=r"^codec=adaptive chooses bits .* use codec=uniform") as refused:
        Hybrid(codec=Adaptive())
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"^codec=drop is for rows between the parts .*strategy\.parts=1"):
        GNNPipe(codec=Drop()).check(2, 4, 2)


def test_codec_is_never_ignored():
    """One part has no halo rows: a codec for them is refused before a rank starts. What is printed names both."""
    with pytest.raises(ValueError, match=r"^codec=bfloat16 is for rows between the parts .*strategy=hybrid"):
        check_strategy(compose(["strategy=gnnpipe", "codec=bf16"]), 2)
    check_strategy(compose(["strategy=gnnpipe", "codec=identity"]), 2)
    assert configured("strategy", "gnnpipe", "strategy.parts=2", "codec=bf16").codec == BFloat16()
    config, data = GCNII(**DEEP), small_graph()
    hybrid = Hybrid(stages=2, parts=2, codec=BFloat16(), boundary=Uniform(bits=8))
    layers = hybrid.describe(make_job(hybrid, config, data, world=4).plan)
    assert len(layers) == config.num_layers
    assert {layer.how for layer in layers} == {"chunks, boundary uniform, halo bfloat16"}
    pipeline = GNNPipe(boundary=BFloat16())
    alone = pipeline.describe(make_job(pipeline, config, data, world=2).plan)
    assert {layer.how for layer in alone} == {"chunks, boundary bfloat16"}
