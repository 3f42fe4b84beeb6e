"""What `pyg_models` runs: cells.yaml."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any  # of YAML

import yaml

TOLD: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("cells.yaml").read_text(encoding="utf-8"))
OWN = "PyG's loop"
PAIRED = "PyG's loop, our masks"
"""The same with the masks that gnnpar draws; for models without attention dropout, which PyG draws by its own edges."""
STRATEGIES = TOLD["strategies"]
SPECS = {name: TOLD["defaults"] | told for name, told in TOLD["models"].items()}
