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
from kernels.attention import GAT, V2, inputs, run

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
@pytest.mark.parametrize(("kind", "heads", "more"), [(GAT, 4, {"branch": True}), (V2, 2, {})], ids=str)
def test_attention_and_its_gradients(kit, later_tile, kind, heads, more, dtype):
    graph = kit.degree_graph()
    operands, grad_out = inputs(kind, graph, heads, 64, dtype=dtype)
    results = [
        run(kind, functions_of(body), graph, [graph], operands, grad_out, None, **more) for body in ("triton", "naive")
    ]
    assert len(later_tile) == 2
    for mine, theirs in zip(*results, strict=True):
        kit.assert_near(mine, theirs, tolerance=TOLERANCE[dtype])
