"""Models drawn at random train as in PyG's own loop, to 1e-9 over three steps, or are refused in one clear line."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import SAGEConv

from conformance.generated_nets import LACKING, VARIANTS_OF_OWN, build, draw, judge, judged, kwargs_of, place
from conformance.plain_loop import graph, plain, verdict

BATCH = 5
SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in range(8, 60)]


@pytest.mark.parametrize("batch", [*range(8), *SLOW])
def test_generated_models_train_as_in_pyg_or_are_refused_in_a_line(batch):
    seeds = range(BATCH * batch, BATCH * (batch + 1))
    found = {seed: judge(seed) for seed in seeds}
    counts = dict(Counter(each.kind for each in found.values()))
    bad = {seed: (*place(seed), str(each)) for seed, each in found.items() if not each.good}
    assert not bad, f"{counts}; draw(SEED) is the model: {bad}"
    assert counts.get("skipped", 0) < BATCH, "PyG runs what is drawn"


NORM = "nn.Sequential(nn.Linear({0}, {1}), nn.BatchNorm1d({1}), nn.Linear({1}, {2}))"


@pytest.mark.quick(1)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("conv", "world", "twists", "line"),
    [
        (f"NNConv(8, 8, {NORM.format(4, 8, 64)}); a", 1, [], ""),
        (f"GINConv({NORM.format(8, 8, 8)})", 2, [], ""),
        ("SAGEConv(8, 8)", 1, ["spectral_norm"], "weight.0._u changes in a part that torch.utils.checkpoint"),
        (f"GroupAddRev(GINConv({NORM.format(4, 4, 4)}), num_groups=2)", 1, [], "running_mean changes in a part that"),
    ],
)
def test_buffers_in_checkpointed_part_move_twice_or_are_refused(conv, world, twists, line, reentrant):
    layer = {"conv": conv, "twists": twists, "checkpoint": reentrant}
    if conv.startswith("GroupAddRev"):
        del layer["checkpoint"]
    found = judged({"seed": 3, "layers": [layer]}, "graph_parallel", world, dirty=True)
    assert line in found.why
    assert (found.kind == "equal") == (not line), str(found)


class AnnealedInAPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head, self.tau = SAGEConv(8, 8), nn.Linear(8, 3), 1.0

    def part(self, x, edge_index):
        self.tau *= 0.9 if self.training else 1.0
        return self.conv(x, edge_index) / self.tau

    def forward(self, x, edge_index):
        return self.head(checkpoint(self.part, x, edge_index, use_reentrant=False))


def test_number_that_a_checkpointed_part_changes_is_refused():
    due = plain(AnnealedInAPart, graph())
    found = verdict(f"{__name__}.AnnealedInAPart", {}, graph(), "single", 1, due)
    assert (found.kind, "tau changes in a part that" in found.why) == ("refused", True), str(found)


def test_gradient_hook_on_tensor_is_refused_in_pipeline_and_equal_elsewhere():
    spec = {"seed": 134, "layers": [{"conv": "SAGEConv(8, 8)", "steps": ["gradient hook"]}, {"conv": "SAGEConv(8, 8)"}]}
    assert judged(spec, "graph_parallel", 2, dirty=True).kind == "equal"
    found = judged(spec, "gnnpipe", 2, dirty=True)
    assert (found.kind, "its forward calls register_hook of a tensor" in found.why) == ("refused", True), str(found)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("graph_parallel", 4), ("gnnpipe", 2)])
def test_reentrant_part_without_a_gradient_trains_nothing(strategy, world):
    """As torch: no parameter of the part has a gradient. Its switch of gradients is refused in a pipeline."""
    layers = [{"conv": "SAGEConv(8, 8)", "checkpoint": True}, {"conv": "SAGEConv(8, 8)"}]
    found = judged({"seed": 4, "layers": layers, "frozen first": True}, strategy, world, dirty=True)
    refused = "switches gradients off" in found.why
    assert (found.kind, refused) == (("refused", True) if strategy == "gnnpipe" else ("equal", False)), str(found)


@pytest.mark.quick(2)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("conv", ["Half()", "HalfOfRows()", "HalfOfAttributes(); a", "FirstRow()"])
def test_model_that_depends_on_the_order_of_edges_is_refused(conv, world):
    found = judged({"seed": 8, "layers": [{"conv": conv}]}, "graph_parallel", world, dirty=True)
    assert (found.kind, "depends on the order of edges" in found.why) == ("refused", True), str(found)


def test_median_is_probed_on_a_graph_where_it_runs():
    """PyG's median fails where node 0 has no in-edge; this message divides by the largest row of the rank."""
    layer = {"conv": "SAGEConv(8, 8, aggr='median')", "twists": ["shadow message over largest"]}
    found = judged({"seed": 1004, "layers": [layer]}, "graph_parallel", 4, dirty=True)
    assert (found.kind, "mixes rows" in found.why) == ("refused", True), str(found)


@pytest.mark.quick(1)
@pytest.mark.parametrize("world", [1, 2])
def test_convolution_that_caches_rows_keeps_none_of_one_node(world):
    """A strategy runs the model on one node before it trains."""
    spec = {"seed": 1, "layers": [{"conv": "SGConv(8, 8, K=2, cached=True)"}]}
    found = judged(spec, "sar", world, dirty=True)
    assert found.good, str(found)


def test_generator_draws_what_users_write_and_depends_on_the_seed_alone():
    specs = [draw(seed) for seed in range(300)]
    assert specs == [draw(seed) for seed in range(300)]
    text = str(specs)
    drawn = ("subclass message", "subclass propagate", "shadow", "hook aggregate", "pre-hook propagate", "weight_norm")
    drawn += (
        "'checkpoint': True",
        "'checkpoint': False",
        "twice",
        "same",
        "frozen",
        "held",
        "annealed",
        "lstm",
        "tuple",
    )
    for each in (*drawn, *VARIANTS_OF_OWN):
        assert each in text, each
    assert not any(name in text for name in LACKING)
    assert build(**kwargs_of(specs[0])).state_dict().keys() == build(**kwargs_of(specs[0])).state_dict().keys()
    assert {place(seed)[0] for seed in range(60)} == {"single", "graph_parallel", "sar", "gnnpipe", "feature"}
