"""Graphs that studies make of the raw files of others."""

import os
import tempfile
from pathlib import Path

import numpy as np


def untyped(source: Path, target: Path) -> None:
    """Write the graph of an .npz without the types of its edges, which plain models refuse."""
    with np.load(source) as given:
        np.savez(target, **{name: given[name] for name in given.files if not name.startswith("edge_type")})


def untyped_debian() -> Path:
    """The untyped debian graph; DEBIAN_UNTYPED names it."""
    path = Path(tempfile.gettempdir()) / "debian_untyped.npz"
    untyped(Path(os.environ["GNNPAR_DATA"]) / "debian" / "debian.npz", path)
    os.environ["DEBIAN_UNTYPED"] = str(path)
    return path
