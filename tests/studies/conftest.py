"""Modules of experiments, which have the same names in several studies."""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from conftest import ROOT

EXPERIMENTS = ROOT / "experiments"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """module(name, folder): imported beside its neighbours, and forgotten at the end."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def load(name: str, folder: str = "") -> ModuleType:
        places = [str(EXPERIMENTS / folder), str(EXPERIMENTS)]
        sys.path[:] = [*places, *(place for place in sys.path if place not in places)]
        return import_module(name)

    forget()
    yield load
    forget()


def forget() -> None:
    files = {name: str(getattr(each, "__file__", None)) for name, each in sys.modules.items()}
    for name in [name for name, file in files.items() if file.startswith(f"{EXPERIMENTS}/")]:
        del sys.modules[name]


@pytest.fixture
def check(module: Callable[..., Any]) -> Any:
    """experiments/check.py."""
    return module("check")
