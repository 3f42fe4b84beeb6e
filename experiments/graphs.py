"""Graphs that studies make of the raw files of others."""

import os
import tempfile
from pathlib import Path

import numpy as np


def untyped_debian() -> Path:
    """The debian graph without the types of its edges, which plain models refuse; DEBIAN_UNTYPED names it."""
    path = Path(tempfile.gettempdir()) / "debian_untyped.npz"
    with np.load(Path(os.environ["GNNPAR_DATA"]) / "debian" / "debian.npz") as given:
        np.savez(path, **{name: given[name] for name in given.files if not name.startswith("edge_type")})
    os.environ["DEBIAN_UNTYPED"] = str(path)
    return path
