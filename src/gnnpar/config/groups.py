"""Which keys of an override choose a file."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from gnnpar.paths import is_brought_group
from gnnpar.settings import Settings

KEYS = frozenset(field.name for field in fields(Settings))
"""Of the configuration, at its top."""
_GROUP = re.compile(r"[^\W\d][\w-]*(/[^\W\d][\w-]*)*")


def may_be_group(name: str) -> bool:
    """Whether a folder of that name holds options: it is called as a group of gnnpar or of a plugin, or as no key."""
    return _GROUP.fullmatch(name) is not None and (name.partition("/")[0] not in KEYS or is_brought_group(name))


def is_group(name: str) -> bool:
    """Whether Hydra takes an override of this key for the choice of a file: of gnnpar's, a plugin's or one in the
    working directory, where a folder may be a group. A name that the system cannot look up is one, too."""
    try:
        return is_brought_group(name) or (may_be_group(name) and Path(name).is_dir())
    except OSError:
        return True
