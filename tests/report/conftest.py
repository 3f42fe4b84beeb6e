"""One real run, from which runs are planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planted_runs
from planted_runs import Plant


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return planted_runs.real_run(tmp_path_factory.mktemp("run"), "strategy=single")


@pytest.fixture
def plant(template: dict[str, Any], tmp_path: Path) -> Plant:
    """plant(name, epoch=..., curve=..., changes) below tmp_path; numbers its folders where no name is given."""

    def one(name: str = "", **changes: Any) -> dict[str, Any]:
        name = name or str(len(list(tmp_path.iterdir())))
        return planted_runs.plant(template, tmp_path / name, **changes)

    return one
