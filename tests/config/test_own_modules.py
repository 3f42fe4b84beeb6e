"""Classes of the working directory, named by `_target_`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gnnpar.targets import locate


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_locate_module_of_working_directory_imports_it() -> None:
    Path("own_net_here.py").write_text("hidden = 16\n")
    assert locate("own_net_here.hidden") == 16


def test_locate_module_of_working_directory_comes_after_installed_ones() -> None:
    Path("difflib.py").write_text("raise ValueError\n")
    assert locate("difflib.Differ").__module__ == "difflib"


def test_locate_module_that_exits_raises_one_line() -> None:
    Path("asking_net.py").write_text("import sys\nsys.exit(2)\n")
    with pytest.raises(ImportError, match=r"asking_net ends the program when it is imported \(exit code 2\)"):
        locate("asking_net.hidden")


def test_locate_module_that_parses_arguments_gets_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gnnpar", "train", "--of-gnnpar"])
    parser = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--hidden', type=int, default=16)\n"
    )
    Path("parsing_net.py").write_text(parser + "hidden = parser.parse_args().hidden\n")
    assert locate("parsing_net.hidden") == 16
    assert sys.argv == ["gnnpar", "train", "--of-gnnpar"]
