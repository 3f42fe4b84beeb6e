"""Bytes sent equal the closed formula: sum over layers of b x halo rows x (width forward + width backward)."""

from itertools import product

import pytest
import torch

from composing import configured
from gnnpar.codecs.codec import BFloat16, Drop, Identity
from gnnpar.comm import ThreadWorld
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.partition.partition import Random
from gnnpar.verify.conformance import make_job, merge_ranks, small_graph, train_in_threads
from graphs import ODD

F, HIDDEN, CLASSES, HEADS = 6, 8, 3, 2

# model -> [(width forward, width backward) of every layer]; backward is 0 where the input needs no gradient
WIDTHS = {
    ("gcn", "aggregate_first"): [(F, 0), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN)],
    ("gcn", "transform_first"): [(HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (CLASSES, CLASSES)],
    ("gcn", "auto"): [(F, 0), (HIDDEN, HIDDEN), (CLASSES, CLASSES)],
    ("sage", "auto"): [(F, 0), (HIDDEN, HIDDEN), (CLASSES, CLASSES)],
    ("sage_max", "auto"): [(F, 0), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN)],
    ("rgcn", "auto"): [(F, 0), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN)],
    ("gin", "auto"): [(F, 0), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN)],
    ("gat", "auto"): [(HIDDEN + HEADS, HIDDEN + HEADS)] * 2 + [(CLASSES + 1, CLASSES + 1)],
    ("gatv2", "auto"): [(HIDDEN, HIDDEN)] * 2 + [(CLASSES, CLASSES)],
    ("gcnii", "auto"): [(HIDDEN, HIDDEN)] * 3,  # an encoder: rows of layer 0 need a gradient
    ("resgcn", "auto"): [(HIDDEN, HIDDEN)] * 3,
}


def config_of(model, order):
    heads = [f"model.heads={HEADS}"] if model in ("gat", "gatv2") else []
    return configured("model", model, f"model.hidden={HIDDEN}", "model.num_layers=3", f"model.order={order}", *heads)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("key", "codec", "dtype"),
    product(WIDTHS, [Identity(), BFloat16(), Drop()], [torch.float32, torch.float64]),
)
def test_halo_bytes_equal_the_formula(key, codec, dtype):
    job = make_job(GraphParallel(codec=codec), config_of(*key), small_graph(), world=3, dtype=dtype)
    rows = sum(job.plan.statistics["halo_rows"])
    b = {Identity: dtype.itemsize, BFloat16: 2, Drop: 0}[type(codec)]
    for traffic in merge_ranks(job, ThreadWorld(3).run(job)).traffic:
        assert traffic.get("forward", 0) == b * rows * sum(f for f, _ in WIDTHS[key])
        assert traffic.get("backward", 0) == b * rows * sum(w for _, w in WIDTHS[key])


def test_reduce_bytes_are_the_parameters_and_the_loss():
    job = make_job(GraphParallel(), config_of("gcn", "auto"), small_graph(), world=3)
    numbers = sum(p.numel() for p in job.model.parameters()) + 1
    got = train_in_threads(GraphParallel(), config_of("gcn", "auto"), small_graph(), world=3)
    assert got.traffic[0]["reduce"] == 2 * (3 - 1) * numbers * 8


def test_a_partition_without_cut_edges_sends_nothing():
    got = train_in_threads(GraphParallel(), config_of("gcn", "auto"), ODD["no_edges"](), world=3, partition=Random())
    assert got.traffic[0].keys() == {"reduce"}
