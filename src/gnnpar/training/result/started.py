"""`.started` in a run's folder: whose start the run was. Ranks that torchrun starts again go on from what lies there.

How often they were started stands in torchrun's store, where anybody on the network may write: a new run in the folder
of an older one would else be told that it goes on, and report the older one's results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from gnnpar.durable import read_json, write_json_whole

FILE = ".started"


def note_start(run_dir: Path, agreed: Mapping[str, str], agents: Sequence[str]) -> None:
    """`agreed`: the settings that can change a number; `agents`: of the ranks, rank 0's first: the processes that have
    started them, and start them again themselves. WriteError where it cannot be written."""
    write_json_whole(run_dir / FILE, {"agents": list(agents), "settings": _hash(agreed)})


def is_started_again(run_dir: Path, agreed: Mapping[str, str], agents: Sequence[str]) -> bool:
    """Did the agent of this rank 0 take part in the start that began the run in the folder, with these settings? An id
    of a job (`--rdzv-id`) does not tell: it may be given again."""
    try:
        noted = read_json(run_dir / FILE)
        return noted.get("settings") == _hash(agreed) and agents[0] in noted.get("agents", ())
    except (OSError, ValueError, TypeError):
        return False


def _hash(agreed: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(agreed), sort_keys=True).encode()).hexdigest()
