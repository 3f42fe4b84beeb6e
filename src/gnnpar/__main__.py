"""The command line: `gnnpar SUBCOMMAND ...`, also `python -m gnnpar`. Spawned ranks import this module, so it imports
nothing until a command runs."""

import io
import os
import signal
import sys
import threading

from gnnpar.launch import ENVIRONMENT

for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

USAGE = """gnnpar: compare parallelism strategies for distributed full-graph GNN training

  gnnpar train strategy=graph_parallel model=gat dataset=sbm world_size=2     train; gnnpar train --help shows every key
  gnnpar train -m strategy=single,graph_parallel model=gcn,gat                a sweep
  gnnpar train -m ... hydra.sweep.dir=FOLDER                                  run the missing jobs of a sweep
  gnnpar data NAME                                                            download or build a dataset; its numbers
  gnnpar partition dataset=sbm world_size=4 out=FOLDER                        shards on disk; gnnpar train shards=FOLDER
  gnnpar plan model=resgcn dataset=sbm topology=two_nodes                     choose a strategy, and say why; plan.json
  gnnpar estimate model=gcn dataset=sbm world_size=4                          predict each strategy without running it
  gnnpar status FOLDER ...                                                    done, failed and missing jobs of a sweep
  gnnpar study FILE                                                           cells x methods, or factors, in blocks
  gnnpar compare FOLDER ...                                                   a table of runs, sweeps included
  gnnpar dashboard FOLDER ...                                                 a wandb workspace and report of a sweep
  gnnpar check strategy=graph_parallel                                        check a strategy against the single device
  gnnpar check codec=uniform                                                  check the laws of a codec
  gnnpar new strategy|model|codec NAME                                        write a small working one of your own
  gnnpar cite strategy=sar                                                    BibTeX of gnnpar and of its papers
  gnnpar export RUN                                                           the trained model, for use without gnnpar
  gnnpar predict RUN dataset=npz dataset.path=FILE                            its logits of every node of a graph
  gnnpar doctor                                                               the capabilities of this machine

  --trust: plans, checkpoints, shards and sweeps may name their own classes, which run code
  --install-completion: commands, options, groups and keys in bash and zsh (--show-completion prints the script)
  --version, --help; GNNPAR_TRACEBACK=1 shows the traceback behind a one-line error
"""


_RUNS = ("train", "study", "ablate")
"""Commands that handle SIGTERM themselves: at the end of an epoch, or with the processes of a sweep."""


def main(argv: list[str] | None = None) -> int:
    """Return 0: done, 1: a run failed, 2: wrong command or configuration."""
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.stderr.write("gnnpar: the working directory has been removed; change into another one\n")
        return 2
    if argv is not None:
        return dispatch(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack letters of a name
        sys.stdout.reconfigure(errors="backslashreplace")
    interrupted = set_signals(sys.argv[1:])
    code = None
    try:
        code = dispatch(sys.argv[1:])
        sys.stdout.flush()
        return code
    except OSError as error:  # stdout at the end: `gnnpar ... | head`; a full disk does not change the exit code
        if code is None and not isinstance(error, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1 if isinstance(error, BrokenPipeError) or code is None else code
    except BaseException:
        if interrupted.is_set():  # libraries interrupted during import raise errors of other types
            return 1
        raise


def set_signals(arguments: list[str]) -> threading.Event:
    """Set the handlers of a command. Return an event that is set when Ctrl-C or SIGTERM interrupts it."""
    interrupted = threading.Event()

    def interrupt(signum: int, frame: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    if arguments[:1] not in ([run] for run in _RUNS) and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a caller that ignores it would hide the ends of ranks
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:  # from a scheduler, before epochs begin
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return interrupted


def dispatch(arguments: list[str]) -> int:
    """Run a subcommand or print the help, the version or completions."""
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0 if arguments else 2
    if command == "--version":
        from importlib.metadata import version

        sys.stdout.write(f"gnnpar {version('gnnpar')}\n")
        return 0
    from gnnpar.cli.main import COMMANDS, run

    if command in ("--complete", "--show-completion", "--install-completion"):
        return run("completion", arguments)
    if command not in COMMANDS:
        from gnnpar.settings import closest
        from gnnpar.track.text import one_line

        hint = closest(command, COMMANDS)
        sys.stderr.write(f"gnnpar: unknown command {one_line(command)}{hint}; there are {', '.join(COMMANDS)}\n")
        return 2
    return run(command, rest)


if __name__ == "__main__":
    sys.exit(main())
