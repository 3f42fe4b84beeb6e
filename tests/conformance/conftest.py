"""What conformance does not ask again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch_geometric.inspector import Inspector

from gnnpar.data.dataset import Dataset
from gnnpar.models.gnn import ModelSource
from gnnpar.verify import conformance, soundness

FOUND: dict[str, soundness.Fault | None] = {}


@pytest.fixture(autouse=True)
def _models_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check() looks for a fault of its model: of gnnpar's own models test_soundness.py does, of a PyG model the
    first check."""

    def find_fault(config: ModelSource, dataset: Dataset | None = None) -> soundness.Fault | None:
        if type(config).__module__.startswith("gnnpar.models.") and not config.wraps:
            return None
        if dataset is not None or not config.wraps:
            return soundness.find_fault(config, dataset)
        if (key := repr(config)) not in FOUND:
            FOUND[key] = soundness.find_fault(config)
        return FOUND[key]

    monkeypatch.setattr(conformance, "find_fault", find_fault)


@pytest.fixture(autouse=True, scope="session")
def _sources_are_read_once() -> Iterator[None]:
    """PyG reads the source of a class whenever the test makes one, and Python 3.11 parses the whole file for it."""
    read, known = Inspector.get_source, dict[tuple[str, str], str | OSError]()

    def get_source(self: Inspector, cls: type | None = None) -> str:
        cls = cls or self._cls
        key = cls.__module__, cls.__qualname__
        if key not in known:
            try:
                known[key] = read(self, cls)
            except OSError as error:
                known[key] = error
        if isinstance(found := known[key], OSError):
            raise found
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Inspector, "get_source", get_source)
        yield
