"""`gnnpar cite [strategy=NAME]`: BibTeX of gnnpar, and of the papers in a strategy's docstrings."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from pathlib import Path

from gnnpar.config.compose import compose
from gnnpar.settings import ConfigError

PAPERS = Path(__file__).parents[1] / "papers.bib"
NUMBER = re.compile(r"arXiv[\s:]*(?P<eprint>\d{4}\.\d{4,5})|doi[\s:]*(?P<doi>10\.\d+/[\w./-]*\w)", re.IGNORECASE)
HELP = """BibTeX of gnnpar, and with strategy=NAME or plan=FILE of the strategy's papers, found by the arXiv numbers and
DOIs in the docstring of its module. A paper unknown to gnnpar is an entry with its number only."""


def run(argv: list[str]) -> int:
    parser = ArgumentParser("gnnpar cite", description=HELP)
    parser.add_argument("overrides", nargs="*", metavar="strategy=NAME", help="add the papers of this strategy")
    options = parser.parse_args(argv)
    if wrong := [o for o in options.overrides if not o.startswith(("strategy=", "strategy.", "plan="))]:
        raise ConfigError(f"cite does not know {wrong[0]}; write gnnpar cite strategy=NAME, or plan=FILE")
    known = entries()
    cited = [known["gnnpar"]]
    if options.overrides:
        by_number = {number_of(entry): entry for entry in known.values()}
        numbers = papers_of(compose(options.overrides).strategy)
        cited += [by_number.get(number) or unknown(number) for number in numbers]
    sys.stdout.write("\n\n".join(cited) + "\n")
    return 0


def entries() -> dict[str, str]:
    """Return key -> entry of papers.bib."""
    parts = re.split(r"\n(?=@)", PAPERS.read_text(encoding="utf-8").strip())
    return {part.partition("{")[2].partition(",")[0]: part.strip() for part in parts}


def field(entry: str, name: str) -> str | None:
    """Return the text of a field."""
    match = re.search(rf"^\s*{name}\s*=\s*\{{(.*)\}},?$", entry, re.MULTILINE)
    return match[1] if match else None


def number_of(entry: str) -> str | None:
    """Return the arXiv number of an entry, or its DOI."""
    return field(entry, "eprint") or field(entry, "doi")


def papers_of(strategy: object) -> list[str]:
    """Return the arXiv numbers and DOIs in `papers` of a strategy, or in the docstrings of its classes and modules."""
    from gnnpar.parallel.strategy import Cites  # imports torch

    if isinstance(strategy, Cites):
        return list(strategy.papers)
    texts = []
    for cls in type(strategy).__mro__:
        module = sys.modules.get(cls.__module__)
        texts += [cls.__dict__.get("__doc__") or "", (module and module.__doc__) or ""]
    return list(dict.fromkeys(found["eprint"] or found["doi"] for text in texts for found in NUMBER.finditer(text)))


def unknown(number: str) -> str:
    """Return an entry with only the number."""
    if number.startswith("10."):
        return f"@misc{{doi:{number},\n  doi = {{{number}}},\n  url = {{https://doi.org/{number}}},\n}}"
    fields = f"  eprint = {{{number}}},\n  archivePrefix = {{arXiv}},\n  url = {{https://arxiv.org/abs/{number}}},\n"
    return f"@misc{{arxiv:{number},\n{fields}}}"
