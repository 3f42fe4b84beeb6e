"""Pages: what they name exists, links move with them, commands run, figures and tables are those of experiments."""

import importlib.util
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

import pyg_nets
from conftest import ROOT, Run
from gnnpar import __version__
from gnnpar.cli.main import COMMANDS
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


BASES = tuple(ROOT / each for each in ("", "src", "src/gnnpar", "kernels", "kernels/gnnpar_kernels", "conf"))
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
MODULE = re.compile(r"gnnpar(?:_kernels)?(?:\.\w+)+")
FILE_TYPES = {".cfg", ".json", ".jsonl", ".lock", ".md", ".py", ".sh", ".svg", ".toml", ".txt", ".yaml", ".yml"}
TOP = {"conf", "docs", "examples", "experiments", "kernels", "src", "tests"}
OF_A_READER = re.compile(
    r"(outputs|multirun|runs|checkpoint|export|shards|site|part-N|epoch-N|lazy_kit)\b"
)  # made, not kept
TEST = re.compile(r"(?:tests/)?(?P<file>(?:\w+/)*test_\w+\.py)::(?P<name>\w+)")  # its folder may be left out
COMMAND = re.compile(r"(\$ )?(torchrun .* -m |python -m |srun )?gnnpar \w")
PLACEHOLDER = re.compile(r"\b(NAME|FOLDER|OP|STUDY|ARCH|mine)\b")
DOCUMENTS = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "kernels/README.md", "experiments/README.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)


def looks_like_a_path(span: str) -> bool:
    """A folder of the repository and what is in it, or a file with its folder; not `a/b` of a formula."""
    if not PATH.fullmatch(span) or "/" not in span or OF_A_READER.match(span) or PLACEHOLDER.search(span):
        return False
    return span.partition("/")[0] in TOP or Path(span).suffix in FILE_TYPES or span.endswith("/")


def is_there(span: str, page: Path) -> bool:
    return any(any(base.glob(span.rstrip("/"))) for base in (*BASES, page.parent))


def module_is_there(name: str) -> bool:
    """`gnnpar.a.b`, or a name that the text of `gnnpar/a` has; read, not imported."""
    parts = name.split(".")
    root = ROOT / ("src" if parts[0] == "gnnpar" else "kernels")
    for end in range(len(parts), 0, -1):
        place = root.joinpath(*parts[:end])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.is_file():
            rest = parts[end:]
            return not rest or re.search(rf"\b{rest[0]}\b", file.read_text(encoding="utf-8")) is not None
    return False


def has_test(file: str, name: str) -> bool:
    found = [each.read_text(encoding="utf-8") for each in (ROOT / "tests").rglob(file)]
    return any(f"\ndef {name}(" in text for text in found)


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_document_names_exists(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    spans = {span.removeprefix("python ") for span in SPAN.findall(text)}
    paths = {span for span in spans if looks_like_a_path(span)}
    modules = {span for span in spans if MODULE.fullmatch(span) and Path(span).suffix not in FILE_TYPES}
    modules -= {"gnnpar.conf"}  # the group of entry points
    missing = [span for span in paths if not is_there(span, page)]
    missing += [name for name in modules if not module_is_there(name)]
    missing += [span for span in spans if (at := TEST.fullmatch(span)) and not has_test(at["file"], at["name"])]
    assert sorted(missing) == []


def test_every_finding_of_the_gpu_page_names_its_tests() -> None:
    """That they exist, the test above says."""
    text = (ROOT / "docs" / "guide" / "gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 17))
    assert [number for number, held in rows if not all(TEST.fullmatch(span) for span in SPAN.findall(held))] == []
    assert all(SPAN.findall(held) for _, held in rows)


@pytest.mark.parametrize(
    "page",
    [page for page in DOCUMENTS if page.parent.name != "tutorials"],  # their commands run
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_commands_and_choices_exist(page: Path) -> None:
    """`gnnpar COMMAND group=choice`: the command is one, and the choice has its YAML."""
    text = page.read_text(encoding="utf-8")
    lines = [*SPAN.findall(FENCE.sub("", text)), *"\n".join(FENCE.findall(text)).splitlines()]
    calls = [line.partition("gnnpar ")[2].partition("  ")[0].split() for line in lines if COMMAND.match(line)]
    assert [call[0] for call in calls if call[0].partition("|")[0] not in COMMANDS] == []
    groups = {folder.name for folder in (ROOT / "conf").iterdir() if folder.is_dir()}
    choices = [
        word.partition("=") for call in calls for word in call if "=" in word and word.partition("=")[0] in groups
    ]
    named = [(group, name) for group, _, names in choices for name in names.split(",") if not PLACEHOLDER.search(name)]
    assert [each for each in named if not (ROOT / "conf" / each[0] / f"{each[1]}.yaml").is_file()] == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_layers_are_those_of_the_import_contract(page: str) -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    layers = next(each["layers"] for each in tools["importlinter"]["contracts"] if each["type"] == "layers")
    assert "```\n" + "\n".join(layers) + "\n```" in (ROOT / page).read_text(encoding="utf-8")


def test_what_is_not_there_is_noticed() -> None:
    assert looks_like_a_path("comm/exchange.py")
    assert looks_like_a_path("tests/nowhere")
    assert not looks_like_a_path("and/or")
    assert not is_there("comm/nowhere.py", ROOT / "README.md")
    assert not module_is_there("gnnpar.nowhere.thing")
    assert not has_test("test_cofree.py", "test_bytes")
    assert has_test("conformance/test_methods.py", "test_evaluation_is_exact")
    assert module_is_there("gnnpar.graph")


def test_the_glossary_has_every_term_once_in_order_with_its_file() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+\.) \| `([^`]+)` \|$", text, re.MULTILINE)
    assert len(rows) > 80
    assert len(rows) == text.count("\n| ") - 1, "a row has a term, a sentence that ends in a period, and a file"
    terms = [re.sub(r"[^a-z ]", "", term.lower()) for term, _, _ in rows]
    assert terms == sorted(set(terms))
    assert [file for _, _, file in rows if not is_there(file, ROOT / "docs" / "glossary.md")] == []


DOCS = ROOT / "docs"


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"site_{name}", DOCS / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = loaded("hooks")


FENCED = "```python\na[b](../c)\n```\n"


@pytest.mark.parametrize(
    ("text", "page", "moved"),
    [
        ("![x](docs/images/a.png) [p](docs/guide/p.md#t)", "README.md", "![x](images/a.png) [p](guide/p.md#t)"),
        ("[s](sar_speed/README.md)", "experiments/README.md", "[s](sar_speed/README.md)"),
        ("[e](../../experiments/README.md)", "docs/adr/0001.md", "[e](../experiments/README.md)"),
        (FENCED, "docs/adr/0001.md", FENCED),
        ("[w](https://x.org/a)", "README.md", "[w](https://x.org/a)"),
    ],
)
def test_links_hold_where_the_site_puts_a_page(text: str, page: str, moved: str) -> None:
    assert hooks.moved(text, page) == moved


def pages(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    return [page for each in (node.values() if isinstance(node, dict) else node) for page in pages(each)]


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere() -> None:
    listed = pages(hooks.navigation())
    assert len(listed) == len(set(listed))
    written = {p.relative_to(DOCS).as_posix(): p for p in DOCS.rglob("*.md")}
    brought = {hooks.in_site(place): ROOT / place for place in hooks.outside()}
    assert {place for place in (*written, *brought) if place.endswith(".md")} <= set(listed)
    generated = {f"{page}.md" for page in hooks.MADE}
    assert set(listed) - {*written, *brought} == generated
    for page in (*written.values(), *(p for p in brought.values() if p.suffix == ".md")):
        for target in re.findall(r"\]\(([^)#\s]+)", hooks.FENCE.sub("", page.read_text(encoding="utf-8"))):
            if "://" not in target and not any(target.endswith(page) for page in generated):
                meant = (page.parent / target).resolve()
                assert meant.exists(), f"{page} points at {target}"
                place = hooks.in_site(meant.relative_to(ROOT).as_posix())
                assert place in brought or meant.is_relative_to(DOCS), f"{target} of {page} is not in the site"


def test_the_navigation_has_at_most_thirty_entries_before_a_group_is_unfolded() -> None:
    assert sum(len(entries) for tab in hooks.navigation() for entries in tab.values()) <= 30


def test_every_interface_that_is_documented_exists() -> None:
    named = [name for page in (DOCS / "api").glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)]
    assert len(named) > 20
    assert all(pkgutil.resolve_name(name) for name in named)


def test_nothing_is_fetched_from_elsewhere() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in text
    assert "://" not in text


def test_tables_say_what_runs_and_what_does_not() -> None:
    measured = loaded("measured")
    cells = {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]]
        for row in measured.codecs_table(["single", "graph_parallel"], ["bf16", "identity"]).splitlines()
    }
    assert cells["`single`"] == ["-", "-"]
    assert cells["`graph_parallel`"][1] == "exact"
    assert 1e-4 < float(cells["`graph_parallel`"][0]) < 1
    assert "| `sar` | " in measured.models_table(["sar"], ["gcn"])
    assert {measured.model_of(model).num_layers for model in measured.names("model")} == {3}
    assert "`central_marginal`: exact" in measured.overlaps_table(["graph_parallel"])

    def refused() -> float:
        raise ValueError("rank 0: not with | this")

    assert measured.attempt(refused) == "no: not with / this"


def test_the_reference_has_every_command_key_and_member() -> None:
    reference = loaded("reference")
    keys, result = reference.keys(), reference.result()
    assert "| `epochs` | `100` | a whole number >= 1 | " in keys
    assert "| `checkpoint.every` | `0` | a whole number >= 0 | " in keys
    for group in reference.GROUPS:
        for file in (ROOT / "conf" / group).glob("*.yaml"):
            assert f"### {group}={file.stem}\n" in keys
    schema = json.loads((ROOT / "src/gnnpar/training/result/result.schema.json").read_text(encoding="utf-8"))
    assert all(f"| `{name}` | " in result for name in schema["properties"])
    assert "--latex" in reference.commands()


def test_tables_are_made_once_for_the_same_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "inputs", lambda: "one")
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    monkeypatch.delenv("GNNPAR_SITE_TABLES", raising=False)
    (tmp_path / "build" / "site").mkdir(parents=True)
    (tmp_path / "build" / "site" / "convergence-one.md").write_text("kept")
    assert hooks.made("convergence") == "kept"


def test_losses_are_of_a_training_that_learns() -> None:
    """Random guesses among eight classes have a loss of 2.08: strategies that are compared there are alike."""
    measured = loaded("measured")
    data = measured.chosen("dataset", "sbm", "dataset.num_nodes=400").load(None, 0)
    single, pipeline = (
        measured.losses_of(measured.chosen("strategy", name), "gcn", data) for name in ("single", "gnnpipe")
    )
    assert single[0] > 2
    assert single[-1] < 1
    assert abs(pipeline[-1] / single[-1] - 1) > 0.1


def test_the_site_builds_without_warnings(run_python: Run, tmp_path: Path) -> None:
    for package in ("mkdocs", "mkdocstrings"):
        pytest.importorskip(package, reason="extra [docs] is not installed; make docs builds the site")
    env = {"NO_MKDOCS_2_WARNING": "1", "GNNPAR_SITE_TABLES": "no"}
    build = ("-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site"))
    done = run_python(*build, cwd=ROOT, timeout=250, **env)
    assert done.returncode == 0, done.stderr[-3000:]
