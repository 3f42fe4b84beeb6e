"""Escape control characters in texts of files and names; plural nouns."""

from __future__ import annotations

from collections.abc import Mapping

from gnnpar.files import JsonDict, JsonObject


def printable(text: str) -> str:
    r"""Escape control and invisible characters of a terminal: '\x1b[2J', '\u202e'. Line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: object) -> str:
    """Escape control characters, line ends and tabs."""
    return printable(str(text)).replace("\n", "\\n").replace("\t", "\\t")


def printable_tree(tree: JsonObject) -> JsonDict:
    """Escape all texts of a JSON object, keys included."""
    return {one_line(key): _printable(value) for key, value in tree.items()}


def _printable(node: object) -> object:
    if isinstance(node, str):
        return one_line(node)
    if isinstance(node, Mapping):
        return printable_tree(node)
    return [_printable(value) for value in node] if isinstance(node, (list, tuple)) else node


def counted(number: int, noun: str) -> str:
    """Return '1 rank', '2 ranks'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
