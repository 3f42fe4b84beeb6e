"""Codecs of the rows that parts of a stage send each other: graph parallelism's numbers, whatever the stages."""

import pytest

from composing import configured
from conformance.methods import DEEP
from gnnpar.codecs.codec import BFloat16, Drop
from gnnpar.codecs.uniform import Random, Uniform
from gnnpar.config.compose import compose
from gnnpar.models.gat import GAT
from gnnpar.models.gcnii import GCNII
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.training.checks import check_strategy
from gnnpar.verify.conformance import make_job, small_graph, train_in_threads
from outcomes import assert_close

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


def test_what_it_says_and_refuses():
    hybrid = configured("strategy", "hybrid", "strategy.parts=2", "codec=uniform", "codec.bits=4")
    assert hybrid.codec == Uniform(bits=4)
    assert hybrid.exactness == {"stale", "quantized"}
    assert hybrid.exact_limit().exactness == {"exact"}
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
