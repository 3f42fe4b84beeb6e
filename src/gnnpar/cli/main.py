"""The subcommands of `gnnpar` by name, and what becomes of their errors: a wrong configuration is one line and 2."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

from gnnpar.config.errors import hydra_line
from gnnpar.config.sweep import inherited
from gnnpar.durable import WriteError
from gnnpar.folder_lock import release_all
from gnnpar.launch.slurm import rank_on_host
from gnnpar.settings import ConfigError
from gnnpar.targets import TRUST, fenced
from gnnpar.track.console import complain_once
from gnnpar.track.text import printable

COMMANDS = (
    "train",
    "partition",
    "plan",
    "estimate",
    "compare",
    "ablate",
    "status",
    "dashboard",
    "doctor",
    "check",
    "new",
    "cite",
    "export",
    "predict",
)


_WRONG_PATH = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS)
_WRONG_PATH += (errno.ENAMETOOLONG, errno.ELOOP)


def file_line(error: OSError) -> str:
    """What is wrong with the file that an error names."""
    if isinstance(error, WriteError) or error.filename is None:
        return str(error) if error.strerror is None or error.filename is not None else error.strerror
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{error.filename} cannot be a folder: it, or a part of its path, is a file"
    name = str(error.filename)
    return f"{name if len(name) <= 400 else name[:397] + '...'} cannot be used: {error.strerror}"


def run(command: str, argv: list[str]) -> int:
    """One subcommand, `run(argv)` of its file; its exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions come to us instead of being printed and exited on
    try:
        if sys.platform == "linux" and not os.path.exists("/proc/self/stat"):
            raise ConfigError("/proc is not mounted here, and gnnpar reads memory, processes and locks there: mount it")
        _refuse_names(command, argv)
        argv, trusting = _trusting(argv)
        with trusting, fenced():
            if "TORCH_LOGS" in os.environ:
                _require_torch()
            execute: Callable[[list[str]], int] = import_module(f"gnnpar.cli.{command}").run
            return execute(argv)
    except ConfigError as error:
        return refuse(error)
    except KeyboardInterrupt:
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None  # a second Ctrl-C changes nothing
        release_all()
        if any(thread.name.startswith("rank") for thread in threading.enumerate()):  # still in an epoch of minutes
            sys.stdout.flush()
            os._exit(1)
        if before is not None:
            signal.signal(signal.SIGINT, before)
        return 1
    except BrokenPipeError:
        raise
    except RecursionError as error:
        line = "what was given is nested too deep: folders in folders, or brackets in brackets"
        return refuse(ConfigError(line), error)
    except MemoryError as error:
        refuse(ConfigError("this process may take no more memory (see ulimit -v, -m): give it more"), error)
        return 1
    except Exception as error:
        if (line := hydra_line(error, argv)) is not None:  # some of Hydra's errors are OSErrors
            return refuse(ConfigError(line), error)
        if not isinstance(error, OSError):
            raise
        refuse(ConfigError(file_line(error)), error)
        return 2 if error.errno in _WRONG_PATH else 1


def _require_torch() -> None:
    """ConfigError where its import fails at TORCH_LOGS, which it reads then."""
    try:
        import_module("torch")
    except ValueError as error:
        line = next(filter(None, str(error).splitlines()), "")
        raise ConfigError(f"TORCH_LOGS={os.environ['TORCH_LOGS']}: {line}... (TORCH_LOGS=help lists them)") from error


def _trusting(argv: Sequence[str]) -> tuple[list[str], AbstractContextManager[None]]:
    """The arguments without --trust, and where it is in force. What follows -- are names."""
    end = argv.index("--") if "--" in argv else len(argv)
    asked = "--trust" in argv[:end]
    kept = [argument for argument in argv[:end] if argument != "--trust"]
    return [*kept, *argv[end:]], inherited(TRUST, "1") if asked else nullcontext()


def _refuse_names(command: str, argv: Sequence[str]) -> None:
    """ConfigError where an option or an override is the name of a file, which a pattern of the shell gives, and nobody
    typed."""
    end = argv.index("--") if "--" in argv else len(argv)
    for at, argument in enumerate(argv):
        if not argument:
            raise ConfigError("an argument is empty: has a variable of the shell no value?")
        option = argument.startswith("-") and at < end
        override = command not in _OF_NAMES and ("=" in argument or argument.startswith(("+", "~")))
        if (option or override) and os.path.lexists(argument):
            raise ConfigError(f"a file here is called {argument}, and a pattern (*) may have given it: rename it")


_OF_NAMES = ("compare", "status", "dashboard", "export")
"""Commands whose arguments are folders, which may be called as overrides are."""


def refuse(error: ValueError, cause: Exception | None = None) -> int:
    """Say what is wrong, once a host; exit code 2."""
    if os.environ.get("GNNPAR_TRACEBACK") == "1":
        sys.stderr.write(printable("".join(traceback.format_exception(cause or error))))
    complain_once(str(error), rank=rank_on_host())
    return 2
