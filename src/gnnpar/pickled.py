"""What a pickle would make, looked at before anything is made: numbers, keys of dicts, members of sets.

Python hashes text and bytes with a secret of the process, numbers and tuples of them without one: a file may hold any
number of tuples that hash alike, and a dict of those takes time with the square of their number. Tuples of 50 bits, as
of three numbers below 2^16, are too few for that: of so many hardly five share a hash of 64 bits.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterable, Iterator
from typing import TypeAlias

_LONGS = frozenset({"LONG", "LONG1", "LONG4", "INT"})


def is_beyond(code: pickletools.OpcodeInfo, argument: object) -> bool:
    """Whether a pickle gives a whole number beyond 64 bits. Multiples of 2^61 - 1 hash alike."""
    return code.name in _LONGS and isinstance(argument, int) and abs(argument) >= 1 << 63


Opcode = tuple[pickletools.OpcodeInfo, object, int | None]
"""As pickletools.genops gives it: what it does, its argument, its place."""


class _List(list["Made"]):
    """What a list, or a dict, that is made holds."""


Made: TypeAlias = "str | tuple[Made, ...] | _List"
"""'text', 'constant' (True, False, None), 'small' (whole numbers below 2^16), 'number' (others), 'name C' of a
class, 'object' for what is not known; tuples and lists of them."""

_TEXTS = ("UNICODE", "STRING", "BYTES", "BYTEARRAY")  # in the names of opcodes
_NUMBERS = frozenset({*_LONGS, "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT"})
_CONSTANTS = frozenset({"NEWTRUE", "NEWFALSE", "NONE"})
_BITS = {"text": 0, "constant": 2, "small": 16}
_MOST_BITS, _MOST_PARTS = 50, 64  # of a tuple that is a key
_GETS, _PUTS = frozenset({"GET", "BINGET", "LONG_BINGET"}), frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_SETS = ("set", "frozenset", "Counter")  # which hash what they are given
_DICTS = ("dict", "OrderedDict", "defaultdict")  # the first of each pair
_MARK, _ANY_NAME = "mark", "name of the stack"


def refuse_alike(opcodes: Iterable[Opcode]) -> None:
    """ValueError where a dict, or a set, of one pickle gets a key that is neither text, a number, the name of a class
    nor a tuple of text and a few small numbers, and where opcodes do not belong together."""
    stack: list[Made] = []
    memo: dict[int, Made] = {}
    try:
        for code, argument, _ in opcodes:
            for key in _step(code, argument, stack, memo):
                kind = "a tuple of large or many numbers" if isinstance(key, tuple) else "an object"
                raise ValueError(f"it holds a dict or set with a key that is {kind}, which may hash alike")
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
            for classes, pairs in ((_SETS, False), (_DICTS, True)):
                if of in classes or called == _ANY_NAME:
                    yield from _unsafe(_hashed(given, pairs=pairs))
            stack.append("text" if of == "EdgeTypeStr" else "object")
        case "STACK_GLOBAL":
            stack.append(_ANY_NAME)
        case "GLOBAL":
            stack.append("name " + str(argument).replace(" ", "."))
        case _:
            kind = _kind(name, argument)
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


def _kind(name: str, argument: object) -> str:
    """Of what an opcode without parts pushes."""
    if any(each in name for each in _TEXTS):
        return "text"
    if name in _CONSTANTS:
        return "constant"
    if name in _NUMBERS:
        return "small" if isinstance(argument, int) and 0 <= argument < 1 << _BITS["small"] else "number"
    return "object"


def _unsafe(keys: Iterable[Made]) -> Iterator[Made]:
    for key in keys:
        alone = isinstance(key, str) and (key in _BITS or key == "number" or key.startswith("name "))
        if not alone and not _is_small(key):
            yield key


def _is_small(key: Made) -> bool:
    """Whether it is a tuple of text and a few small numbers, or of such tuples."""
    if not isinstance(key, tuple):
        return False
    left, parts, bits = list(key), 0, 0
    while left:
        each = left.pop()
        parts += 1
        if isinstance(each, tuple):
            left += each
        else:
            bits += _BITS.get(each, _MOST_BITS + 1) if isinstance(each, str) else _MOST_BITS + 1
        if max(parts, len(left)) > _MOST_PARTS or bits > _MOST_BITS:
            return False
    return True
