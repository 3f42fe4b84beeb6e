"""What a third attack found: attributes that hide tensors, plugins that nobody installed, structure from the wire."""

import subprocess
import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest
import torch

from gnnpar import targets
from gnnpar.config.compose import compose
from gnnpar.folds.block import Block
from gnnpar.parallel.sequential.cuts import _Layout, _pack
from gnnpar.settings import ConfigError

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """sys.path and modules as they were, afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mine", "evil", "plug"):
            del sys.modules[name]
    invalidate_caches()


def package(folder: Path, name: str, *, touch: Path) -> None:
    """A distribution that brings YAML, and whose import leaves a file."""
    (folder / f"{name}-1.dist-info").mkdir(parents=True)
    (folder / f"{name}-1.dist-info" / "METADATA").write_text(METADATA.format(name=name))
    (folder / f"{name}-1.dist-info" / "entry_points.txt").write_text(f"[gnnpar.conf]\n{name} = {name}.conf\n")
    (folder / name / "conf" / "model").mkdir(parents=True)
    (folder / name / "__init__.py").write_text(f"open({str(touch)!r}, 'w').close()\n")
    (folder / name / "conf" / "__init__.py").write_text("")
    (folder / name / "conf" / "model" / f"{name}.yaml").write_text(f"_target_: {name}.models.Net\n")


def test_a_file_names_of_a_plugin_what_its_yaml_names(tmp_path: Path, importing: None) -> None:
    package(tmp_path, "plug", touch=tmp_path / "imported")
    (tmp_path / "plug" / "models.py").write_text("class Net: ...\n")
    (tmp_path / "plug" / "danger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Net: ...\n")
    sys.path.append(str(tmp_path))
    invalidate_caches()
    targets.refuse_foreign({"_target_": "plug.models.Net"}, "a file", remedy="no")
    for other in ("plug.danger.Net", "plug.__main__.Net", "plug.models.Other"):
        with pytest.raises(ValueError, match="which is no class of gnnpar or of an installed plugin"):
            targets.refuse_foreign({"_target_": other}, "a file", remedy="no")
    assert not (tmp_path / "ran").exists()


def test_edges_of_a_peer_are_those_of_its_partition() -> None:
    dst, src = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 1, 2])
    block = Block.from_edges(dst, src, num_dst=3, num_src=3, compress=True)
    layout = _Layout(num_rows=3, num_columns=3, num_edges=4, edge_ids=False)
    sent = _pack(block)
    assert torch.equal(layout.unpack(sent.clone(), 1).indices, block.indices)
    for place, number in ((0, 1), (1, 900), (1, -3), (2, 2), (3, 5), (4, -1), (7, 3)):
        bad = sent.clone()
        bad.view(torch.int32)[place] = number
        with pytest.raises(ValueError, match="rank 1 has sent other edges than its partition has"):
            layout.unpack(bad, 1)


@pytest.mark.parametrize("override", ["codec=bf16", "codec=uniform"])
def test_a_plan_and_a_codec_beside_it_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="the plan sets the strategy; leave one of them out"):
        compose(["plan=plan.json", override])


@pytest.mark.parametrize("override", ["seed=" + "9" * 5_000, "seed=range(0," + "9" * 400 + ")"])
def test_numbers_beyond_those_of_python_are_one_line(tmp_path: Path, override: str) -> None:
    command = [sys.executable, "-P", "-m", "gnnpar", "train", "-m", override, "dataset=sbm"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2 and done.stderr.startswith("gnnpar: ") and done.stderr.count("\n") == 1
