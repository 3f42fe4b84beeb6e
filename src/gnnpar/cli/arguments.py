"""The arguments of a subcommand, whose errors show them without control over the terminal: a pattern of the shell gives
names of files."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import NoReturn

from gnnpar.printable import one_line


class Arguments(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(one_line(message))
