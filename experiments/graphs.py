"""The graph of debian without types of edges, which plain models refuse."""

import os
import tempfile
from pathlib import Path

import numpy as np

UNTYPED = Path(tempfile.gettempdir()) / "debian_untyped.npz"
os.environ["DEBIAN_UNTYPED"] = str(UNTYPED)  # for study files


def untyped_debian() -> bool:
    """Write it. Return False without its raw file."""
    source = Path(os.environ["GNNPAR_DATA"]) / "debian" / "debian.npz"
    if source.exists():
        with np.load(source) as given:
            np.savez(UNTYPED, **{name: given[name] for name in given.files if not name.startswith("edge_type")})
    return source.exists()
