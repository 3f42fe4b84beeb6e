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


class _Parts(list["Made"]):
    """What a dict (keys and values in turn), a set or an object holds, or was given. `made_by`: what was called."""

    made_by: str = ""


class _List(_Parts):
    """What a list holds."""


Made: TypeAlias = "str | tuple[Made, ...] | _Parts"
"""'text', 'constant' (True, False, None), 'small' (whole numbers below 2^16), 'number' (others), 'name C' of a
class, 'storage' of a tensor, 'object' for what is not known; tuples, lists and parts of them."""

_TEXTS = ("UNICODE", "STRING", "BYTES", "BYTEARRAY")  # in the names of opcodes
_NUMBERS = frozenset({*_LONGS, "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT"})
_CONSTANTS = frozenset({"NEWTRUE", "NEWFALSE", "NONE"})
_BITS = {"text": 0, "constant": 2, "small": 16, "number": 40}
_MOST_BITS, _MOST_PARTS = 50, 64  # of a tuple that is a key
_MOST_KEYS = 1 << 16  # a dict of more could be led through its full part by each, whatever their hashes
_FEW = 10_000
_DEEPEST = 200  # Python hashes a tuple by as many calls as it is deep, without a limit
_GETS, _PUTS = frozenset({"GET", "BINGET", "LONG_BINGET"}), frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_SETS = ("set", "frozenset", "Counter")  # which hash what they are given
_DICTS = ("dict", "OrderedDict", "defaultdict")  # the first of each pair
_MARK, _ANY_NAME, _STORAGE = "mark", "name of the stack", "storage"
_TENSOR = "name torch._utils._rebuild_tensor"
_OF_TENSORS = ("name torch._utils.", "name torch.nn.parameter.")  # what is called with some


def refuse_alike(opcodes: Iterable[Opcode], *, most: int) -> None:
    """ValueError where a dict, or a set, of one pickle gets a key that is neither text, a number, the name of a class
    nor a tuple of text and a few small numbers, or very many that are numbers; where one list is given to many objects,
    each of which copies it, or an object gets what holds one part more often than can be written out, as who reports
    it would; where what is called is no name of a class; where opcodes do not belong together; and where there are
    more of them than `most`: each may make an object of half a kilobyte."""
    machine = _Machine()
    try:
        for steps, (code, argument, _) in enumerate(opcodes):
            if steps >= most:
                raise ValueError(f"it makes its objects in more than {most:,} steps; keep numbers in tensors or arrays")
            machine.step(code, argument)
    except (IndexError, KeyError) as error:
        raise ValueError("it is damaged: what it takes from its stack is not there") from error


class _Machine:
    """What a pickle does, without doing it."""

    def __init__(self) -> None:
        self._stack: list[Made] = []
        self._memo: dict[int, Made] = {}
        self._steps = self._copied = self._numbers = 0

    def step(self, code: pickletools.OpcodeInfo, argument: object) -> None:
        name, stack, memo = code.name, self._stack, self._memo
        self._steps += 1
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
                if isinstance(target, _Parts):
                    target.extend(items)
                stack.append(target)
            case "EMPTY_DICT" | "DICT":
                self._hash(taken[::2])
                stack.append(_Parts(taken))
            case "SETITEM" | "SETITEMS" | "ADDITEMS":
                target, *items = taken
                self._hash(items if name == "ADDITEMS" else items[::2])
                if isinstance(target, _Parts):
                    target.extend(items)
                stack.append(target)
            case "FROZENSET":
                self._hash(taken)
                stack.append(_Parts(taken))
            case "REDUCE" | "NEWOBJ":
                called, given = taken
                if not isinstance(called, str) or not (called.startswith("name ") or called == _ANY_NAME):
                    raise ValueError("it calls what is no name of a class")
                of = called.rpartition(".")[2]
                self._copy(given)
                _refuse_without_content(called, given)
                if not called.startswith(_OF_TENSORS):
                    _refuse_tensors(given)
                for classes, pairs in ((_SETS, False), (_DICTS, True)):
                    if of in classes or called == _ANY_NAME:
                        self._hash(_hashed(given, pairs=pairs))
                made = _Parts([given])
                made.made_by = called
                stack.append("text" if of == "EdgeTypeStr" else made)
            case "BUILD":
                target, state = taken
                self._copy(state)
                _refuse_tensors((state,))
                if isinstance(target, _Parts):
                    if target.made_by.startswith("name torch."):
                        raise ValueError("it gives a tensor that is made another shape, or other memory")
                    target.append(state)
                stack.append(target)
            case "BINPERSID":  # of a storage: what it is, its class, its name, its place, its size
                self._copy(taken[0])
                if not _is_flat(taken[0]):
                    raise ValueError("it names a storage by what is neither text nor a number")
                stack.append(_STORAGE)
            case "STACK_GLOBAL":
                stack.append(_ANY_NAME)
            case "GLOBAL":
                stack.append("name " + str(argument).replace(" ", "."))
            case _:
                kind = _kind(name, argument)
                stack += [_MARK if each is pickletools.markobject else kind for each in code.stack_after]

    def _copy(self, given: Made) -> None:
        """An object gets these arguments, or this state. What stands in the file once takes a step each to write."""
        left = [(given, 0)]
        while left:
            each, depth = left.pop()
            self._copied += 1
            if self._copied > 2 * self._steps + _FEW:
                raise ValueError("it gives one list to many objects, each of which copies it")
            if depth > _DEEPEST:
                raise ValueError("it gives an object what is nested too deep")
            if isinstance(each, (tuple, _Parts)):
                left += [(part, depth + 1) for part in each]

    def _hash(self, keys: Iterable[Made]) -> None:
        for key in keys:
            bits = _bits(key)
            if bits > _MOST_BITS:
                kind = "a tuple of large or many numbers" if isinstance(key, tuple) else "an object"
                raise ValueError(f"it holds a dict or set with a key that is {kind}, which may hash alike")
            self._numbers += bits > _BITS["small"] or (bits > 0 and isinstance(key, tuple))
        if self._numbers > _MOST_KEYS:
            raise ValueError(f"it holds dicts or sets with more than {_MOST_KEYS} keys of large numbers")


def _refuse_without_content(called: str, given: Made) -> None:
    """ValueError where memory would be made by its size, or a tensor of anything but a storage of the file: torch does
    not fill it, and it holds what the process has freed."""
    first = given[0] if isinstance(given, tuple) and given else None
    if called == "name torch.storage.UntypedStorage" or (called.startswith(_TENSOR) and first != _STORAGE):
        raise ValueError("it makes a tensor of memory of which it has no content")


def _refuse_tensors(given: Made) -> None:
    """ValueError where what is called, or made, would take a tensor number by number: into a list or a set, of objects,
    and as many as it says."""
    for each in given if isinstance(given, (tuple, _Parts)) else ():
        if isinstance(each, _Parts) and each.made_by.startswith("name torch."):
            raise ValueError("it makes an object of the numbers of a tensor, one by one")


def _is_flat(key: Made) -> bool:
    """A tuple of text, numbers and names."""
    return isinstance(key, tuple) and all(isinstance(part, str) and part not in ("object", _STORAGE) for part in key)


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


def _bits(key: Made) -> int:
    """How much of a key a file may choose without knowing the process: of numbers, alone or in tuples of text."""
    if isinstance(key, str):
        return _BITS.get(key, 0 if key.startswith("name ") else _MOST_BITS + 1)
    if not isinstance(key, tuple):
        return _MOST_BITS + 1
    left, parts, bits = list(key), 0, 0
    while left:
        each = left.pop()
        parts += 1
        if isinstance(each, tuple):
            left += each
        else:
            alone = _BITS.get(each, _MOST_BITS + 1) if isinstance(each, str) else _MOST_BITS + 1
            bits += alone if each != "number" else _MOST_BITS + 1
        if max(parts, len(left)) > _MOST_PARTS or bits > _MOST_BITS:
            return _MOST_BITS + 1
    return bits
