"""The README's table of strategies is whole, its figures come from experiments; these can be found and rerun."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

from conftest import ROOT
from gnnpar.paths import conf_dir

README = (ROOT / "README.md").read_text(encoding="utf-8")


def table() -> dict[str, list[str]]:
    """strategy -> its cells: one line, exactness, when, measured."""
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", README.partition("## Strategies")[2].partition("\n`strategy.")[0], re.M)
    return {name: [cell.strip() for cell in re.split(r" \| ", cells)] for name, cells in rows}


def test_every_strategy_has_a_row() -> None:
    of_class: dict[str, set[str]] = {}
    for file in (conf_dir() / "strategy").glob("*.yaml"):
        of_class.setdefault(yaml.safe_load(file.read_text(encoding="utf-8"))["_target_"], set()).add(file.stem)
    rows = table()
    assert [names for names in of_class.values() if not names & rows.keys()] == []


def test_every_row_says_when_and_names_where_it_was_measured() -> None:
    for name, cells in table().items():
        assert len(cells) == 4, name
        assert all(cells), name
        named = re.findall(r"`(\w+)`\)", cells[3])
        assert named or cells[3].startswith("not measured"), name
        assert all((ROOT / "experiments" / folder / "README.md").is_file() for folder in named), name


def reproduce(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "experiments" / "reproduce.sh"
    return subprocess.run([script, *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_reproduce_lists_every_experiment_and_refuses_an_unknown_one(tmp_path: Path) -> None:
    listed = [line.split()[0] for line in reproduce().stdout.splitlines()]
    assert listed == sorted(file.parent.name for file in (ROOT / "experiments").glob("*/README.md"))
    assert "15 minutes" in reproduce().stdout
    done = reproduce("nothing")
    assert (done.returncode, done.stderr) == (
        2,
        "there is no experiment nothing; experiments/reproduce.sh lists them\n",
    )


def test_reproduce_runs_an_experiment_and_its_report(tmp_path: Path) -> None:
    """A copy of the script beside a study of one line; a changed line is counted."""
    study = tmp_path / "echo"
    study.mkdir()
    script = tmp_path / "reproduce.sh"
    script.write_bytes((ROOT / "experiments" / "reproduce.sh").read_bytes())
    script.chmod(0o755)
    (study / "README.md").write_text("# Echo\n\n**Command** (1 minute): `run.py`\n\n**Result**\n\n| a |\n| 1 |\n")
    (study / "run.py").write_text("import sys; open('result', 'w').write(sys.argv[1])\n")
    (study / "report.py").write_text("print('| a |'); print('|', open('result').read(), '|')\n")
    for given, changed in (("1", 0), ("2", 1)):
        done = subprocess.run(
            [script, "echo", given],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": "/usr/bin:/bin", "PYTHON": "python3"},
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"\n{changed} lines of these tables differ from the README's\n")
        assert "1 minute" in done.stdout
