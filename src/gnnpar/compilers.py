"""Where torch's compiler and Triton keep the code that they have made: in a place of this user alone."""

from __future__ import annotations

import atexit
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from gnnpar.durable import refuse_others
from gnnpar.paths import own_cache
from gnnpar.scratch import remove_made, safe_place


def keep_torch_apart() -> None:
    """torch's compiler, which PyG imports and exports ask, and Triton keep code in the user's cache, and not in /tmp by
    a name that others can foresee and take before, or in a home that is a place of all; in a new folder, gone
    afterwards, where the cache cannot be written, or others may have made it, or may make it."""
    for name, within in (("TORCHINDUCTOR_CACHE_DIR", "torch"), ("TRITON_CACHE_DIR", "triton")):
        if name not in os.environ:
            with suppress(OSError):  # there is no place for files at all: who needs one says so
                own = _own_cache_of(within)
                os.environ[name] = str(own) if own is not None else _gone_afterwards(within)


def _own_cache_of(within: str) -> Path | None:
    """None where there is no home, or the folder would not be this user's alone."""
    try:
        folder = own_cache() / within
        return folder if _would_be_own(folder) else None
    except ValueError:
        return None


def _would_be_own(folder: Path) -> bool:
    """Can it be made and written, and is it, or what it would be made in, of this user alone? A link that leads nowhere
    is there."""
    try:
        there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        refuse_others(there)
        return os.access(there, os.W_OK) and there.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _gone_afterwards(within: str) -> str:
    folder = Path(tempfile.mkdtemp(prefix=f"gnnpar-{within}-", dir=safe_place()))
    atexit.register(remove_made, folder, folder.lstat())
    return str(folder)
