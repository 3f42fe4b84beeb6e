"""Nothing in an epoch makes the host wait for a GPU, but what is listed here; and nothing mixes devices.

Whole epochs run on a simulated GPU, to the bits of the CPU. The first epochs may cut rows into tasks and transpose
blocks; the last one is recorded. Drawing samples and choosing bits are the host's own work. All of it runs as with
deterministic=true: an operation that has no fixed order of sums on a GPU is refused.
"""

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from composing import PRESETS, names
from engines import open_rank
from gnnpar.comm import ThreadWorld
from gnnpar.config.compose import compose
from gnnpar.parallel.objective import objective_of
from gnnpar.parallel.sequential import paging
from gnnpar.parallel.sequential.out_of_core import OutOfCoreEngine
from gnnpar.partition.shard import Shard, split
from gnnpar.training.meter import evaluate
from gnnpar.verify.conformance import Job, check, small_graph
from simulated_gpu import DEVICE, Event, SimulatedGpu, held, move
from synchronisation_runs import NETS, STRATEGIES, carries, job_of, losses_and_events, place, task_of, train


class Allowed(NamedTuple):
    """Waits that stay, by where they are."""

    file: str
    function: str
    reason: str

    def covers(self, event: Event) -> bool:
        return event.file.startswith(self.file) and event.function.startswith(self.function)


ALLOWED = [
    Allowed("gnnpar/parallel/engine.py", "FlatEngine.step", "the loss, once a step"),
    Allowed(
        "gnnpar/parallel/pipeline/engine.py", "PipelineEngine.train_epoch", "loss and gradient norm, once an epoch"
    ),
    Allowed("gnnpar/codecs/quantized.py", "QuantizedRows.begin_epoch", "rows that no step covers, once an epoch"),
]
OF_A_SAMPLE = [  # a mini-batch has new rows every step
    Allowed("gnnpar_kernels/", "", "a kernel cuts the rows of a sample into tasks"),
    Allowed("gnnpar/folds/block.py", "", "folds cut the edges of a sample into pieces, and find its ends and types"),
    Allowed("gnnpar/training/optim.py", "Stepper.refused", "an epoch ends at a gradient that is not finite"),
]
SAMPLING = ("minibatch", "bns")
DRAWING = "gnnpar/parallel/bns/strategy.py"  # what it draws, and cuts by that, is exempt


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _products_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU too, whose own, oneDNN's, add in another order."""
    monkeypatch.setattr("gnnpar.models.dense.has_fast_body", lambda x, weight: False)


def test_the_list_is_short():
    assert len(ALLOWED) + len(OF_A_SAMPLE) <= 6


FOLDS = {"single": ("gcn", "gatv2", "sage_max", "rgat"), "gnnpipe": ("gcn", "sage_max"), "minibatch": ("gcn", "gatv2")}
FOLDS["sar"] = ("gcn", "rgat")


def _pairs() -> Iterator[Any]:
    """By default: each fold under the strategies whose engines and views differ most, one of them under the others."""
    for strategy in STRATEGIES:
        all_folds = strategy in ("single", "graph_parallel", "sar", "gnnpipe", "minibatch")
        nets = [f"pyg.{net}" for net in NETS]
        for model in [*names("model"), *nets]:
            usual = model == "gat" or (all_folds and model in FOLDS.get(strategy, FOLDS["single"]))
            usual |= strategy == "graph_parallel" and model in nets
            if not usual or strategy in PRESETS:
                yield pytest.param(strategy, model, marks=pytest.mark.slow)
            elif carries(strategy, model):
                yield strategy, model


@pytest.mark.quick(6)
@pytest.mark.parametrize(("strategy", "model"), list(_pairs()))
def test_an_epoch_waits_for_nothing(strategy, model):
    if not carries(strategy, model):  # of the long suite: to ask takes long
        pytest.skip(f"strategy={strategy} refuses model={model}")
    assert_waits(strategy, *job_of(strategy, model))


def assert_waits(strategy: str, job: Job, world: int) -> None:
    """For what is listed, and nothing else; losses are the CPU's."""
    losses, events = losses_and_events(job, world)
    allowed = ALLOWED + OF_A_SAMPLE * (strategy in SAMPLING)
    seen = [event for event in events if DRAWING not in event.callers]
    waits = {str(event) for event in seen if not any(each.covers(event) for each in allowed)}
    assert not waits, "\n".join(sorted(waits))
    assert events, "nothing was recorded"
    on_cpu = ThreadWorld(world).run(job)
    assert losses == on_cpu[0][0], "the simulated GPU gives the bits of the CPU"


OPTIONS = [
    ("sar", "strategy.rounds=one"),
    ("sar", "strategy.rounds=peer strategy.backward=pull"),
    ("sar", "strategy.remat=false"),
    ("digest", "strategy.gradients=true codec=uniform"),
    ("graph_parallel", "strategy.overlap=central_marginal codec=uniform"),
    ("graph_parallel", "codec=random"),
    ("bns", "strategy.overlap=central_marginal"),
    ("gnnpipe", "strategy.remat=chunk"),
    ("gnnpipe", "strategy.remat=layer"),
    ("gnnpipe", "strategy.refresh=2 strategy.refresh_exact=true"),
    ("hybrid", "codec=uniform"),
    ("minibatch", "strategy.sampler=cluster strategy.clusters=6 strategy.clusters_per_batch=2"),
    ("minibatch", "strategy.sampler=uniform strategy.clusters=6 strategy.clusters_per_batch=2"),
    ("minibatch", "strategy.sampler=saint"),
    ("pipegcn", "codec=uniform"),
    ("cofree", "strategy.drop_edge=0.3 strategy.masks=1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "overrides"), OPTIONS)
def test_options_wait_for_nothing_either(strategy, overrides):
    assert_waits(strategy, *job_of(strategy, "gat", *overrides.split()))


def test_sancus_with_a_bound_waits_once_an_aggregation():
    """Who broadcasts the rows of a layer follows from them, and they from what was broadcast of the layer before."""
    job, world = job_of("sancus", "gcn", "strategy.bound=0.01", "strategy.period=null")
    _, events = losses_and_events(job, world)
    asked = [event for event in events if "gnnpar/parallel/sancus/strategy.py" in event.callers]
    assert len(asked) == job.model.num_layers * world
    rest = [e for e in events if e not in asked and not any(each.covers(e) for each in ALLOWED)]
    assert not rest, rest


@pytest.mark.parametrize("strategy", ["graph_parallel", "sar"])
def test_an_epoch_with_a_kept_first_layer_waits_for_nothing(strategy):
    assert_waits(strategy, *job_of(strategy, "gcn", first_layer="cached"))


ON_CPU = [  # where the tensors are the CPU's and are taken for the device's
    Allowed("gnnpar/training/optim.py", "Stepper.step", "torch's own step; a GPU takes DeviceStep"),
    Allowed("gnnpar/parallel/sampling/", "", "samples are put together on the host, of its own tensors"),
]


def assert_waits_on_cpu(job: Job, world: int, gpu: SimulatedGpu, *, sampling: bool = False) -> None:
    gpu.cpu_world(world).run(lambda comm: train(job, comm, before_last=gpu.record))
    allowed = ALLOWED + ON_CPU + OF_A_SAMPLE * sampling
    seen = [event for event in gpu.events if DRAWING not in event.callers]
    assert {str(event) for event in seen if not any(each.covers(event) for each in allowed)} == set()
    assert gpu.events, "nothing was recorded"


def _of_16_bits() -> Iterator[Any]:
    for strategy in STRATEGIES:
        for model in names("model") if strategy in ("single", "graph_parallel") else ("gcn", "gat"):
            if carries(strategy, model):
                quick = model == "gcn" and strategy not in PRESETS
                yield pytest.param(strategy, model, marks=() if quick else pytest.mark.slow)


@pytest.mark.quick(3)
@pytest.mark.parametrize(("strategy", "model"), list(_of_16_bits()))
def test_rows_of_16_bits_wait_for_nothing_either(strategy, model):
    """torch has no autocast of the simulated device: the CPU's tensors are taken for its own."""
    job, world = job_of(strategy, model, dtype=torch.bfloat16)
    assert_waits_on_cpu(job, world, SimulatedGpu(), sampling=strategy in SAMPLING)


@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", ["gcn", "gat", "sage_max", pytest.param("gatv2", marks=pytest.mark.slow)])
def test_parts_out_of_core_wait_for_nothing_either(monkeypatch, model, precision):
    """Pages are storages, which tensors of the simulated device do not own. Copies between host and device, the pager's
    own work, are in tests/parallel/test_paging.py."""
    gpu, paged, recording = SimulatedGpu(), OutOfCoreEngine._paged, threading.Event()

    def noted(engine, part, body):
        def inside():
            if recording.is_set():
                gpu.record()
            with gpu.taking_cpu():
                return body()

        return paged(engine, part, inside)

    monkeypatch.setattr(OutOfCoreEngine, "_paged", noted)
    monkeypatch.setattr(paging, "SMALLEST", 1)
    record, strategy = gpu.record, ("strategy.logical_parts=3",)
    monkeypatch.setattr(gpu, "record", lambda: (recording.set(), record()))
    job, _ = job_of("sar", model, *strategy, dtype=precision, world=1)
    assert_waits_on_cpu(job, 1, gpu)


def test_an_evaluation_waits_once():
    job, _ = job_of("single", "gcn")
    gpu = SimulatedGpu()

    def run(comm):
        engine, _, model, shard = open_rank(job, comm, place=place)
        objective = objective_of(task_of(job), shard, model, comm, job.seed)
        first = evaluate(engine, objective)
        gpu.record()
        assert evaluate(engine, objective) == first

    gpu.world(1).run(run)
    assert [(event.kind, event.function) for event in gpu.events] == [("copy to the host", "NodeObjective.metrics")]


def test_the_simulated_gpu_notes_waits_and_refuses_two_devices():
    """A tool that sees nothing would pass every test above."""
    gpu = SimulatedGpu()
    with gpu.active():
        x = torch.arange(4.0).to(DEVICE)
        gpu.record()
        x[x > 1].sum()
        x.nonzero()
        x.unique()
        float(x[0])
        x.cpu()
        torch.ones(2).to(DEVICE)
        (x + 1).relu()
        kinds = [event.kind for event in gpu.events]
        with pytest.raises(RuntimeError, match="tensors on the device and on the CPU"):
            x.add(torch.ones(4))
        with pytest.raises(RuntimeError, match="tensors on the device and on the CPU"):
            x[torch.arange(2).to(DEVICE)] = torch.ones(2)
    expected = ["boolean index", "nonzero", "unique", "number read", "copy to the host", "copy from the host"]
    assert kinds == expected


def test_what_has_no_fixed_order_on_a_gpu_is_refused_where_one_is_asked_for():
    with SimulatedGpu().active():
        x = torch.arange(4.0).to(DEVICE)
        with pytest.raises(RuntimeError, match=r"aten\.cumsum\.default does not have a deterministic implementation"):
            x.cumsum(0)
        with pytest.raises(RuntimeError, match=r"aten\.bincount\.default does not have a deterministic"):
            x.long().bincount(x)
        x.long().cumsum(0)
        x.index_add(0, torch.zeros(2, dtype=torch.long).to(DEVICE), x[:2])
        torch.use_deterministic_algorithms(False)
        x.cumsum(0)


def test_a_shard_is_split_on_its_device():
    """SAR out of core cuts the shard of the whole graph on the GPU."""
    data, gpu = small_graph(), SimulatedGpu()
    part_of = torch.arange(data.num_nodes) % 3

    def run(comm):
        whole = Shard.open(data, torch.zeros_like(part_of), comm).to(comm.device, torch.float32)
        return split(whole, part_of.to(comm.device), 3)

    (parts,) = gpu.world(1).run(run)
    whole = ThreadWorld(1).run(lambda comm: Shard.open(data, torch.zeros_like(part_of), comm))[0]
    for mine, expected in zip(parts, split(whole, part_of, 3), strict=True):
        assert torch.equal(held(mine.inner.indices), expected.inner.indices)
        assert torch.equal(held(mine.node_ids), expected.node_ids)


def test_check_runs_on_a_device(monkeypatch):
    """`gnnpar check device=cuda`: the model is moved, and the reference stays on the CPU."""
    gpu, devices = SimulatedGpu(), []

    def world(size, *, device):
        devices.append(device)
        return gpu.world(size) if device == DEVICE else ThreadWorld(size, device=device)

    monkeypatch.setattr("gnnpar.verify.conformance.ThreadWorld", world)
    monkeypatch.setattr(
        "gnnpar.verify.conformance.on_device", lambda model, device: move(model) if device == DEVICE else model
    )
    settings = compose(["strategy=graph_parallel", "model=gat"])
    cases = check(settings.strategy, {"gat": settings.model}, worlds=(2,), device=DEVICE)
    assert [case.error for case in cases] == [None]
    assert all(case.passed for case in cases)
    assert devices == [torch.device("cpu"), DEVICE]
