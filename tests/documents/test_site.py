"""The documentation site: links move with their pages, every page is in the navigation, tables are measured."""

import importlib.util
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, Run

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
