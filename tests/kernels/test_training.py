"""Every strategy trains two epochs on Triton kernels and equals the specification; here they are interpreted."""

import pytest
import torch

from composing import configured, names
from gnnpar.verify.conformance import relative_error, small_graph, train_in_threads
from gnnpar_kernels.triton_tuning import interpreting
from interpreter import patch_once_a_launch

QUICK = ("graph_parallel", "sar", "gnnpipe")  # the views that call kernels; the others are made of them
STRATEGIES = [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in names("strategy")]
MODELS = {
    "gcn": (),
    "sage_max": (),
    "gat": ("model.heads=2", "model.attention_dropout=0.3"),
}


@pytest.mark.quick(3)
@pytest.mark.skipif(not interpreting(), reason="kernels are compiled here: tests/kernels -m gpu tests them")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_on_triton_kernels_equals_the_specification(monkeypatch, strategy, model):
    limit = configured("strategy", strategy).exact_limit()
    config = configured("model", model, "model.hidden=8", "model.num_layers=2", *MODELS[model])
    data, world = small_graph(num_nodes=30, num_edges=150), min(limit.capabilities.max_ranks or 2, 2)
    patch_once_a_launch()
    runs = {}
    for body in ("triton", "naive"):
        monkeypatch.setenv("GNNPAR_KERNELS", body)
        runs[body] = train_in_threads(limit, config, data, world=world)
    assert runs["triton"].losses == pytest.approx(runs["naive"].losses, rel=1e-10)
    for mine, theirs in zip(runs["triton"].gradients, runs["naive"].gradients, strict=True):
        assert max(relative_error(mine[k], g) for k, g in theirs.items()) < 1e-9
    assert relative_error(runs["triton"].logits, runs["naive"].logits) < 1e-9
    assert torch.isfinite(runs["triton"].logits).all()
