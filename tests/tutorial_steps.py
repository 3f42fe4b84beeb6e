"""The code blocks of a tutorial, run in order in the current folder: `python tutorial_steps.py PAGE`.

A block with a title is a file; ```python is a program; in ```console every line after `$` is a command, and the lines
below it are what it must say, numbers aside; `exit 1` is its exit code, 0 unless told. `gnnpar` runs in this process:
importing torch costs seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
BUSY = re.compile(r"\bbusy\b")  # marks of other programs, which stand where a quiet machine has none
ANSWER = re.compile(r"\w+ / \w+: ")
NUMBER = re.compile(r"\d[\d.,:/+-]*(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


@dataclass(frozen=True)
class Command:
    """A line after `$`, what it must say, and its exit code."""

    line: str
    said: tuple[str, ...]
    code: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [Block(language, title, body) for language, title, body in BLOCK.findall(text)]
    assert 2 * len(found) == len(re.findall("^```", text, re.MULTILINE)), f"{page} has a block that nobody reads"
    return found


def commands(text: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, *said = part.rstrip().splitlines()
        codes = [int(each.split()[1]) for each in said if re.fullmatch(r"exit \d+", each)]
        yield Command(line, tuple(s for s in said if s and not s.startswith("exit ")), codes[0] if codes else 0)


def shape(line: str) -> str:
    """A line without its numbers, its spaces and marks of a busy machine."""
    return "".join(NUMBER.sub("#", BUSY.sub("", line)).split())


def missing(command: Command, output: str) -> list[str]:
    """The lines that were promised and did not come. A busy machine has another answer."""
    lines = [shape(line) for line in output.splitlines()]
    busy = "the machine was busy" in output
    said = [line for line in command.said if not (busy and ANSWER.match(line))]
    return [line for line in said if not any(shape(line) in each for each in lines)]


def run_command(line: str) -> tuple[int, str]:
    """(exit code, what it said) of a shell line; gnnpar's own here, `python` is the one that runs this."""
    if not line.startswith("gnnpar "):
        line = re.sub("^python ", f"{shlex.quote(sys.executable)} ", line)
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr
    from gnnpar.__main__ import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(line.split()[1:])
        except Exception:
            code = -1
            traceback.print_exc(file=output)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, output.getvalue()


def forget_own_modules() -> None:
    """Files of this folder change from block to block."""
    here = Path.cwd()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).parent == here:
            del sys.modules[name]
    importlib.invalidate_caches()


def run_block(block: Block) -> None:
    forget_own_modules()
    if block.title:
        Path(block.title).parent.mkdir(parents=True, exist_ok=True)
        Path(block.title).write_text(block.text, encoding="utf-8")
    elif block.language == "python":
        exec(compile(block.text, "block", "exec"), {"__name__": "__main__"})
    else:
        assert block.language == "console", f"a block of {block.language} without a title: what is it?"
        for command in commands(block.text):
            code, output = run_command(command.line)
            assert code == command.code, f"{command.line}: exit {code}\n{output}"
            assert not (lost := missing(command, output)), f"{command.line} does not say {lost}\n{output}"


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.path[0] = ""  # the folder the user is in, not this file's
    sys.dont_write_bytecode = True  # a file rewritten within a second would not be compiled again
    for each in blocks(Path(sys.argv[1])):
        run_block(each)
