"""Epochs that are replays of a captured one have the bits of epochs that are not, under every strategy that says so.

On a simulated GPU with a simulated CUDA graph (tests/simulated_graph.py).
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import captured_runs
from captured_runs import EPOCHS, WARM_UP, run, simulated
from composing import ALIKE, PRESETS, configured, names, settings_of
from engines import open_rank
from gnnpar.comm.world import World
from gnnpar.track.jsonl import read_rows
from gnnpar.training import checks, loop
from gnnpar.training.captured import CapturedEpochs
from gnnpar.training.checks import refuse_capture
from gnnpar.training.optim import SGD, Adam, AdamW
from outcomes import refused
from simulated_gpu import DEVICE, held
from simulated_graph import Cuda, GraphWorld
from synchronisation_runs import NETS, carries, job_of, place

CAPTURED = [s for s in names("strategy") if configured("strategy", s).capabilities.captured]


@pytest.fixture(autouse=True)
def cuda() -> Iterator[Cuda]:
    with simulated() as fake:
        yield fake


def _assert_equal(cuda: Cuda, *job: str, **options: Any) -> None:
    plain, replayed = (run(cuda, *job, replays=replays, **options) for replays in (False, True))
    assert cuda.log.count("captured") == len(plain)
    assert len([line for line in cuda.log if line.startswith("replay")]) == (EPOCHS - WARM_UP) * len(plain)
    for (losses, weights, *counts), (losses2, weights2, *counts2) in zip(plain, replayed, strict=True):
        assert losses2 == losses
        assert len(set(losses)) == EPOCHS
        assert all(torch.equal(weights2[name], w) for name, w in weights.items())
        assert counts2 == counts, "metrics and traffic"


OPTIMIZERS = [
    AdamW(lr=0.02, weight_decay=0.1, decay="weights", schedule="step", step_every=2),
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, schedule="warmup", warmup_epochs=5),
    SGD(lr=0.1, schedule="cosine"),
]
OPTIONS = [
    ("graph_parallel", "gat", "codec=bf16 model=gat model.attention_dropout=0.3"),
    ("graph_parallel", "gcn", "strategy.overlap=none"),
    ("graph_parallel", "gcn", "strategy.overlap=central_marginal"),
    ("graph_parallel", "gcn", "model.norm=batch"),
    ("single", "gatv2", "model=gatv2 model.attention_dropout=0.3"),
    ("sar", "gatv2", "strategy.rounds=peer strategy.backward=pull"),
    ("sar", "gat", "strategy.rounds=one strategy.prefetch=0"),
    ("feature", "gcn", "codec=bf16"),
    ("cagnet", "gat", "codec=bf16"),
    ("cofree", "gcn", "strategy.degrees=graph"),
]


def _cases():
    """Each strategy with each model, where some pairs are tried with options alone; then the options."""
    tried = {(strategy, model) for strategy, model, _ in OPTIONS}
    for strategy in CAPTURED:
        for model in [*names("model"), *(f"pyg.{net}" for net in NETS)]:
            usual = model in ("gcn", "gat") or (strategy == "single" and model not in ALIKE)
            if not usual or strategy in PRESETS or (strategy != "single" and (strategy, model) in tried):
                yield pytest.param(strategy, model, "", marks=pytest.mark.slow)
            elif carries(strategy, model):
                yield strategy, model, ""
    yield from OPTIONS


@pytest.mark.quick(4)
@pytest.mark.parametrize(("strategy", "model", "overrides"), list(_cases()))
def test_replays_have_the_bits_of_epochs(cuda, strategy, model, overrides):
    if not overrides and not carries(strategy, model):  # of the long suite: to ask takes long
        pytest.skip(f"strategy={strategy} refuses model={model}")
    _assert_equal(cuda, strategy, model, *overrides.split())


KEPT = {"first_layer": "cached"}
STEPS = [{"optim": optim, "dtype": dtype} for optim, dtype in product(OPTIMIZERS, [torch.float64, torch.float32])]


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("strategy", "options"), [("single", KEPT), *(("graph_parallel", options) for options in (KEPT, *STEPS))]
)
def test_replays_with_a_kept_layer_or_other_optimizers_have_the_bits_of_epochs(cuda, strategy, options):
    _assert_equal(cuda, strategy, "gcn", **options)


def test_the_order_of_calls(cuda):
    """Warm-up on the stream of the capture, which waits for what was before; replays on the usual one."""
    run(cuda, "single", "gcn", replays=True)
    warm = ["side waits for default", "on side", "on default", "default waits for side"]
    assert cuda.log == [
        *warm * WARM_UP,
        "capture on side, thread_local",
        "captured",
        *["replay on default"] * (EPOCHS - WARM_UP),
    ]


class _KeysAsNumbers(CapturedEpochs):
    """What is captured draws the masks of the capture's epoch for ever."""

    def _capture(self, epoch: int) -> tuple:
        launch = self._engine.launch_epoch
        self._engine.launch_epoch = lambda epoch, optimizer, keys: launch(epoch, optimizer, None)  # type: ignore[method-assign, arg-type]
        return super()._capture(epoch)


def test_a_key_that_is_a_number_is_found(cuda, monkeypatch):
    plain = run(cuda, "single", "gcn", replays=False)[0][0]
    monkeypatch.setattr(captured_runs, "CapturedEpochs", _KeysAsNumbers)
    losses = run(cuda, "single", "gcn", replays=True)[0][0]
    assert losses[: WARM_UP + 1] == plain[: WARM_UP + 1]
    assert losses[WARM_UP + 1] != plain[WARM_UP + 1]


@pytest.mark.parametrize(
    ("work", "line"),
    [
        (lambda x: float(x.sum()), "captured: number read"),
        (lambda x: x[x > 0], "captured: boolean index"),
        (lambda x: x + torch.ones(4).to(DEVICE, non_blocking=True), "captured: copy from the host"),
        (lambda x: x.cpu(), "captured: copy to the host"),
    ],
)
def test_what_a_capture_refuses_is_refused(cuda, work, line):
    with cuda.gpu.active():
        x = torch.arange(4.0).to(DEVICE)
        with (
            pytest.raises(RuntimeError, match=line),
            cuda.graph(cuda.CUDAGraph(), stream=cuda.Stream(), capture_error_mode="thread_local"),
        ):
            work(x)


def test_a_capture_changes_nothing_until_it_is_replayed(cuda):
    """The simulated graph itself: in-place work, views and results at their places."""
    with cuda.gpu.active():
        x, graph = torch.arange(4.0).to(DEVICE), cuda.CUDAGraph()
        with cuda.graph(graph, stream=cuda.Stream(), capture_error_mode="thread_local"):
            x[1:].add_(1)
            y = x * 2
        assert held(x).tolist() == [0, 1, 2, 3]
        for times in (1, 2):
            graph.replay()
            assert held(x).tolist() == [0, 1 + times, 2 + times, 3 + times]
            assert held(y).tolist() == [2 * v for v in held(x).tolist()]


def test_a_gradient_that_is_not_finite_moves_nothing(cuda):
    """And is seen after the replay, without a decision of the host before."""
    with cuda.gpu.active():
        parameter = torch.nn.Parameter(torch.ones(3).to(DEVICE))
        stepper = Adam(lr=0.1).build([("w", parameter)], epochs=1, layer_of=lambda _: None)
        for gradient, refused in (([1.0, 1.0, 1.0], False), ([1.0, torch.nan, 1.0], True), ([1.0, 1.0, 1.0], False)):
            before = held(parameter).clone(), held(stepper.optimizer.state[parameter].get("exp_avg", parameter)).clone()
            parameter.grad = torch.tensor(gradient).to(DEVICE)
            cuda.gpu.record()
            cuda.gpu.events.clear()
            stepper.step()
            assert not cuda.gpu.events
            assert stepper.refused is refused
            assert [event.function for event in cuda.gpu.events] == ["Stepper.refused"]
            cuda.gpu.events.clear()
            assert torch.equal(held(parameter), before[0]) is refused
            if refused:
                assert torch.equal(held(stepper.optimizer.state[parameter]["exp_avg"]), before[1])


def test_a_replay_with_a_gradient_that_is_not_finite_moves_nothing(cuda):
    """The host learns of it after the replay."""
    job, _ = job_of("single", "gcn")

    def rank(comm):
        engine, optimizer, model, shard = open_rank(job, comm, place=place)
        epochs = CapturedEpochs(engine, optimizer, comm, job.seed, model)
        for epoch in range(WARM_UP + 1):
            assert math.isfinite(epochs.train_epoch(epoch).loss)
            assert not optimizer.refused
        before = {name: held(w).clone() for name, w in engine.named_weights()}
        held(shard.x).fill_(torch.nan)
        assert math.isnan(epochs.train_epoch(WARM_UP + 1).loss)
        assert optimizer.refused
        assert all(torch.equal(held(w), before[name]) for name, w in engine.named_weights())

    GraphWorld(cuda.gpu, 1).run(rank)
    assert cuda.log[-2:] == ["replay on default"] * 2


@pytest.mark.parametrize(("first", "captured", "replays"), [(0, 0, 0), (EPOCHS - 2, 1, EPOCHS - 1 - WARM_UP)])
def test_a_number_of_a_module_that_changes_by_epoch_ends_the_recording(cuda, first, captured, replays):
    """It is 0 until epoch `first`."""
    job, _ = job_of("single", "gcn")

    def rank(comm):
        engine, optimizer, net, _ = open_rank(job, comm, place=place)
        epochs = CapturedEpochs(engine, optimizer, comm, job.seed, net)
        for epoch in range(EPOCHS):
            vars(net)["temperature"] = max(0, epoch - first)
            epochs.train_epoch(epoch)

    GraphWorld(cuda.gpu, 1).run(rank)
    assert cuda.log.count("captured") == captured
    assert cuda.log.count("replay on default") == replays


def test_an_engine_without_a_launch_is_named(cuda):
    with pytest.raises(TypeError, match=r"object has no launch_epoch, and its strategy declares captured=True"):
        CapturedEpochs(object(), None, None, 0, None)  # type: ignore[arg-type]


SIZES: Any = {"size": 2, "local_size": 2, "threads_per_rank": 1, "cores": 2}
WORLD = World(how="processes", device="cuda", backend="nccl", links=None, **SIZES)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("overrides", "world", "line"),
    [
        ("", {"device": "cpu"}, r"launch.cuda_graph=true replays work of a GPU, and this run is on the CPU: use a GPU"),
        ("strategy=gnnpipe", {}, r"with strategy=gnnpipe as it is configured the host decides within an epoch"),
        ("codec=uniform", {}, r"with strategy=graph_parallel as it is configured the host decides"),
        ("strategy=sar strategy.logical_parts=2 world_size=1", {"size": 1}, r"with strategy=sar as it is configured"),
        ("strategy=cofree strategy.drop_edge=0.1 partition=ne", {}, r"with strategy=cofree as it is configured"),
        ("task=link dataset=sbm", {}, r"task=link draws other pairs in every epoch: set launch.cuda_graph=false"),
        ("", {"backend": "gloo"}, r"messages of comm=gloo go through the host: use comm=nccl, or set"),
        ("", {}, ""),
        ("strategy=single", {"size": 1, "backend": "none"}, ""),
    ],
)
def test_what_cannot_be_captured_is_one_line(overrides, world, line):
    settings = settings_of("launch.cuda_graph=true", *overrides.split())
    if not line:
        refuse_capture(settings, replace(WORLD, **world))
        return
    with refused(line):
        refuse_capture(settings, replace(WORLD, **world))


class _Counted:
    """A CapturedEpochs that runs epochs as they are, and says which were asked of it."""

    asked: list[int]

    def __init__(self, engine: Any, optimizer: Any, *_: object) -> None:
        self.engine, self.optimizer, type(self).asked = engine, optimizer, []

    @property
    def captures(self) -> bool:
        return len(self.asked) == 2

    def train_epoch(self, epoch: int) -> Any:
        self.asked.append(epoch)
        return self.engine.train_epoch(epoch, self.optimizer)


def test_the_trainer_runs_probes_and_profiles_as_they_are(run_here, monkeypatch, tmp_path):
    """And the epoch of the capture is no measured one."""
    monkeypatch.setattr(loop, "CapturedEpochs", _Counted)
    monkeypatch.setattr(checks, "refuse_capture", lambda *_: None)
    small = ("dataset.num_nodes=200", "dataset.avg_degree=8", "tracker=jsonl", "threads_per_rank=1")
    overrides = ("strategy=single", "epochs=9", "fidelity_every=8", "launch.cuda_graph=true", "hydra.run.dir=run")
    done = run_here("train", *overrides, *small)
    assert done.returncode == 0, done.stderr
    timed = {row["epoch"]: row["time/timed"] for row in read_rows(tmp_path / "run") if "time/timed" in row}
    assert _Counted.asked == [1, 2, 3, 4, 6, 7], "0 and 8 are probed, 5 is the memory profile"
    assert timed == {epoch: int(epoch not in (0, 3, 5, 8)) for epoch in range(9)}
