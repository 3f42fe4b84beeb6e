"""What `pyg_models` runs: cells.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # of YAML

import yaml

TOLD: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("cells.yaml").read_text(encoding="utf-8"))
OWN = "PyG's loop"
PAIRED = "PyG's loop, our masks"
"""The same with the masks that gnnpar draws; for models without attention dropout, which PyG draws by its own edges."""
STRATEGIES = TOLD["strategies"]


@dataclass(frozen=True)
class Spec:
    """One of PyG's models."""

    kwargs: Mapping[str, object]
    dropout: float = 0.5
    lr: float = 0.01
    loops: bool = False
    steps: int = 10
    epochs: int = 100
    width: int | None = None


SPECS = {name: Spec(**told) for name, told in TOLD["models"].items()}
