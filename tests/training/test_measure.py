"""Fidelity, evaluation and memory of an epoch against other figures; a probe that training does not notice."""

import math
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from composing import rest_slow, settings_of
from conftest import Run
from gnnpar.cli.train import run_training
from gnnpar.codecs.codec import BFloat16, CodecConfig, ConfigDefaults, Drop, Identity, _Cast
from gnnpar.comm import ThreadWorld
from gnnpar.comm.threads import ThreadCommunicator
from gnnpar.data.tasks import make_task
from gnnpar.files import read_json
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.objective import NodeObjective
from gnnpar.track.console import Lines, probe_line
from gnnpar.track.jsonl import read_rows
from gnnpar.training import meter, predict
from gnnpar.training.loop import refuse_unequal_weights
from gnnpar.training.meter import EpochMeter, evaluate, fidelity

LONE = ThreadWorld(1).communicators()[0]


def test_fidelity_against_hand_computed_figures() -> None:
    exact = {"layers.0.w": torch.tensor([3.0, 4.0]), "decoder.w": torch.tensor([0.0])}
    gradient = {"layers.0.w": torch.tensor([4.0, 3.0]), "decoder.w": torch.tensor([0.0])}
    found = fidelity(gradient, exact, LONE)
    assert found["fidelity/cosine"] == pytest.approx(24 / 25)
    assert found["fidelity/relative_error"] == pytest.approx(math.sqrt(2) / 5)
    assert found["fidelity/layers"]["decoder"] == [None, None]
    worst = found["fidelity/worst_layer"]
    assert found["fidelity/worst_relative_error"] == found["fidelity/layers"][worst][1]
    assert found["fidelity/worst_relative_error"] == max(
        e for _, e in found["fidelity/layers"].values() if e is not None
    )


def test_fidelity_counts_a_parameter_once_and_merges_stages() -> None:
    """Ranks of one stage hold the same names, ranks of another stage other names."""

    def body(comm: ThreadCommunicator) -> dict[str, Any]:
        name = "layers.0.w" if comm.rank < 2 else "layers.1.w"
        return fidelity({name: torch.tensor([1.0, 0.0])}, {name: torch.tensor([1.0, 1.0])}, comm)

    first, second, third = ThreadWorld(3).run(body)
    assert (second, third) == ({}, {})
    assert first["fidelity/cosine"] == pytest.approx(2 / math.sqrt(2 * 4))
    assert list(first["fidelity/layers"]) == ["layers.0", "layers.1"]


@pytest.mark.parametrize(("task_name", "out_dim"), [("single_label", 3), ("binary", 1), ("multi_label", 3)])
@pytest.mark.parametrize("world", [1, 3])
def test_metrics_do_not_depend_on_the_number_of_ranks(task_name, out_dim: int, world: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(41, out_dim, generator=generator)
    y = torch.randint(0, 2, (41, 3), generator=generator).float()
    y = y if task_name == "multi_label" else y[:, 0].long()
    train = torch.rand(41, generator=generator) < 0.5
    masks = {"train_mask": train, "val_mask": ~train, "test_mask": torch.zeros(41, dtype=torch.bool)}
    task = make_task(task_name, 3)

    def body(comm: ThreadCommunicator) -> dict[str, float | None]:
        mine = torch.arange(41) % world == comm.rank
        engine: Any = SimpleNamespace(drain=lambda: None, predict=lambda: logits[mine])
        rows = {name.removesuffix("_mask"): mask[mine].nonzero().flatten() for name, mask in masks.items()}
        shard: Any = SimpleNamespace(y=y[mine], rows_of_split=rows)
        return evaluate(engine, NodeObjective(task, shard, comm))

    everyone = ThreadWorld(world).run(body)
    assert all(values == everyone[0] for values in everyone)
    for split in ("train", "val"):
        mask = masks[f"{split}_mask"]
        expected = task.value(task.statistics(logits[mask], y[mask]))
        assert everyone[0][f"metric/{split}"] == pytest.approx(expected, abs=1e-12)
    assert everyone[0]["metric/test"] is None


def test_pinned_memory_is_counted_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes.peak": 99}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "reset_peak_host_memory_stats", lambda: stats.update({"allocated_bytes.peak": 3}))
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: stats)
    with meter.measure_epoch(torch.device("cuda")) as report:
        stats["allocated_bytes.peak"] = 5
    assert (report.peak, report.pinned) == (7, 5)


def test_peak_of_an_epoch_is_exact() -> None:
    """Two buffers of 4 MB live at once on top of what was there, a third only after one of them has gone."""
    held = torch.zeros(1_000_000)
    before = sum(meter.live_storages().values())
    with meter.measure_epoch(torch.device("cpu")) as report:
        a = held + 1
        b = a + 1
        del a
        c = b + 1
        del b, c
    assert report.peak == pytest.approx(before + 8_000_000, abs=64)  # the constants are tensors for a moment


def test_activations_are_what_autograd_saves() -> None:
    x = torch.ones(1000, requires_grad=True)
    with meter.measure_epoch(torch.device("cpu")) as report:
        y = x.exp()  # saves its result: 4000 bytes; x was there before
        (y * x).sum().backward()
    assert report.activations == 4000
    assert x.grad is not None
    assert torch.allclose(x.grad, 2 * y.detach())


def test_bytes_of_an_optimizer() -> None:
    weight = torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(100)
    optimizer.step()
    assert meter.optimizer_nbytes(optimizer.state_dict()) == 2 * 400 + 4


def test_the_window_holds_what_ran_inside_and_phases_add_up() -> None:
    comm = ThreadWorld(1).communicators()[0]
    comm.ledger.counted("evaluate", 1000)
    meter = EpochMeter(comm)
    with meter, comm.clock("compute"):
        comm.ledger.counted("reduce", 10)
        torch.zeros(10_000_000).sum()
    figures = meter.read()
    assert figures["bytes"] == {"reduce": 10}
    assert sum(figures["phases"].values()) == pytest.approx(figures["seconds"], rel=0.02)


def test_unequal_weights_name_the_parameter_and_the_rank() -> None:
    def body(comm: ThreadCommunicator) -> None:
        model = nn.Linear(2, 3)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        refuse_unequal_weights(model, comm)
        if comm.rank == 2:
            model.bias.data[1] += 1e-6
        with pytest.raises(ValueError, match=r"^bias of the model has other initial values on rank 2 than on rank 0"):
            refuse_unequal_weights(model, comm)

    ThreadWorld(3).run(body)


def test_ranks_with_other_pairs_to_score_are_refused() -> None:
    def body(comm: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=r"rank 1 has another content of pairs\.npy than rank 0"):
            predict._refuse_unlike(f"hash {comm.rank}", "content of pairs.npy", comm)

    ThreadWorld(2).run(body)


NET = """
import numpy, torch
from torch_geometric.nn import GCNConv

class Net(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = GCNConv(in_channels, out_channels)
        self.scale = torch.nn.Parameter(torch.tensor(numpy.random.rand(out_channels), dtype=torch.float32))

    def forward(self, x, edge_index):
        return self.conv(x, edge_index) * self.scale
"""


def test_weights_from_numpy_are_one_line(run_here: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    done = run_here("train", "model=pyg", "model.target=net.Net", "dataset=sbm", "comm=threads", "world_size=2")
    assert done.returncode != 0
    assert "scale of the model has other initial values on rank 1" in done.stderr
    assert "Traceback" not in done.stderr


TINY = ("comm=threads", "world_size=2", "threads_per_rank=1", "tracker=jsonl", "epochs=8", "eval_every=4", "model=gat")
TINY += ("model.hidden=16", "dataset.num_nodes=300", "dataset.avg_degree=6")


class _Tiring(_Cast):
    """Its rows depend on all that it has encoded before: nothing may use it beside training."""

    def __init__(self) -> None:
        super().__init__(None)
        self.calls = 0

    def begin_epoch(self, epoch: int) -> None:
        self.calls += 1

    def encode(self, rows: Any, index: Any, tag: Any, peer: int) -> Any:
        self.calls += 1
        return super().encode(tuple(t * (1 + 0.003 * self.calls) for t in rows), index, tag, peer)


@dataclass(frozen=True, kw_only=True)
class Tiring(ConfigDefaults):
    exactness = frozenset({"quantized"})

    def build(self, lists: Any, comm: Any, seed: int) -> Any:
        return _Tiring()


def train(folder: Path, codec: CodecConfig | None, *overrides: str) -> tuple[list[Any], dict[str, Any]]:
    settings = settings_of(*TINY, *overrides)
    if codec is not None:
        settings = replace(settings, strategy=GraphParallel(codec=codec))
    folder.mkdir()
    assert run_training(settings, folder).status == "completed"
    return read_rows(folder), read_json(folder / "result.json")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("codec", "first_layer"), product([Identity(), BFloat16(), Tiring(), Drop()], ["live", "cached"])
)
def test_losses_with_and_without_probes_are_the_same_bits(tmp_path: Path, codec: CodecConfig, first_layer: str) -> None:
    model = "model=sage" if first_layer == "cached" else "model=gat"
    common = (f"first_layer={first_layer}", model)
    plain, without = train(tmp_path / "plain", codec, *common)
    probed, result = train(tmp_path / "probed", codec, *common, "fidelity_every=3")
    assert [row["loss/train"] for row in probed] == [row["loss/train"] for row in plain]
    assert [row.get("metric/test") for row in probed] == [row.get("metric/test") for row in plain]
    assert [row["comm/total_bytes"] for row in probed] == [row["comm/total_bytes"] for row in plain]
    assert [row["epoch"] for row in probed if "fidelity/cosine" in row] == [0, 3, 6]
    assert without["fidelity"] is None
    assert all(row["time/timed"] == 0 for row in probed if "fidelity/cosine" in row)  # no such epoch counts as time
    found = result["fidelity"]
    assert found["probes"] == 3
    if isinstance(codec, Identity):
        assert found["worst"]["relative_error"] < 1e-5
    else:
        assert found["worst"]["relative_error"] >= found["relative_error"]["max"] > 1e-4
        assert found["cosine"]["min"] < 1 - 1e-9


@pytest.mark.quick(1)
@pytest.mark.parametrize("strategy", rest_slow(["adaqp", "adaqp_q", "sar"]))
def test_strategies_with_a_memory_do_not_notice_a_probe(tmp_path: Path, strategy: str) -> None:
    """AdaQP traces what it sends and reassigns bits by it; link costs, which decide too, are those of the first run."""
    epochs = ["epochs=5"] if strategy == "sar" else ["epochs=12", "strategy.codec.period=3"]
    plain, _ = train(tmp_path / "plain", None, f"strategy={strategy}", *epochs)
    profile = tmp_path / "plain" / "profile.json"
    given = [f"profile={profile}"] if profile.exists() else []
    probed, _ = train(tmp_path / "probed", None, f"strategy={strategy}", *epochs, "fidelity_every=2", *given)
    assert [row["loss/train"] for row in probed] == [row["loss/train"] for row in plain]


def test_the_console_shows_the_last_probe(capsys: pytest.CaptureFixture) -> None:
    lines = Lines(2, every=1)
    probe = {"cosine": 0.98711, "relative_error": 0.1, "layers": {}}
    probe |= {"worst_layer": "layers.1", "worst_relative_error": 0.123}
    row = {"loss/train": 1.5, "time/epoch_seconds": 0.25}
    lines.log({**row, "epoch": 0, **{f"fidelity/{name}": value for name, value in probe.items()}})
    lines.log({**row, "epoch": 1})
    for line in capsys.readouterr().out.splitlines():
        assert "cosine 0.9871, worst layers.1 off by 12 %" in line
    assert probe_line(row) == ""
