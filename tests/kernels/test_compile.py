"""Kernel variants compile ahead of time: all for sm_90, the main ones for three other GPUs; none spills, and hot loops
load 16 bytes at once."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STATIC = HERE.parents[1] / "kernels" / "bench" / "static.py"
KERNELS = HERE.parents[1] / "kernels" / "gnnpar_kernels"
FILES = sorted(KERNELS.glob("**/triton*.py"))
MODULES = [
    "triton_rows",
    "attend.triton",
    "attend.triton_grad",
    "attend_v2.triton",
    "dropout.triton",
    "gather.triton",
    "quantize.triton",
]


def _static(*arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(HERE.parents[1] / "kernels")
    command = [sys.executable, str(STATIC), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _reports(target: str, *options: str) -> list[dict]:
    return [json.loads(line) for line in _static(target, *options).splitlines()]


def _check(rows: list[dict]) -> None:
    assert rows
    assert not [row["name"] for row in rows if row["spills"]]
    assert not [row for row in rows if row["wide"] and row["target"] == "sm_90" and not row["wide_loads"]]


@pytest.fixture(scope="module")
def first_variants() -> list[dict]:
    """By one process: triton takes longer to import than to compile them."""
    return _reports("sm_90", *MODULES, "--first")


@pytest.mark.parametrize("module", MODULES)
def test_a_variant_of_every_kernel(first_variants, module):
    _check([row for row in first_variants if row["module"] == module])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("module", MODULES)
def test_all_variants(module):
    _check(_reports("sm_90", module))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_main_variants(target, module):
    _check(_reports(target, module, "--main"))


def test_no_kernel_adds_atomically():
    """The order of atomic sums varies from run to run, and torch cannot refuse what it does not know."""
    assert not [path.name for path in FILES if "atomic_" in path.read_text()]


def test_every_kernel_is_compiled(first_variants):
    """A kernel that no case of `bench/ahead.py` launches would fail at its first user. Functions without integers that
    vary are compiled with the kernels that call them."""
    launched = {
        (".".join(path.relative_to(KERNELS).with_suffix("").parts), name)
        for path in FILES
        for text in (path.read_text(),)
        for name in re.findall(r"^@triton\.jit.*\ndef (\w+)", text, re.MULTILINE)
        if re.search(rf"^@triton\.jit\(do_not.*\ndef {name}\b|^\s+{name}\[", text, re.MULTILINE)
    }
    compiled = {(row["module"], row["kernel"]) for row in first_variants}
    assert len(launched) > 8
    assert launched <= compiled
    assert {module for module, _ in compiled} == set(MODULES)


def test_the_table_of_machine_code_is_whole():
    """Made by `python kernels/bench/static.py --table`, by both versions of Triton that are supported; `f056489`: the
    kernels before they were made ready for a GPU."""
    rows: list[dict[str, str]] = []
    for table in (STATIC.parent / "results").glob("static-*.csv"):
        with table.open(newline="") as file:
            rows += csv.DictReader(file)
    groups = {(row["kernels"], row["triton"], row["target"]) for row in rows}
    assert {target for _, _, target in groups} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert {(kernels, version.rsplit(".", 1)[0]) for kernels, version, _ in groups} == {
        (kernels, version) for kernels in ("f056489", "now") for version in ("3.6", "3.9")
    }
    for kernels in ("f056489", "now"):
        names = [
            {row["name"] for row in rows if (row["kernels"], row["triton"], row["target"]) == group}
            for group in groups
            if group[0] == kernels
        ]
        assert all(each == names[0] for each in names), "the same kernels everywhere"
    assert names[0] == set(_static("--names").splitlines()), "kernels have changed: make the table again"
    spilling = {(row["triton"], row["target"], row["name"], row["spills"]) for row in rows if row["spills"] != "0"}
    assert not spilling
