"""What a pickle would make, looked at before anything is made: numbers, keys of dicts, members of sets.

Python hashes text and bytes with a secret of the process, whole numbers and tuples of them without one: a file may hold
any number of them that hash alike, and a dict of those takes time with the square of their number.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

_LONGS = frozenset({"LONG", "LONG1", "LONG4", "INT"})


def is_beyond(code: pickletools.OpcodeInfo, argument: object) -> bool:
    """Whether a pickle gives a whole number beyond 64 bits. Multiples of 2^61 - 1 hash alike."""
    return code.name in _LONGS and isinstance(argument, int) and abs(argument) >= 1 << 63


Opcode = tuple[pickletools.OpcodeInfo, Any, int | None]
"""As pickletools.genops gives it: what it does, its argument, its place."""


class _List(list["Made"]):
    """What a list, or a dict, that is made holds."""


Made: TypeAlias = "str | tuple[Made, ...] | _List"
"""'text', 'plain' (numbers, None), 'name C' of a class, 'object' for what is not known; tuples and lists of them."""

_TEXTS = ("UNICODE", "STRING", "BYTES", "BYTEARRAY")  # in the names of opcodes
_PLAIN = frozenset(
    {*_LONGS, "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT", "NEWTRUE", "NEWFALSE", "NONE"},
)
_GETS, _PUTS = frozenset({"GET", "BINGET", "LONG_BINGET"}), frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_SETS = ("set", "frozenset", "Counter")  # which hash what they are given
_DICTS = ("dict", "OrderedDict", "defaultdict")  # the first of each pair
_MARK = "mark"


def refuse_alike(opcodes: Iterable[Opcode]) -> None:
    """ValueError where a dict, or a set, of one pickle gets a key that is neither text, a number, the name of a class
    nor a tuple of text, and where opcodes do not belong together."""
    stack: list[Made] = []
    memo: dict[int, Made] = {}
    try:
        for code, argument, _ in opcodes:
            for key in _step(code, argument, stack, memo):
                kind = "a tuple of numbers or more" if isinstance(key, tuple) else "an object"
                raise ValueError(f"it holds a dict or set with a key that is {kind}; keys are text or numbers")
    except (IndexError, KeyError) as error:
        raise ValueError("it is damaged: what it takes from its stack is not there") from error


def _step(code: pickletools.OpcodeInfo, argument: object, stack: list[Made], memo: dict[int, Made]) -> Iterator[Made]:
    """What is done to the stack; the keys that are not safe."""
    name = code.name
    if name in _PUTS or name == "MEMOIZE":
        memo[len(memo) if name == "MEMOIZE" else int(str(argument))] = stack[-1]
        return
    if name in _GETS:
        stack.append(memo[int(str(argument))])
        return
    if name == "DUP":
        stack.append(stack[-1])
        return
    taken = _take(code, stack)
    match name:
        case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" | "EMPTY_TUPLE":
            stack.append(tuple(taken))
        case "LIST" | "EMPTY_LIST":
            stack.append(_List(taken))
        case "APPEND" | "APPENDS":
            target, *items = taken
            if isinstance(target, _List):
                target.extend(items)
            stack.append(target)
        case "SETITEM" | "SETITEMS" | "ADDITEMS":
            target, *items = taken
            yield from _unsafe(items if name == "ADDITEMS" else items[::2])
            stack.append(target)
        case "DICT" | "FROZENSET":
            yield from _unsafe(taken if name == "FROZENSET" else taken[::2])
            stack.append("object")
        case "REDUCE" | "NEWOBJ":
            called, given = taken
            of = called.rpartition(".")[2] if isinstance(called, str) else ""
            if of in _SETS or of in _DICTS:
                yield from _unsafe(_hashed(given, pairs=of in _DICTS))
            stack.append("text" if of == "EdgeTypeStr" else "object")
        case "GLOBAL":
            stack.append("name " + str(argument).replace(" ", "."))
        case _:
            kind = "text" if any(each in name for each in _TEXTS) else "plain" if name in _PLAIN else "object"
            stack += [_MARK if each is pickletools.markobject else kind for each in code.stack_after]


def _take(code: pickletools.OpcodeInfo, stack: list[Made]) -> list[Made]:
    """What an opcode takes from the stack, in its order: those before a mark, and all that lie above it."""
    before = code.stack_before
    taken: list[Made] = []
    if pickletools.markobject in before:
        while (top := stack.pop()) is not _MARK:
            taken.append(top)
    taken += [stack.pop() for each in before if each not in (pickletools.markobject, pickletools.stackslice)]
    return taken[::-1]


def _hashed(given: Made, *, pairs: bool) -> Iterator[Made]:
    """What a set or a dict would hash of its arguments."""
    for each in given if isinstance(given, tuple) else ():
        for member in each if isinstance(each, (tuple, _List)) else ():
            yield member[0] if pairs and isinstance(member, (tuple, _List)) and member else member


def _unsafe(keys: Iterable[Made]) -> Iterator[Made]:
    for key in keys:
        texts = isinstance(key, tuple) and all(each == "text" for each in key)
        if not texts and key not in ("text", "plain") and not (isinstance(key, str) and key.startswith("name ")):
            yield key
