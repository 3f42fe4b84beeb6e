"""Where PyG puts the code that it generates: into a folder of this process alone.

A convolution that is made writes a module of its own into the folder of temporary files, and imports it there. Python
looks for the module's compiled form in __pycache__ beside it, which anybody may have made in a folder that all users
write to.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

from torch_geometric import template

from gnnpar.locks import ThreadLock
from gnnpar.scratch import scratch_folder

_LOCK = ThreadLock()


@contextmanager
def generated_apart() -> Iterator[None]:
    """Inside, generated modules are written into a folder of mode 0700 and gone afterwards; they stay imported."""
    with _LOCK, scratch_folder() as own:
        usual = template.tempfile
        template.tempfile = SimpleNamespace(NamedTemporaryFile=partial(tempfile.NamedTemporaryFile, dir=own))
        try:
            yield
        finally:
            template.tempfile = usual
