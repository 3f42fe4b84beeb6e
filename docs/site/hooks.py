"""mkdocs: pages that live outside docs/, tables that are measured, and the navigation."""

from __future__ import annotations

import hashlib
import importlib
import multiprocessing
import os
import posixpath
import re
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ASIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "kernels/README.md",
    "experiments/README.md",
    "examples/README.md",
)
MADE = {  # page -> the module beside this one and its function
    "composability": ("measured", "composability"),
    "convergence": ("measured", "convergence"),
    "reference/cli": ("reference", "commands"),
    "reference/keys": ("reference", "keys"),
    "reference/result": ("reference", "result"),
}
FILES = ("LICENSE", "CITATION.cff", "pyproject.toml")  # that pages link
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)#\s]+)")


def outside() -> list[str]:
    """Pages and figures of the repository that are not in docs/, by their place in it."""
    studies = [p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "experiments").glob("*/*.md"))]
    figures = [p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "experiments").rglob("*.svg"))]
    return [*ASIDE, *FILES, *studies, *figures]


def in_site(place: str) -> str:
    """A place in the repository -> the place in the site: docs/ is its root, and has a home page of its own."""
    return "readme.md" if place == "README.md" else place.removeprefix("docs/")


def moved(text: str, place: str) -> str:
    """The text of a page with links that hold where the site puts it."""

    def link(found: re.Match[str]) -> str:
        target = found[2]
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        meant = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        return found[1] + posixpath.relpath(in_site(meant), posixpath.dirname(in_site(place)) or ".")

    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in FENCE.split(text))


def title_of(text: str) -> str:
    return next((line[2:].strip() for line in text.splitlines() if line.startswith("# ")), "")


def on_config(config: Any) -> Any:
    config["nav"] = navigation()
    return config


def navigation() -> list[Any]:
    """The tabs of the site; groups are folded, so that at most thirty entries stand below the tabs."""
    docs = ROOT / "docs"

    def listed(folder: str) -> list[str]:
        """Pages in the order in which the folder's README links them."""
        text = (docs / folder / "README.md").read_text(encoding="utf-8")
        return [f"{folder}/{name}" for name in re.findall(r"\]\(([\w.]+\.md)\)", text)]

    def guides() -> list[dict[str, list[str]]]:
        """A group for each second-level heading of the guides' README."""
        parts = (docs / "guide" / "README.md").read_text(encoding="utf-8").split("\n## ")[1:]
        return [
            {part.partition("\n")[0]: [f"guide/{n}" for n in re.findall(r"\]\(([\w.]+\.md)\)", part)]} for part in parts
        ]

    def titled(paths: Iterable[Path]) -> list[dict[str, str]]:
        return [
            {title_of(p.read_text(encoding="utf-8")): in_site(p.relative_to(ROOT).as_posix())} for p in sorted(paths)
        ]

    def studies() -> list[dict[str, list[dict[str, str]]]]:
        """A group for each row of "Studies by question"; the last one has studies without a row, too."""
        experiments = ROOT / "experiments"
        text = (experiments / "README.md").read_text(encoding="utf-8").partition("\n## Studies by question\n")[2]
        rows = re.findall(r"^\| ([^|]+) \| (\[.*) \|$", text.partition("\n## ")[0], re.MULTILINE)
        groups = {name: re.findall(r"\]\((\w+)/README\.md\)", cell) for name, cell in rows}
        named = {folder for folders in groups.values() for folder in folders}
        groups[rows[-1][0]] += sorted({page.parent.name for page in experiments.glob("*/*.md")} - named)
        return [
            {name: titled(page for folder in folders for page in (experiments / folder).glob("*.md"))}
            for name, folders in groups.items()
        ]

    return [
        {
            "Start": [
                "index.md",
                {"Quickstart": "quickstart.md"},
                {"Concepts": "concepts.md"},
                {"Which strategy": "experiments/README.md"},
                {"Examples": "examples/README.md"},
                {"Glossary": "glossary.md"},
            ]
        },
        {"Guides": ["guide/README.md", *guides(), {"Tutorials": ["tutorials/README.md", *listed("tutorials")]}]},
        {
            "Reference": [
                {"Commands": "reference/cli.md"},
                {"YAML keys": "reference/keys.md"},
                {"result.json": "reference/result.md"},
                {"Interfaces": ["api/README.md", *listed("api")]},
                {"Strategies, specified": ["strategies/README.md", *listed("strategies")]},
                {"Measured at build": [{"What combines": "composability.md"}, {"Losses": "convergence.md"}]},
            ]
        },
        {"Experiments": studies()},
        {
            "Development": [
                {"Architecture": "architecture.md"},
                {"Kernels": "kernels/README.md"},
                {"Contributing": "CONTRIBUTING.md"},
                {"Security": "SECURITY.md"},
                {"Changelog": "CHANGELOG.md"},
                {"Decisions": ["adr/README.md", *titled((docs / "adr").glob("0*.md"))]},
            ]
        },
    ]


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for place in outside():
        source = ROOT / place
        content = source.read_bytes() if source.suffix != ".md" else moved(source.read_text(encoding="utf-8"), place)
        files.append(File.generated(config, in_site(place), content=content))
    tables = [multiprocessing.Process(target=made, args=(page,)) for page, how in MADE.items() if how[0] == "measured"]
    for process in tables:  # side by side: they take most of the time
        process.start()
    for process in tables:
        process.join()  # one that has failed has left nothing, and fails again below
    for page in MADE:
        files.append(File.generated(config, f"{page}.md", content=made(page)))
    return files


def made(page: str) -> str:
    """A page of tables, kept by what it is made of. GNNPAR_SITE_TABLES=no leaves out those that take a minute."""
    where, name = MADE[page]
    if where == "measured" and os.environ.get("GNNPAR_SITE_TABLES") == "no":
        return f"# {page}\n"
    kept = ROOT / "build" / "site" / f"{name}-{inputs()}.md"
    if not kept.exists():
        sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "src"), str(ROOT / "kernels")]
        text = getattr(importlib.import_module(where), name)()
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text, encoding="utf-8")
    return kept.read_text(encoding="utf-8")


@cache
def inputs() -> str:
    """What tables are made of: every source, every YAML, and the versions that the environment has."""
    parts = [f"{each.name}=={each.version}" for each in distributions() if each.name in ("torch", "numpy")]
    folders = (ROOT / "src", ROOT / "kernels", ROOT / "conf", Path(__file__).parent)
    files = sorted(file for folder in folders for kind in ("py", "yaml", "json") for file in folder.rglob(f"*.{kind}"))
    digest = hashlib.sha256("\n".join(sorted(parts)).encode())
    for file in files:
        digest.update(f"\n{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Pages of docs/ may point at other places of the repository."""
    return moved(markdown, f"docs/{page.file.src_uri}") if page.file.generated_by is None else markdown
