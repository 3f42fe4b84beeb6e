"""`gnnpar check` certifies no dead model: each sabotage is found, and the module that has it is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg

from composing import configured, names
from conftest import Run
from gnnpar.folds.sum import Sum
from gnnpar.models.gnn import ModelConfig
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.verify.conformance import check
from gnnpar.verify.soundness import find_fault


class Sound(nn.Module):
    """W A x + V x; a sabotage changes `message`, `finish` or the modules."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.neighbours, self.own = nn.Linear(in_dim, out_dim), nn.Linear(in_dim, out_dim)

    def forward(self, g, h):
        return self.finish(g, h, self.neighbours(g.aggregate(Sum(), g.source(self.message, h))) + self.own(h))

    @staticmethod
    def message(g, h):
        return (h,)

    def finish(self, g, h, out):
        return out


class DeadNorm(Sound):
    def __init__(self, in_dim, out_dim):
        super().__init__(in_dim, out_dim)
        self.norm = nn.LayerNorm(out_dim)
        nn.init.zeros_(self.norm.weight)

    def finish(self, g, h, out):
        return self.norm(out)


class RunningMean(Sound):
    def __init__(self, in_dim, out_dim):
        super().__init__(in_dim, out_dim)
        self.register_buffer("running", torch.zeros(out_dim))

    def finish(self, g, h, out):
        with torch.no_grad():
            self.get_buffer("running").lerp_(out.mean(0), 0.1)
        return out - self.get_buffer("running")


class Counter(Sound):
    calls = 0

    def finish(self, g, h, out):
        self.calls += 1
        return out / self.calls


class Unused(Sound):
    def __init__(self, in_dim, out_dim):
        super().__init__(in_dim, out_dim)
        self.spare = nn.Linear(in_dim, out_dim)


class Frozen(Sound):
    def __init__(self, in_dim, out_dim):
        super().__init__(in_dim, out_dim)
        self.own.weight.requires_grad_(False)


def finishing(change: Callable[..., torch.Tensor]) -> type[Sound]:
    """A layer that ends in change(layer, input, output)."""
    return type("Finishing", (Sound,), {"finish": lambda self, g, h, out: change(self, h, out)})


class Detached(Sound):
    def forward(self, g, h):
        return self.neighbours(g.aggregate(Sum(), (h.detach(),))) + self.own(h)


class InPlace(Sound):
    def forward(self, g, h):
        with torch.no_grad():
            h.mul_(0.5)
        return super().forward(g, h)


@dataclass(frozen=True, kw_only=True)
class Of(ModelConfig):
    """Two layers of a convolution."""

    kind: type[nn.Module] = Sound
    activation: ClassVar = torch.tanh

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        return self.kind(in_dim, out_dim)


TWO_RUNS = "layers.0.conv gives other values in the second of two equal runs"
MIXES = "layers.0.conv mixes rows: the features of node 0 change 40 rows"
POSITION = "layers.0.conv depends on how many rows there are"
SABOTAGES = {
    "dead norm": (DeadNorm, "layers.0.conv.norm gives nothing but zeros"),
    "mean": (finishing(lambda layer, h, out: out - out.mean(0)), f"{MIXES} that it has no edge to"),
    "first row": (finishing(lambda layer, h, out: out + h[0].sum()), MIXES),
    "running mean": (RunningMean, "layers.0.conv changes its buffer running in forward"),
    "counter": (Counter, TWO_RUNS),
    "noise": (
        finishing(lambda layer, h, out: out + 0.1 * torch.randn_like(out)),
        f"{TWO_RUNS}: its noise is not keyed",
    ),
    "dropout": (
        finishing(lambda layer, h, out: nn.functional.dropout(out, 0.5)),
        f"{TWO_RUNS}: its noise is not keyed",
    ),
    "constant": (
        finishing(lambda layer, h, out: layer.own.bias.expand(len(h), -1)),
        "layers.0.conv gives the same output for another input",
    ),
    "zeros": (finishing(lambda layer, h, out: torch.relu(-out.abs())), "layers.0.conv gives nothing but zeros"),
    "detached": (Detached, "layers.0.conv.neighbours.weight has a gradient that its loss does not have"),
    "in place": (InPlace, "layers.0.conv writes into its input in place"),
    "unused": (Unused, "layers.0.conv.spare.weight has no gradient: the loss does not depend on it"),
    "position": (
        finishing(lambda layer, h, out: out + torch.arange(len(h), dtype=h.dtype)[:, None]),
        f"{POSITION}, or on where a row stands",
    ),
    "number of rows": (finishing(lambda layer, h, out: out / len(h)), POSITION),
    "not finite": (
        finishing(lambda layer, h, out: (out - 1e3).log()),
        "layers.0.conv gives values that are not finite",
    ),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_sabotage_is_named(name):
    kind, line = SABOTAGES[name]
    assert str(find_fault(Of(kind=kind, hidden=8))).startswith(line)


def test_logits_of_another_shape_are_named():
    assert str(
        find_fault(Of(kind=finishing(lambda layer, h, out: torch.cat([out, out], 1)), hidden=8, num_layers=1))
    ) == ("the model gives [41, 6] instead of one row of logits a node, [41, 3]")


@pytest.mark.quick(2)
@pytest.mark.parametrize("model", names("model"))
def test_models_of_gnnpar_are_sound(model):
    assert find_fault(configured("model", model, "model.hidden=8")) is None
    overrides = ("norm=layer", "residual=true", "encoder=linear", "decoder=linear", "num_layers=3", "hidden=8")
    assert find_fault(configured("model", model, *(f"model.{each}" for each in overrides))) is None


def test_a_frozen_parameter_is_sound():
    assert find_fault(Of(kind=Frozen, hidden=8)) is None


def test_a_sound_layer_of_ones_own_passes_and_an_unsound_one_has_one_failed_case():
    assert find_fault(Of(hidden=8)) is None
    dead, sound = check(GraphParallel(), {"sound": Of(hidden=8), "dead": Of(kind=DeadNorm, hidden=8)}, worlds=(2,))
    assert sound.passed
    assert not dead.passed
    assert dead.error is not None and dead.error.startswith("layers.0.conv.norm gives nothing but zeros")


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda width: nn.BatchNorm1d(width), "BatchNorm1d, which mixes the rows of all nodes"),
        (lambda width: nn.Dropout(0.5), "Dropout, which draws other numbers on every rank: call g.dropout"),
        (lambda width: nn.Softmax(dim=0), "Softmax, which mixes the rows of all nodes"),
        (lambda width: nn.GRU(width, width), "GRU, which mixes the rows of all nodes"),
        (lambda width: pyg.BatchNorm(width), "BatchNorm, which mixes the rows of all nodes"),
        (lambda width: pyg.GraphNorm(width), "GraphNorm, which mixes the rows of all nodes"),
        (lambda width: pyg.PairNorm(), "PairNorm, which mixes the rows of all nodes"),
        (lambda width: pyg.LayerNorm(width), "LayerNorm, which mixes the rows of all nodes"),
        (lambda width: pyg.MeanAggregation(), "MeanAggregation, which mixes the rows of all nodes"),
    ],
)
def test_modules_that_are_not_row_local_are_refused_by_name(module, why):
    class Normed(Sound):
        def __init__(self, in_dim, out_dim):
            super().__init__(in_dim, out_dim)
            self.norm = module(out_dim)

    with pytest.raises(ValueError, match=r"layers\.0\.conv\.norm of the model is a " + why) as caught:
        Of(kind=Normed, hidden=8).build(6, 3, seed=0)
    assert "\n" not in str(caught.value)
    assert pyg.LayerNorm(4, mode="node") is not None


def test_modules_keep_the_initial_weights_that_they_make():
    class Scaled(Sound):
        def __init__(self, in_dim, out_dim):
            super().__init__(in_dim, out_dim)
            self.scale = nn.Parameter(torch.full((out_dim,), 0.7))
            self.norm = nn.LayerNorm(out_dim)
            nn.init.constant_(self.norm.weight, 0.3)

    torch.manual_seed(0)
    model, state = Of(kind=Scaled, hidden=8).build(6, 3, seed=1), torch.random.get_rng_state()
    conv = model.layers[0].get_submodule("conv")
    assert conv.get_parameter("scale").eq(0.7).all()
    assert conv.get_parameter("norm.weight").eq(0.3).all()
    assert conv.get_parameter("own.bias").any(), "nn.Linear's own"
    torch.manual_seed(0)
    assert torch.equal(state, torch.random.get_rng_state()), "torch's generator is left as it was"
    again, other = (Of(kind=Scaled, hidden=8).build(6, 3, seed=s) for s in (1, 2))
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    weights = [m.layers[0].get_parameter("conv.own.weight") for m in (model, other)]
    assert not torch.equal(*weights)


def test_a_parameter_without_values_is_named():
    class Empty(Sound):
        def __init__(self, in_dim, out_dim):
            super().__init__(in_dim, out_dim)
            self.scale = nn.Parameter(torch.empty(out_dim))

    line = r'layers\.0\.conv\.scale of the model has no initial values: let Empty set them .* glorot = \("scale",\)'
    with pytest.raises(ValueError, match=line):
        Of(kind=Empty, hidden=8).build(6, 3, seed=0)


DEAD = """
from collections.abc import Callable
from dataclasses import dataclass
from torch import nn
from gnnpar.models.gcn import GCN, GCNConv

class Conv(GCNConv):
    def __init__(self, in_dim, out_dim, *, aggregate_first):
        super().__init__(in_dim, out_dim, aggregate_first=aggregate_first)
        self.norm = nn.LayerNorm(out_dim)
        nn.init.zeros_(self.norm.weight)

    def forward(self, g, h):
        return self.norm(super().forward(g, h))

@dataclass(frozen=True, kw_only=True)
class Dead(GCN):
    def conv(self, in_dim, out_dim, *, index, aggregate_first):
        return Conv(in_dim, out_dim, aggregate_first=aggregate_first)
"""


def test_the_command_fails_and_names_the_module(run_here: Run, tmp_path) -> None:
    (tmp_path / "deadnorm.py").write_text(DEAD)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "dead.yaml").write_text("_target_: deadnorm.Dead\nhidden: 8\n")
    done = run_here("check", "strategy=graph_parallel", "model=dead", "--worlds=1,2")
    assert done.returncode == 1
    assert "layers.0.conv.norm gives nothing but zeros" in " ".join(done.stdout.split())
    assert "0 of 1 cases pass" in done.stdout + done.stderr
