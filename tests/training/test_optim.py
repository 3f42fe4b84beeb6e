"""Optimizer configuration: schedules, decay groups, clipping, state."""

import math

import pytest
import torch
from torch import nn

from gnnpar.training.optim import SGD, Adam, AdamW, DeviceStep, RateSchedule, Stepper


def model() -> nn.Module:
    return nn.ModuleDict({"encoder": nn.Linear(3, 4), "layers": nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])})


def layer_of(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("layers.") else None


def build(config: Adam | AdamW | SGD, module: nn.Module, epochs: int = 10):
    return config.build(module.named_parameters(), epochs=epochs, layer_of=layer_of)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (RateSchedule(), [1, 1, 1, 1]),
        (RateSchedule(schedule="step", step_every=2, gamma=0.1), [1, 1, 0.1, 0.1]),
        (RateSchedule(schedule="cosine"), [0.5 * (1 + math.cos(math.pi * e / 4)) for e in range(4)]),
        (RateSchedule(schedule="warmup", warmup_epochs=3), [0.25, 0.5, 0.75, 1]),
        (RateSchedule(schedule="step", step_every=1, gamma=0.5, warmup_epochs=1), [0.5, 1, 0.5, 0.25]),
    ],
)
def test_schedules(schedule: RateSchedule, expected: list[float]) -> None:
    assert [schedule.factor(epoch, 4) for epoch in range(4)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("decay", "names"),
    [
        (
            "all",
            {"encoder.weight", "encoder.bias", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"},
        ),
        ("weights", {"encoder.weight", "layers.0.weight"}),
        ("first_layer", {"encoder.weight", "encoder.bias", "layers.0.weight", "layers.0.bias"}),
    ],
)
def test_weight_decay_groups(decay, names: set[str]) -> None:
    module = model()
    decayed, spared = build(Adam(weight_decay=0.1, decay=decay), module).optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    ids = {id(p) for p in decayed["params"]}
    assert {name for name, p in module.named_parameters() if id(p) in ids} == names


def test_clipping_is_by_the_global_norm() -> None:
    module = model()
    stepper = build(SGD(lr=1.0, clip=0.5), module)
    before = [p.detach().clone() for p in module.parameters()]
    for p in module.parameters():
        p.grad = torch.full_like(p, 3.0)
    stepper.step()
    moved = torch.cat([(p - b).flatten() for p, b in zip(module.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="nesterov=true needs momentum"):
        SGD(nesterov=True)
    with pytest.raises(ValueError, match="warms up never"):
        Adam(schedule="warmup")


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_on_another_stage_moves_nothing_here(norm: float) -> None:
    module = model()
    stepper = build(SGD(lr=0.1), module)
    before = [p.detach().clone() for p in module.parameters()]
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    stepper.step(norm=norm)
    assert stepper.refused
    assert all(torch.equal(p, kept) for p, kept in zip(module.parameters(), before, strict=True))
    stepper.step(norm=1.0)
    assert not stepper.refused
    assert not any(torch.equal(p, kept) for p, kept in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        (Adam(weight_decay=0.1), torch.optim.Adam),
        (AdamW(weight_decay=0.1), torch.optim.AdamW),
        (SGD(momentum=0.9, nesterov=True, weight_decay=0.1), torch.optim.SGD),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, RateSchedule) else "",
)
def test_steps_are_those_of_torch_to_the_bit(config: Adam | AdamW | SGD, theirs: type[torch.optim.Optimizer]) -> None:
    mine, other = model(), model()
    other.load_state_dict(mine.state_dict())
    stepper = build(config, mine)
    options = {"momentum": 0.9, "nesterov": True} if isinstance(config, SGD) else {}
    optimizer = theirs(other.parameters(), lr=config.lr, weight_decay=0.1, **options)  # type: ignore[call-arg]
    assert type(stepper.optimizer).__name__ == theirs.__name__, "checkpoints name it"
    for _ in range(4):
        stepper.zero_grad()
        optimizer.zero_grad()
        for module in (mine, other):
            sum((p**3).sum() for p in module.parameters()).backward()  # type: ignore[union-attr]
        stepper.step()
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), other.parameters(), strict=True))
    assert all(p.requires_grad and p.grad_fn is None for p in mine.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "config",
    [
        Adam(lr=0.1, weight_decay=0.1),
        AdamW(lr=0.1, weight_decay=0.1, decay="weights"),
        SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        SGD(lr=0.1, momentum=0.9, clip=0.5),
        SGD(lr=0.1),
    ],
)
def test_steps_of_a_device_are_those_of_torch_to_the_bit(config, dtype) -> None:
    """And so are checkpoints: one of either goes on as the other."""
    wholly, partly = model().to(dtype), model().to(dtype)
    partly.load_state_dict(wholly.state_dict())
    torchs, ours = build(config, wholly), build(config, partly)
    for epoch in range(6):
        if epoch in (2, 4):  # a run goes on: on a device, then on the CPU again
            state, ours = ours.state_dict(), build(config, partly)
            ours.load_state_dict(state)
            assert {n: sorted(s) for n, s in state["state"].items()} == {
                n: sorted(s) for n, s in torchs.state_dict()["state"].items()
            }
        step = DeviceStep(ours.optimizer)
        for module, stepper in ((wholly, torchs), (partly, ours)):
            stepper.schedule(epoch)
            stepper.zero_grad()
            sum((p**3).sum() for p in module.parameters()).backward()  # type: ignore[union-attr]
        torchs.step()
        if 2 <= epoch < 4:
            ours.step()
        else:
            ours._clip(None)
            step.prepare()
            step.launch(torch.tensor(True))
        assert all(torch.equal(a, b) for a, b in zip(wholly.parameters(), partly.parameters(), strict=True))


def test_an_optimizer_that_asks_for_the_loss_is_refused() -> None:
    module = model()
    names = {parameter: name for name, parameter in module.named_parameters()}
    lbfgs = torch.optim.LBFGS(module.parameters())
    with pytest.raises(ValueError, match=r"^optim=lbfgs: needs to evaluate the loss several times a step \(.*\)\. Use"):
        Stepper(lbfgs, config=Adam(), epochs=1, names=names)
    for kind in (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam):
        Stepper(kind(module.parameters()), config=Adam(), epochs=1, names=names)


@pytest.mark.parametrize(
    "config", [Adam(weight_decay=0.1), AdamW(weight_decay=0.1), SGD(momentum=0.9, weight_decay=0.1)]
)
def test_a_step_of_a_device_leaves_what_is_frozen_or_has_no_gradient(config: Adam | AdamW | SGD) -> None:
    """As torch's own step: `encoder` is frozen, `layers.1` has no gradient."""
    mine, theirs = model(), model()
    theirs.load_state_dict(mine.state_dict())
    ours, torchs = (build(config, each).optimizer for each in (mine, theirs))
    step = DeviceStep(ours)
    for seed in range(3):
        for module in (mine, theirs):
            draw = torch.Generator().manual_seed(seed)
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(not name.startswith("encoder"))
                if name.startswith("layers.0"):
                    parameter.grad = torch.randn(parameter.shape, generator=draw)
        step.prepare()
        step.launch(torch.tensor(True))
        torchs.step()
    for (name, a), (_, b) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
