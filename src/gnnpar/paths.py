"""Where the configuration lives: inside the wheel, or beside src/ in a checkout."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """conf/ inside the wheel, or beside src/ in a checkout."""
    packaged = Path(__file__).with_name("conf")
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "conf"


def checkout_dir() -> Path | None:
    """The git checkout this package is imported from; None for an installed wheel."""
    root = Path(__file__).parents[2]
    return root if (root / ".git").exists() and (root / "src" / "gnnpar").is_dir() else None
