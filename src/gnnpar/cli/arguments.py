"""The arguments of a subcommand, whose errors show them without control over the terminal: a pattern of the shell gives
names of files."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import NoReturn

from gnnpar.printable import one_line


class Arguments(ArgumentParser):
    def parse_intermixed_args(self, args=None, namespace=None):  # type: ignore[override]  # argparse's own is untyped
        """What follows -- are names, which argparse's own reads as options once more."""
        if args is not None and "--" in args:
            end = args.index("--")
            args = [*args[:end], *(f"./{name}" if name.startswith("-") else name for name in args[end + 1 :])]
        return super().parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        super().error(one_line(message))
