"""Every file, test, module and command that a document names exists; the glossary is sorted and has every term once."""

import re
import tomllib
from pathlib import Path

import pytest

from conftest import ROOT
from gnnpar.cli.main import COMMANDS

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
