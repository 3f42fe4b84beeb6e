"""Tables of studies, by the rules of `gnnpar compare`."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import blocks

from gnnpar.report import exports
from gnnpar.report.comparison import Comparison, compare
from gnnpar.report.page.page import write_page
from gnnpar.report.runs import collect
from gnnpar.report.table import group_table


def comparison(rows: Sequence[Mapping[str, Any]], *, baseline: str = "single") -> Comparison:
    with tempfile.TemporaryDirectory() as folder:
        blocks.unpack(rows, Path(folder))
        return compare(collect([Path(folder)]), baseline=baseline)


def markdown(found: Comparison) -> str:
    """One line a configuration, and what the cells cannot say."""
    return exports.as_markdown(group_table(found.groups, found.baseline), exports.notes_of(found))


def page(rows: Sequence[Mapping[str, Any]], file: Path, *, baseline: str = "single") -> Path:
    """The page that `gnnpar compare --html` would write of these runs."""
    with tempfile.TemporaryDirectory() as folder:
        blocks.unpack(rows, Path(folder))
        return write_page(compare(collect([Path(folder)]), baseline=baseline), file)
