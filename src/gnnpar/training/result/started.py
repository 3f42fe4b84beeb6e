"""`.started` in a run's folder: whose start the run was. Ranks that torchrun starts again go on from what lies there.

How often they were started stands in torchrun's store, too, where anybody on the network may write: a new run in the
folder of an older one would be told that it goes on, and report the older one's results, or one that goes on that it
begins, and lose its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from gnnpar.durable import read_json, write_json_whole

FILE = ".started"


def note_start(run_dir: Path, agreed: Mapping[str, str], agents: Sequence[str], restarts: int = 0) -> None:
    """`agreed`: the settings that can change a number; `agents`: of the ranks, rank 0's first: the processes that have
    started them, and start them again themselves; `restarts`: how often so far. WriteError where it cannot be written.
    """
    noted = {"agents": list(agents), "settings": _hash(agreed), "restarts": restarts}
    write_json_whole(run_dir / FILE, noted)


def restarts_before(run_dir: Path, agreed: Mapping[str, str], agents: Sequence[str]) -> int | None:
    """How often ranks were started again before, where the agent of this rank 0 took part in the last start of the run
    in the folder, with these settings; None: it did not. An id of a job (`--rdzv-id`) does not tell: it may be given
    again."""
    try:
        noted = read_json(run_dir / FILE)
        if noted.get("settings") == _hash(agreed) and agents[0] in noted.get("agents", ()):
            return int(noted.get("restarts", 0))
    except (OSError, ValueError, TypeError):
        pass
    return None


def _hash(agreed: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(agreed), sort_keys=True).encode()).hexdigest()
