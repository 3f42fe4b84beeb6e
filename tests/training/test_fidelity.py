"""The fidelity probe: what it finds, and that training does not notice it."""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from composing import rest_slow, settings_of
from gnnpar.cli.train import run_training
from gnnpar.codecs.codec import BFloat16, CodecConfig, ConfigDefaults, Drop, Identity, _Cast
from gnnpar.files import read_json
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.track.console import Lines, probe_line
from gnnpar.track.jsonl import read_rows

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
