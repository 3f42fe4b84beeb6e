"""`.started` in a run's folder: whose start the run was. Ranks that torchrun starts again go on from what lies there.

How often they were started stands in torchrun's store, where anybody on the network may write: a new run in the folder
of an older one would else be told that it goes on, and report the older one's results.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from gnnpar.durable import JsonDict, read_json, write_json_whole
from gnnpar.folder_lock import started

FILE = ".started"


def note_start(run_dir: Path, agreed: Mapping[str, str]) -> None:
    """`agreed`: the settings that can change a number. WriteError where it cannot be written."""
    write_json_whole(run_dir / FILE, _this(os.environ, agreed))


def is_started_again(run_dir: Path, agreed: Mapping[str, str]) -> bool:
    """Did this start of ranks, with these settings, begin the run in the folder?"""
    try:
        return read_json(run_dir / FILE) == _this(os.environ, agreed)
    except (OSError, ValueError):
        return False


def _this(env: Mapping[str, str], agreed: Mapping[str, str]) -> JsonDict:
    """torchrun's id of the job, or where it has none, the agent of this host, which starts its ranks again itself."""
    job, agent = env.get("TORCHELASTIC_RUN_ID", "none"), os.getppid()
    by = [socket.gethostname(), agent, started(agent)] if job in ("", "none") else [job]
    settings = json.dumps(dict(agreed), sort_keys=True)
    return {"by": by, "settings": hashlib.sha256(settings.encode()).hexdigest()}
