"""Where torch's compiler and Triton keep the code that they have made: in a place of this user alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gnnpar.durable import is_mine, refuse_others
from gnnpar.paths import own_cache
from gnnpar.scratch import PREFIX, lasting_scratch

_HEADERS, _OF_HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "cpp_cache_precompile_headers"


def keep_torch_apart() -> None:
    """torch's compiler, which PyG imports and exports ask, and Triton keep code in the user's cache, and not in /tmp by
    a name that others can foresee and take before, or in a home that is a place of all; in a new folder, gone
    afterwards, where the cache cannot be written, or others may have made it, or may make it. In each process that
    loads such code: a folder that a job of a cluster is told of may be another user's on its own host. Header
    precompilation is turned off: torch fixes its folder when it is imported, before this function can choose one."""
    os.environ.setdefault(_HEADERS, "0")
    if (config := sys.modules.get("torch._inductor.config")) is not None and os.environ[_HEADERS] == "0":
        setattr(config, _OF_HEADERS, False)  # torch's options are attributes of this module
    for name, within in (("TORCHINDUCTOR_CACHE_DIR", "torch"), ("TRITON_CACHE_DIR", "triton")):
        if (place := os.environ.get(name)) is None or (_is_made_up(name, place) and not _is_own(Path(place))):
            own = _own_cache_of(within)
            _given[name] = os.environ[name] = str(own if own is not None else lasting_scratch())


def _is_made_up(name: str, place: str) -> bool:
    """Whether the user has not set it: this module has, here or in a process that may have ended since, and its scratch
    folder with it, or torch, which writes its default folder in /tmp into the environment when PyG is imported. Another
    user may have created that folder."""
    return place == _given.get(name) or any(part.startswith(("torchinductor_", PREFIX)) for part in Path(place).parts)


_given: dict[str, str] = {}


def give_back_environment() -> None:
    """Jobs that a scheduler starts on another host look for places of their own."""
    for name, place in _given.items():
        if os.environ.get(name) == place:
            del os.environ[name]
    _given.clear()


def _own_cache_of(within: str) -> Path | None:
    """None where there is no home, or the folder would not be this user's alone."""
    try:
        folder = own_cache() / within
        return folder if _is_own(folder) else None
    except ValueError:
        return None


def _is_own(folder: Path) -> bool:
    """Is it, and what it is made in, of this user alone, and can it be written? It is made here, of mode 0700: by the
    user's umask, others might be let in before code lies there."""
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        refuse_others(missing[-1].parent if missing else folder)
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
        refuse_others(folder)
        return os.access(folder, os.W_OK) and is_mine(folder.stat())
    except OSError:
        return False
