"""What conformance does not ask again."""

from __future__ import annotations

import pytest

from gnnpar.data.dataset import Dataset
from gnnpar.models.gnn import ModelSource
from gnnpar.verify import conformance, soundness


@pytest.fixture(autouse=True)
def _own_models_are_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_soundness.py looks at each of gnnpar's own models; every check() would, anew for every configuration."""

    def find_fault(config: ModelSource, dataset: Dataset | None = None) -> soundness.Fault | None:
        own = type(config).__module__.startswith("gnnpar.models.") and not config.wraps
        return None if own else soundness.find_fault(config, dataset)

    monkeypatch.setattr(conformance, "find_fault", find_fault)
