"""Reading .npy files from several threads: ranks that are threads read their shards at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gnnpar.durable import require_file
from gnnpar.locks import ThreadLock

_PARSER = ThreadLock()


@contextmanager
def one_thread() -> Iterator[None]:
    """numpy parses headers with `ast`, whose count of nesting is shared by all threads: CPython 3.11.7 raises
    SystemError where two parse at once."""
    with _PARSER:
        yield


def load_npy(file: Path, *, mapped: bool = False) -> np.ndarray:
    """numpy.load without pickles. mapped: pages are read when used, and copied when written to.

    Raises OSError, and ValueError where the file is no array: numpy raises errors of many kinds for headers that lie,
    and gives archives for what begins as a .zip.
    """
    require_file(file)
    try:
        with one_thread():
            array = np.load(file, mmap_mode="c" if mapped else None, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError("it is an archive (.npz), not an array")
    return array
