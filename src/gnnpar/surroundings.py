"""What the environment of a process names that lies in its working directory, which may be somebody else's: programs,
headers and libraries that libraries look for, and modules of the processes that it starts."""

from __future__ import annotations

import os
import signal
import sys
import threading

_OF_COMPILERS = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "LD_LIBRARY_PATH")
_OF_COMPILERS += ("LD_RUN_PATH", "OBJC_INCLUDE_PATH")


def leave_out_working_directory() -> None:
    """For a Python program that calls gnnpar, once it asks for `gnnpar.train` or the like. ValueError as below."""
    require_safe_path()
    drop_relative_parts()
    drop_home_below()
    drop_empty_places()
    hear_of_children()
    hold_standard_streams()


def hold_standard_streams() -> None:
    """Where one was closed by who started this, what is written goes nowhere: the next file that is opened would have
    its number, and get what libraries write there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    if sys.stdout is None or sys.stderr is None:
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # it stays open: it becomes stdout and stderr
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere


def hear_of_children() -> None:
    """Who has started this process may have it ignore SIGCHLD, as `trap '' CHLD` of a shell does: the system then
    forgets how those have ended that this one starts. ValueError in a thread, which cannot change that."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "this process ignores SIGCHLD, and would not hear of the end of ranks: call "
                "signal.signal(signal.SIGCHLD, signal.SIG_DFL) in its main thread"
            )
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def drop_relative_parts() -> None:
    """An empty part of PATH, by which libraries find programs, or of what compilers read, which Triton calls, is the
    working directory; others that do not begin at the root lie below it."""
    if (programs := os.environ.get("PATH")) is not None:
        kept = [part for part in programs.split(os.pathsep) if os.path.isabs(part)]
        os.environ["PATH"] = os.pathsep.join(kept) or os.defpath  # an empty one is the working directory, too
    if not os.path.isabs(os.environ.get("GCC_EXEC_PREFIX", "/")):  # where gcc finds its own programs
        del os.environ["GCC_EXEC_PREFIX"]
    for name in _OF_COMPILERS:
        if parts := os.environ.get(name):
            os.environ[name] = os.pathsep.join(filter(os.path.isabs, parts.split(os.pathsep)))
            if not os.environ[name]:
                del os.environ[name]


def drop_home_below() -> None:
    """A user without a home, as one whom the system does not know, has Python look for his packages below ~ itself, or
    below HOME=., in the working directory: processes that this one starts do not."""
    if not os.path.isabs(os.path.expanduser("~")):
        os.environ["PYTHONNOUSERSITE"] = "1"


def drop_empty_places() -> None:
    """A place for files that is set and empty (GNNPAR_CACHE=$UNSET) is the working directory to who joins names to it;
    without it a default is taken."""
    for name in [name for name, place in os.environ.items() if not place and name.endswith(_PLACES)]:
        del os.environ[name]


_PLACES = ("_CACHE", "_DATA", "_DIR", "_HOME")


def require_safe_path() -> None:
    """ValueError under python -E without -P: processes that this one starts inherit -E, so that PYTHONSAFEPATH does not
    keep them from importing modules of the working directory."""
    if sys.flags.ignore_environment and not sys.flags.safe_path:
        raise ValueError(
            "python -E lets processes that gnnpar starts import modules of the working directory: give -P too"
        )
