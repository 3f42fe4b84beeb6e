"""What conformance does not ask again."""

from __future__ import annotations

import pytest

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
