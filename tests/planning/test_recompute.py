"""What recomputing would save: by hand for weights, halos and residuals."""

from __future__ import annotations

import pytest
import torch

from composing import configured
from gnnpar.planning.candidate import Candidate
from gnnpar.planning.closed import Setting
from gnnpar.planning.extract import record
from gnnpar.planning.ir import ModelIR
from gnnpar.planning.rates import derived
from gnnpar.planning.recompute import Beyond, savings
from gnnpar.planning.statistics import GraphStats, PartStats
from gnnpar.planning.topology import one_host
from gnnpar.planning.work import Work


def asked(ir: ModelIR, parts: int, *, nodes: int, rate: float, ranks: int | None = None) -> tuple[Work, Setting]:
    graph = GraphStats(nodes, 10 * nodes, ir.in_dim, ir.final, nodes // 2)
    rates = (derived(14e12, 900e9),) * (ranks or parts)
    fabric = one_host(ranks or parts, cores=8, memory_bytes=1e12, rate=rate, latency=0.0)
    stats = PartStats.even(nodes, 10 * nodes, parts, alpha=0.5, cut_share=0.2)
    return Work(ir, graph, stats, rates[:parts]), Setting(fabric, rates)


def model(name: str, *overrides: str, features: int = 64) -> ModelIR:
    return record(configured("model", name, *overrides).build(features, 8, seed=0), features)


def test_first_layers_halos_pay_on_slow_links_and_save_their_bytes() -> None:
    """A product on halo rows costs less than sending them and their gradients over a slow link."""
    ir = model("gcn", "model.num_layers=2", "model.hidden=32", "model.order=transform_first")
    candidate = Candidate(family="graph_parallel", parts=2)
    slow, fast = (
        {s.what: s for s in savings(candidate, *asked(ir, 2, nodes=50_000, rate=rate))} for rate in (1e7, 1e15)
    )
    assert (slow["halo rows"].fired, slow["halo rows"].possible) == (2, 2)
    sent = 0.5 * 50_000 * 32 * 4 * 2  # alpha N rows of 32 numbers, forward and backward
    assert slow["halo rows"].nbytes == pytest.approx(sent)
    assert slow["halo rows"].seconds == pytest.approx(sent / 2 / 1e7, rel=0.01)  # both directions of both ports at once
    assert fast["halo rows"].fired == 0
    assert slow["weight gradients from factors"].fired == 0  # specs/tag.md 5.3: never with as many rows


def test_factors_pay_for_few_rows_and_wide_layers() -> None:
    ir = model("gcn", "model.num_layers=2", "model.hidden=512", features=4096)
    told = savings(Candidate(family="graph_parallel", parts=2), *asked(ir, 2, nodes=64, rate=1e8))
    factors = next(s for s in told if s.what.startswith("weight"))
    assert factors.fired == 1  # 4096 x 512; the last layer is narrow
    assert factors.nbytes == pytest.approx(2 * 4096 * 512 * 4 - 2 * 32 * (4096 + 512) * 4)


def test_residuals_pay_in_deep_pipelines() -> None:
    ir = model("gcnii", "model.num_layers=8", "model.hidden=64", "model.encoder=linear", "model.decoder=linear")
    candidate = Candidate(family="gnnpipe", stages=4, cuts=(0, 2, 4, 6))
    work, setting = asked(ir, 1, nodes=50_000, rate=1e7, ranks=4)
    told = {s.what: s for s in savings(candidate, work, setting)}
    assert (told["first residuals"].fired, told["first residuals"].possible) == (3, 3)
    sums = 2 * 4 * sum(g.params for g in ir.layer(0) if g.phase == "begin")
    assert told["first residuals"].nbytes == pytest.approx(3 * (2 * 4 * 64 * 50_000 - sums))
    assert "3 of 3, " in str(told["first residuals"])


def test_two_hops_are_counted() -> None:
    """0 <- 1 <- 2 <- 3 in parts {0, 1} and {2, 3}: the halo of part 0 is 2, which reads 3."""
    edges = torch.tensor([[1, 2, 3, 2], [0, 1, 2, 2]])
    found = Beyond.of(edges, torch.tensor([0, 0, 1, 1]), 2)
    assert found == Beyond((1.0, 0.0), (2.0, 0.0))
