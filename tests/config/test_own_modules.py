"""Modules of the user's own, as research code has them: they may read sys.argv when they are imported."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportInvalidTypeForm=false, reportReturnType=false

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gnnpar import own_modules
from gnnpar.targets import locate

PARSER = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--hidden', type=int, {})\n"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gnnpar", "train", "--of-gnnpar"])
    yield
    own_modules.forget()


def test_a_module_that_parses_arguments_gets_its_defaults() -> None:
    Path("parsing_net.py").write_text(PARSER.format("default=16") + "hidden = parser.parse_args().hidden\n")
    assert locate("parsing_net.hidden") == 16
    assert sys.argv == ["gnnpar", "train", "--of-gnnpar"]


def test_a_module_that_ends_the_program_is_one_line(capsys: pytest.CaptureFixture) -> None:
    Path("asking_net.py").write_text(PARSER.format("required=True") + "hidden = parser.parse_args().hidden\n")
    line = r"asking_net ends the program .* \(asking_net.py: error: the following arguments are required: --hidden\)"
    with pytest.raises(ImportError, match=line):
        locate("asking_net.hidden")
    assert not capsys.readouterr().err
