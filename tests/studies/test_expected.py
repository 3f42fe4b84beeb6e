"""Headline numbers of experiments lie where expected.toml has them; the environment that made them fits the package."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from conftest import ROOT

EXPERIMENTS = ROOT / "experiments"
MEASURED = {file.parent.name for kind in ("jsonl", "csv") for file in EXPERIMENTS.glob(f"*/results.{kind}")}


def loaded(name: str) -> Any:
    """A module that lies beside the experiments."""
    spec = importlib.util.spec_from_file_location(f"experiments_{name}", EXPERIMENTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


expected = loaded("expected")


def test_headline_numbers_lie_where_a_re_run_is_expected() -> None:
    ranges = tomllib.loads(expected.FILE.read_text(encoding="utf-8"))
    assert MEASURED - ranges.keys() == set(), "headline numbers go to expected.toml"
    for name, entries in ranges.items():
        assert 2 <= len(entries) <= 4, name
        text = "\n".join(page.read_text(encoding="utf-8") for page in (EXPERIMENTS / name).glob("*.md"))
        assert [line for inside, line in expected.verdicts(name, text) if not inside] == []


def test_a_number_outside_or_missing_is_told() -> None:
    text = (EXPERIMENTS / "sar_memory" / "README.md").read_text(encoding="utf-8")
    moved = text.replace("| 19.1 | 6.9x | 0.38 |", "| 19.1 | 6.9x | 0.45 |")
    assert moved != text
    assert expected.verdicts("sar_memory", moved)[0] == (
        False,
        "OUTSIDE 0.36 to 0.4: 0.45 (GAT, random cut, 8 ranks: SAR of graph parallelism)",
    )
    gone = "\n".join(line for line in text.splitlines() if "| gat | random | sar, prefetch 0 |" not in line)
    assert [(inside, line[:8]) for inside, line in expected.verdicts("sar_memory", gone)] == [(False, "missing:")] * 3
    assert expected.verdicts("nothing", text) == []


def test_what_a_report_prints_is_judged_and_what_is_expected_is_listed() -> None:
    """As reproduce.sh calls it."""
    script = [sys.executable, str(EXPERIMENTS / "expected.py")]
    report = (EXPERIMENTS / "sar_memory" / "README.md").read_text(encoding="utf-8")
    for text, code in ((report, 0), (report.replace("| 0.38 |", "| 0.48 |"), 1)):
        done = subprocess.run([*script, "sar_memory"], input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, len(done.stdout.splitlines())) == (code, 3)
    listed = subprocess.run([*script, "--list", "sar_memory"], capture_output=True, text=True, check=True).stdout
    assert "0.36 to 0.4: GAT, random cut, 8 ranks" in listed


def test_the_lock_file_of_the_gpu_machine_has_hashes() -> None:
    lines = (ROOT / "kernels" / "bench" / "requirements-gpu.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[\w-]+==\S+ --hash=sha256:[0-9a-f]{64}", line)] == []
    assert len(pins) > 20


def test_the_lock_file_is_within_what_the_package_asks_for() -> None:
    text = (EXPERIMENTS / "requirements.lock").read_text(encoding="utf-8")
    hashed = dict(re.findall(r"^([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE))
    assert len(hashed) == sum(not line.startswith("#") for line in text.splitlines()), "a line without a hash"
    pins = hashed | dict(re.findall(r"pip install (torch)==(\S+)$", text, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["dev"])]
    assert [str(r) for r in asked if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"))] == []
