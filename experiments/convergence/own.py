"""The files that `convergence` reads."""

import os
from pathlib import Path

import numpy as np

from gnnpar.config.study import Variant

UNTYPED = Path(__file__).with_name("debian_untyped.npz")
FILES = {"squirrel": "Squirrel", "cs": "CS", "physics": "Physics", "debian": "debian"}  # folders of raw files


def folder_of(cell: str) -> Path | None:
    name = FILES.get(cell.partition(" ")[0])
    return None if name is None else Path(os.environ["GNNPAR_DATA"]) / name


def prepare() -> None:
    """Write the debian graph without types, where it is not there yet: models of untyped edges refuse them."""
    os.environ["DEBIAN_UNTYPED"] = str(UNTYPED)
    typed = Path(os.environ["GNNPAR_DATA"]) / "debian" / "debian.npz"
    if typed.exists() and not UNTYPED.exists():
        with np.load(typed, allow_pickle=False) as arrays:
            np.savez(UNTYPED, **{key: arrays[key] for key in ("edge_index", "x", "y")})


def lacks(variant: Variant) -> str:
    folder = folder_of(variant.place[0])
    return f"no {folder}" if folder is not None and not folder.exists() else ""
