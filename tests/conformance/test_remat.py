"""A chunk computed again instead of kept: less memory, as planned. The same bits: methods.py."""

import pytest
import torch

from engines import on_ranks
from gnnpar.models.gcn import GCN
from gnnpar.parallel.pipeline.stage import Remat
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.training.memory import measure_epoch
from gnnpar.verify.conformance import make_job, small_graph


def measured(remat: Remat, *, layers: int, chunks: int, hidden: int, nodes: int) -> tuple[int, int]:
    """Bytes in the second epoch of one rank in fp32: the allocator's peak, and those kept for the backward."""
    data = small_graph(num_nodes=nodes, num_edges=2 * nodes)
    config = GCN(num_layers=layers, hidden=hidden, encoder="linear", decoder="linear", dropout=0.0)
    job = make_job(GNNPipe(chunks=chunks, chunking="range", remat=remat), config, data, world=1, dtype=torch.float32)
    (rank,) = on_ranks(job, lambda rank: rank)
    rank.train(1)
    rank.optimizer.zero_grad()
    with measure_epoch(torch.device("cpu")) as report:
        rank.engine.train_epoch(1, rank.optimizer)
    assert report.peak is not None
    return report.peak, report.activations + rank.engine.live_bytes()["activations"]


def test_bytes_fall_as_planned() -> None:
    """GCN keeps 2 N H numbers a layer (the matrix's input, the activation's output), and the encoder's output; `chunk`
    those of one of 8."""
    layers, nodes, hidden, chunks = 8, 1600, 32, 8
    rows = 4 * nodes * hidden
    sizes = {"layers": layers, "chunks": chunks, "hidden": hidden, "nodes": nodes}
    found = {remat: measured(remat, **sizes) for remat in ("none", "chunk", "layer")}
    kept = {r: nbytes for r, (_, nbytes) in found.items()}
    assert kept["none"] == pytest.approx((2 * layers + 1) * rows, rel=0.1)
    assert kept["chunk"] == pytest.approx((2 * layers + 1) * rows / chunks, rel=0.1)
    assert kept["layer"] == pytest.approx((layers - 1) * rows + 3 * rows / chunks, rel=0.1)
    for remat in ("chunk", "layer"):
        saved = found["none"][0] - found[remat][0]
        assert saved == pytest.approx(kept["none"] - kept[remat], rel=0.1), "the allocator saw it, too"
