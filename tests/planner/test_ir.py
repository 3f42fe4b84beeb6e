"""A model's IR: every model has one, costs and liveness are what the layers say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composing import configured
from gnnpar.planner.extract import record
from gnnpar.pricing.ir import Gemm, ModelIR
from gnnpar.pricing.rates import NOMINAL

MODELS = (
    "gcn",
    "sage",
    "sage_max",
    "gat",
    "gatv2",
    "gcnii",
    "resgcn",
    "gin",
    "rgcn",
    "gine",
    "transformer",
    "rgat",
    "hgt",
    "sgformer",
    "polynormer",
)


def built(name: str, *overrides: str, in_dim: int = 24, out_dim: int = 5) -> nn.Module:
    return configured("model", name, "model.hidden=16", *overrides).build(in_dim, out_dim, seed=0)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_recorded(name: str) -> None:
    model = built(name, "model.num_layers=3")
    recorded = record(model, 24)
    assert recorded.num_layers == 3
    assert recorded.params == sum(p.numel() for p in model.parameters())
    assert [len(recorded.folds(i)) for i in range(3)] == [1, 1, 1]


def gemms(ir: ModelIR, layer: int) -> list[Gemm]:
    return [g for group in ir.layer(layer) for g in group.gemms]


def test_gcn_by_hand() -> None:
    ir = record(built("gcn"), 24)  # 24 -> 16 -> 5: both transform first
    assert gemms(ir, 0) == [Gemm(24, 16, False)]
    assert gemms(ir, 1) == [Gemm(16, 5, True)]
    assert [f.width for i in range(2) for f in ir.folds(i)] == [16, 5]
    assert [g.phase for g in ir.layer(0)] == ["transform", "aggregate", "post"]
    assert all(f.linear and f.learned and not f.needs_src for i in range(2) for f in ir.folds(i))
    assert ir.cuts == ((16,),)
    assert (ir.in_dim, ir.final) == (24, 5)
    assert (gemms(ir, 0)[0].flops(100), gemms(ir, 0)[0].numbers(100)) == (2 * 24 * 16 * 100, 24 * 16 + 40 * 100)


def test_relations_widen_the_result_alone() -> None:
    """3 relations of 16 features: one row is read for all of them, and one product takes the three sums."""
    ir = record(built("rgcn", "model.num_relations=3", in_dim=16), 16)
    (fold,) = ir.folds(1)
    assert (fold.kind, fold.width, fold.out, fold.linear) == ("Sum", 16, 48, True)
    assert Gemm(48, 5, True) in gemms(ir, 1)
    plain = record(built("sage", "model.order=aggregate_first", in_dim=16), 16).folds(1)[0]
    rates = NOMINAL.fold_seconds(fold, 900, 100), NOMINAL.fold_seconds(plain, 900, 100)
    assert rates[0] == pytest.approx(NOMINAL.fold_seconds(plain, 900, 300))
    assert rates[0] > rates[1]


def test_aggregate_first_sends_no_gradient_of_features() -> None:
    ir = record(built("gcn", "model.order=aggregate_first"), 24)
    assert [(f.width, f.learned) for i in range(2) for f in ir.folds(i)] == [(24, False), (16, True)]


def test_attention_pulls_rows_and_scores() -> None:
    ir = record(built("gat", "model.heads=4"), 24)
    first = ir.folds(0)[0]
    assert (first.kind, first.src, first.dst, first.pushed) == ("Softmax", (16, 4), (4,), 20 + 8)
    assert first.needs_src
    assert not first.linear


def test_gcnii_carries_two_tensors() -> None:
    ir = record(built("gcnii", "model.num_layers=4"), 24)
    assert ir.cuts == ((16, 16),) * 3  # the rows and the initial residual
    assert record(built("resgcn", "model.num_layers=4"), 24).cuts == ((16,),) * 3


def test_saved_is_what_autograd_keeps() -> None:
    """An MLP of known shape, by hand: inputs of the products and outputs of the activations."""

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 3)])

        def forward(self, g: Any, x: Tensor) -> Tensor:
            return self.layers[1](torch.relu(self.layers[0](x)))

    ir = record(Dense(), 8)
    assert ir.saved_of == (6, 0)  # relu's output, which the second product keeps too; the features are there anyway


def test_a_model_that_cannot_be_traced() -> None:
    class Peeks(nn.Module):
        def forward(self, g: Any, x: Tensor) -> Tensor:
            return x * float(x.sum())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Peeks()])

        def forward(self, g: Any, x: Tensor) -> Tensor:
            return self.layers[0](g, x)

    with pytest.raises(ValueError, match=r"the model cannot be traced: module layers.0 \(Peeks\) raised") as caught:
        record(Model(), 4)
    assert "\n" not in str(caught.value)
