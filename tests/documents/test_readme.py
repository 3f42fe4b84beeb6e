"""The README is short and whole, its code and its commands run, its figures come from experiments that can be rerun."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

import pyg_nets
from conftest import ROOT, Run
from gnnpar import __version__
from gnnpar.folds.sum import Sum
from gnnpar.models.gcn import GCNConv
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.local import Pass
from gnnpar.partition.shard import cut
from gnnpar.paths import conf_dir
from gnnpar.verify.conformance import small_graph
from tutorial_steps import ANSWER, commands, shape

README = (ROOT / "README.md").read_text(encoding="utf-8")


def rows(section: str) -> list[list[str]]:
    """Cells of the rows of a section's tables, without their headings."""
    text = README.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    parts = (part.strip() for part in text.split("\n\n"))
    tables = [part.splitlines()[2:] for part in parts if part.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for lines in tables for line in lines]


def block(language: str, page: str = README) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_it_is_short() -> None:
    assert README.count("\n") <= 120
    assert len(README.split()) <= 1200
    assert len(rows("Results")) <= 8


def test_the_answers_of_the_experiments_are_short() -> None:
    page = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    answers = page[page.index("\n| situation |") :].partition("\n\n")[0].strip().splitlines()[2:]
    assert 4 <= len(answers) <= 8
    assert all(len(re.sub(r"`|\]\([^)]*\)", "", cell).split()) <= 12 for row in answers for cell in row.split("|"))


def test_every_strategy_has_a_row_of_short_cells_without_numbers() -> None:
    table = {cells[0].strip("`"): cells for cells in rows("Strategies")}
    assert sorted(table) == sorted(file.stem for file in (conf_dir() / "strategy").glob("*.yaml"))
    for name, cells in table.items():
        assert len(cells) == 4, name
        assert all(cells), name
        plain = [re.sub(r"`[^`]*`|\]\([^)]*\)", "", cell) for cell in cells]
        assert max(map(len, plain)) <= 80, name
        assert not re.search(r"\d", " ".join(plain)), name


def test_every_result_names_its_study() -> None:
    assert len(rows("Results")) >= 5
    for question, measured, study in rows("Results"):
        assert re.search(r"\d", measured), question
        named = re.findall(r"`(\w+)`", study)
        assert named, question
        assert all((ROOT / "experiments" / name / "README.md").is_file() for name in named), question


def test_the_code_to_read_is_seven_files_that_exist() -> None:
    text = README.partition("## Dive into the code")[2].partition("\n## ")[0]
    files = re.findall(r"^\d\. `([^`]+)`", text, re.MULTILINE)
    assert len(files) == 7
    assert [name for name in files if not (ROOT / name).is_file()] == []


IMPORTS = """
from collections.abc import Iterable
from torch import Tensor, nn
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph, Local
"""


def test_the_idea_runs() -> None:
    """The model is GCN, and folding by parts is folding the whole."""
    code = block("python", (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8"))
    lines = [line for line in code.splitlines() if line]
    assert len(lines) <= 12
    names: dict[str, Any] = {}
    exec(compile(IMPORTS + code, "concepts.md", "exec"), names)
    data = small_graph()
    part_of = torch.arange(data.num_nodes) % 2
    whole = cut(data, torch.zeros_like(part_of), 1)[0].to(torch.device("cpu"), torch.float64)
    torch.manual_seed(0)
    conv = names["GCNConv"](data.x.shape[1], 4).double()
    expected = GCNConv(data.x.shape[1], 4, aggregate_first=False).double()
    expected.load_state_dict(conv.state_dict())
    view, linked = WholeGraph(whole, Pass(0)), whole.in_degree > 0  # the formula knows no node without in-edges
    torch.testing.assert_close(conv(view, whole.x)[linked], expected(view, whole.x)[linked])
    total = whole.inner.num_dst
    out = names["aggregate"](Sum(), total, [(whole.inner, (whole.x,))])
    torch.testing.assert_close(out, view.aggregate(Sum(), (whole.x,)))
    half = whole.inner.num_src // 2
    cuts = [(0, half), (half, whole.inner.num_src)]
    parts = [(whole.inner.narrow_columns(*ends), (whole.x[slice(*ends)],)) for ends in cuts]
    torch.testing.assert_close(names["aggregate"](Sum(), total, [parts[1], parts[0]]), out)


def test_a_pyg_model_trains_in_three_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = Data(x=torch.randn(60, 8), y=torch.arange(60) % 3, edge_index=torch.randint(0, 60, (2, 300)))
    data.train_mask, data.val_mask, data.test_mask = (torch.arange(60) % 4 == each for each in range(3))
    names: dict[str, Any] = {"Net": pyg_nets.Jumping, "data": data}
    exec(compile(block("py"), "README.md", "exec"), names)
    assert names["logits"].shape == (60, 3)


def test_the_figure_is_drawn_by_its_script(tmp_path: Path) -> None:
    kept = (ROOT / "docs" / "images" / "strategies.svg").read_text(encoding="utf-8")
    assert len(kept) < 200_000
    assert "prefers-color-scheme:dark" in kept
    drawn = tmp_path / "drawn.svg"
    subprocess.run([sys.executable, ROOT / "docs" / "images" / "make_walks.py", drawn], check=True, timeout=120)
    made_by = re.compile(r"Matplotlib v[\d.]+")
    if made_by.findall(kept) == made_by.findall(drawn.read_text(encoding="utf-8")):  # another one draws other paths
        assert drawn.read_text(encoding="utf-8") == kept


def drawn_again(script: str, pattern: str, tmp_path: Path) -> dict[str, str]:
    """Names and texts of what a script of docs/images draws: the files that lie there."""
    images = ROOT / "docs" / "images"
    subprocess.run([sys.executable, images / script, tmp_path], check=True, timeout=60)
    drawn = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    assert drawn == {file.name: file.read_text(encoding="utf-8") for file in images.glob(pattern)}
    return drawn


def test_badges_are_drawn_from_the_files_they_lead_to(tmp_path: Path) -> None:
    drawn = drawn_again("make_badges.py", "badge_*.svg", tmp_path)
    assert f">{__version__}<" in drawn["badge_version.svg"] and all(f"images/{name})" in README for name in drawn)


def test_the_figures_of_the_concepts_are_drawn_by_their_script(tmp_path: Path) -> None:
    drawn = drawn_again("make_concepts.py", "concept_*.svg", tmp_path)
    shown = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    assert all(f"(images/{name})" in shown for name in drawn) and len(drawn) == 4


def without_figures(line: str) -> str:
    """A line without its numbers, its spaces and its units of time."""
    return re.sub("#(us|ms|s|min)", "#", shape(line))


def test_60_seconds_show_what_comes(run_python: Run) -> None:
    """Its commands run, and every line that the README shows is one of theirs, numbers aside."""
    steps = list(commands(block("console")))
    assert len(steps) == 2
    for step in steps:
        done = run_python("-m", *step.line.split())
        assert done.returncode == 0, done.stderr[-3000:]
        lines = {without_figures(line) for line in (done.stdout + done.stderr).splitlines()}
        busy = any("the machine was busy" in line for line in done.stdout.splitlines())
        said = [line for line in step.said if not (busy and ANSWER.match(line))]
        assert [line for line in said if without_figures(line) not in lines] == []


def reproduce(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "experiments" / "reproduce.sh"
    return subprocess.run([script, *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_reproduce_lists_every_experiment_and_refuses_an_unknown_one() -> None:
    listed = [line.split()[0] for line in reproduce().stdout.splitlines()]
    assert listed == sorted(file.parent.name for file in (ROOT / "experiments").glob("*/README.md"))
    assert "15 minutes" in reproduce().stdout
    done = reproduce("nothing")
    line = "there is no experiment nothing; experiments/reproduce.sh lists them\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_reproduce_runs_an_experiment_and_its_report(tmp_path: Path) -> None:
    """A copy of the script beside a study of one line; a changed line is counted."""
    study = tmp_path / "experiments" / "echo"
    study.mkdir(parents=True)
    script = study.parent / "reproduce.sh"
    for file in ROOT.glob("experiments/*.*"):
        (study.parent / file.name).write_bytes(file.read_bytes())
    script.chmod(0o755)
    (study / "README.md").write_text("# Echo\n\n**Command** (1 minute): `run.py`\n\n**Result**\n\n| a |\n| 1 |\n")
    (study / "run.py").write_text("def run(files, *, given=0): files.figure.write_text(str(given))\n")
    (study / "report.py").write_text("def report(files): print(f'| a |\\n| {files.figure.read_text()} |')\n")
    for given, changed in (("1", 0), ("2", 1)):
        env = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
        command = [script, "echo", "--given", given]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr
        where = "lines and figures lie in outputs/reproduced/echo/experiments/echo"
        assert done.stdout.endswith(f"\n{changed} lines of these tables differ from those of its pages; {where}\n")
        assert "1 minute" in done.stdout
