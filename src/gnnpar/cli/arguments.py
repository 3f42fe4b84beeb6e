"""The arguments of a subcommand, whose errors show them without control over the terminal: a pattern of the shell gives
names of files."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import NoReturn

from gnnpar.track.text import one_line


class Arguments(ArgumentParser):
    def intermixed(self, argv: Sequence[str]) -> Namespace:
        """Options may stand between names. All that follows -- are names; Python 3.11 would parse them once more, as
        options."""
        end = argv.index("--") if "--" in argv else len(argv)
        names = (f"./{name}" if name.startswith("-") else name for name in argv[end + 1 :])
        return self.parse_intermixed_args([*argv[:end], *names])

    def error(self, message: str) -> NoReturn:
        super().error(one_line(message))
