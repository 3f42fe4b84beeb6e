"""The subcommands of `gnnpar` by name, and their error lines: a wrong configuration is one line and exit code 2."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import import_module

from gnnpar.files import WriteError
from gnnpar.launch import environment
from gnnpar.launch.slurm import rank_on_host
from gnnpar.settings import ConfigError
from gnnpar.targets import TRUST
from gnnpar.track.console import complain_once
from gnnpar.track.text import printable

COMMANDS = ("train", "partition", "plan", "estimate", "compare", "study", "ablate", "status")
COMMANDS += ("data", "dashboard", "doctor", "check", "new", "cite", "export", "predict")
_WRONG_PATH = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS)
_WRONG_PATH += (errno.ENAMETOOLONG, errno.ELOOP)


def file_line(error: OSError) -> str:
    """Return the error line for the file of an OSError."""
    if isinstance(error, WriteError) or error.filename is None:
        return str(error) if error.strerror is None or error.filename is not None else error.strerror
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{error.filename} cannot be a folder: it, or a part of its path, is a file"
    name = str(error.filename)
    return f"{name if len(name) <= 400 else name[:397] + '...'} cannot be used: {error.strerror}"


def run(command: str, argv: list[str]) -> int:
    """Call `run(argv)` of a subcommand's file. Return its exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise exceptions instead of printing and exiting
    try:
        if "" in argv:
            raise ConfigError("an argument is empty: has a variable of the shell no value?")
        options = argv.index("--") if "--" in argv else len(argv)  # names follow --
        trusted = {TRUST: "1"} if "--trust" in argv[:options] else {}
        argv = [*(argument for argument in argv[:options] if argument != "--trust"), *argv[options:]]
        name = "study" if command == "ablate" else command  # `ablate FILE` is `study FILE` of factors
        with environment(**trusted):
            execute: Callable[[list[str]], int] = import_module(f"gnnpar.cli.{name}").run
            return execute(argv)
    except ConfigError as error:
        return refuse(error)
    except KeyboardInterrupt:
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None  # ignore a second Ctrl-C
        if any(thread.name.startswith("rank") for thread in threading.enumerate()):  # still in an epoch of minutes
            sys.stdout.flush()
            os._exit(1)
        if before is not None:
            signal.signal(signal.SIGINT, before)
        return 1
    except BrokenPipeError:
        raise
    except RecursionError as error:
        line = "the arguments are nested too deeply (folders or brackets); use fewer levels"
        return refuse(ConfigError(line), error)
    except MemoryError as error:
        refuse(ConfigError("this process may take no more memory (see ulimit -v, -m): give it more"), error)
        return 1
    except OSError as error:
        refuse(ConfigError(file_line(error)), error)
        return 2 if error.errno in _WRONG_PATH else 1


def refuse(error: ValueError, cause: Exception | None = None) -> int:
    """Print the error line once per host. Return exit code 2."""
    if os.environ.get("GNNPAR_TRACEBACK") == "1":
        sys.stderr.write(printable("".join(traceback.format_exception(cause or error))))
    complain_once(str(error), rank=rank_on_host())
    return 2
