"""The page on reliability says what the fuzzers found, and that nothing must be mended."""

from __future__ import annotations

import json

from attack.make import COUNTS, PAGE, with_table


def test_the_page_has_the_counts_and_no_case_ended_badly() -> None:
    counts = json.loads(COUNTS.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page, counts)
    for kind, least in {"files": 10_000, "inputs": 2_000, "overrides": 2_000}.items():
        assert counts[kind]["tried"] >= least
        assert counts[kind]["traceback"] == counts[kind]["hung"] == counts[kind]["silent"] == 0, kind
