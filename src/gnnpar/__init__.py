"""gnnpar: compare parallelism strategies for distributed full-graph GNN training."""

import os
import sys


def _module_that_runs() -> str:
    """NAME of `python -m NAME`, whatever options stand before it or together with -m; empty: Python runs no module."""
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word == "--check-hash-based-pycs":
            next(words, "")
        elif not word.startswith("-"):
            break
        for at, letter in enumerate(word[1:] if word[:2] != "--" else "", 2):
            if letter == "m":
                return word[at:] or next(words, "")
            if letter == "c":
                return ""
            if letter in "WX":  # the rest is its value, or the next word
                if not word[at:]:
                    next(words, "")
                break
    return ""


_RUN = not sys.flags.safe_path and sys.argv[:1] == ["-m"] and _module_that_runs().partition(".")[0] == "gnnpar"
if _RUN and os.access(os.curdir, os.F_OK) and os.stat(os.curdir).st_nlink and sys.path[:1] == [os.getcwd()]:
    # python -m puts the working directory first, where a file json.py would be imported instead of Python's own
    del sys.path[0]
    if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == os.getcwd():
        sys.path.append(os.getcwd())  # gnnpar itself lies here

from importlib import import_module  # noqa: E402 - after the lines above
from typing import TYPE_CHECKING  # noqa: E402

if "GNNPAR_OWN_MODULES" in os.environ:  # a process of gnnpar started this one
    from gnnpar import own_modules

    own_modules.inherit()

__version__ = "0.2.0"

if TYPE_CHECKING:
    from gnnpar.api import check as check
    from gnnpar.api import compare as compare
    from gnnpar.api import distribute as distribute
    from gnnpar.api import plan as plan
    from gnnpar.api import sweep as sweep
    from gnnpar.api import train as train
    from gnnpar.data.hetero import homogeneous as homogeneous
    from gnnpar.training.loop import StopTraining as StopTraining
    from gnnpar.training.result.trained import load as load

_LAZY = dict.fromkeys(("check", "compare", "distribute", "plan", "sweep", "train"), "gnnpar.api") | {
    "StopTraining": "gnnpar.training.loop",
    "homogeneous": "gnnpar.data.hetero",
    "load": "gnnpar.training.result.trained",
}


def __getattr__(name: str) -> object:
    """`gnnpar.train` and others, imported when asked for: ranks import this package and must be up quickly."""
    if name in _LAZY:
        import_module("gnnpar.surroundings").leave_out_working_directory()
        import_module("gnnpar.compilers").keep_torch_apart()  # before PyG imports torch's compiler
        random = import_module("random")
        drawn = random.getstate()
        try:
            return vars(import_module(_LAZY[name]))[name]
        finally:
            random.setstate(drawn)  # the program's: rich draws one where it is imported
    raise AttributeError(f"module 'gnnpar' has no attribute {name!r}")
