"""Every tile that tuning may choose gives what the specification does; without a table, training takes the first."""

import pytest
import torch

from gnnpar_kernels import triton_tasks
from gnnpar_kernels.attend.triton import _fold
from gnnpar_kernels.attend.triton_grad import _pull
from gnnpar_kernels.attend_v2.triton import _fold as fold_v2
from gnnpar_kernels.attend_v2.triton import _pull as pull_v2
from gnnpar_kernels.dispatch import functions_of
from gnnpar_kernels.triton_tuning import Tuned, interpreting
from interpreter import patch_once_a_launch

pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels are compiled here: the table has one tile")
MOST = max(len(each.candidates) for each in (_fold, _pull, fold_v2, pull_v2))
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=range(1, MOST))
def later_tile(request, monkeypatch):
    """The one after the first, and so on; the last where a kernel has fewer."""
    launched = set()

    def choose(self, given, launch):
        chosen = self.candidates[min(request.param, len(self.candidates) - 1)]
        launched.add((self.name, str(chosen)))
        return chosen

    monkeypatch.setattr(Tuned, "choose", choose)
    monkeypatch.setattr(triton_tasks, "SPLIT", 40)
    patch_once_a_launch()
    return launched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_its_gradients(kit, later_tile, dtype):
    graph = kit.degree_graph()
    x, grad = (torch.randn(n, 4, 64).to(dtype) for n in (graph.num_src, graph.num_dst))
    a_src, a_dst = torch.randn(graph.num_src, 4), torch.randn(graph.num_dst, 4)
    results = []
    for body in map(functions_of, ("triton", "naive")):
        state = body.attend(*graph.forward[:2], x, a_src, a_dst, slope=0.2, num_rows=graph.num_dst, branch=True)
        out, lse = body.attend_finish(tuple(t.clone() for t in state[:3]))
        both = body.attend_grad(graph.forward, graph.reverse, x, a_src, a_dst, out, lse, grad, slope=0.2)
        results.append((*state[1:], out, lse, *both))
    assert len(later_tile) == 2
    for mine, theirs in zip(*results, strict=True):
        kit.assert_near(mine, theirs, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_reads_both_rows(kit, later_tile, dtype):
    graph = kit.degree_graph()
    x, y, grad = (torch.randn(n, 2, 64).to(dtype) for n in (graph.num_src, graph.num_dst, graph.num_dst))
    a, order = torch.randn(2, 64), torch.argsort(graph.forward.indices, stable=True)
    results = []
    for body in map(functions_of, ("triton", "naive")):
        state = body.attend_v2(*graph.forward[:2], x, y, a, slope=0.2, num_rows=graph.num_dst)
        out, lse = body.attend_finish(tuple(t.clone() for t in state[:3]))
        delta = (out * grad.float()).sum(-1)
        both = body.attend_v2_grad(graph.forward, graph.reverse, order, x, y, a, lse, grad, delta, slope=0.2)
        results.append((out, lse, *both))
    assert len(later_tile) == 2
    for mine, theirs in zip(*results, strict=True):
        kit.assert_near(mine, theirs, tolerance=TOLERANCE[dtype])
