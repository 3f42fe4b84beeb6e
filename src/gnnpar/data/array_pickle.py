"""Pickles of arrays, without anything that a pickle can do beyond them.

numpy and scipy believe what a pickle says of an array: its type, where the fields of that type lie, which indices a
sparse matrix has. Forged, they read and write whatever memory the file names. Here `pickle` builds records alone, which
do nothing; what they say is checked when all is read, and only then made into arrays, of plain numbers.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Self

import numpy as np

from gnnpar.capacity import require_memory
from gnnpar.pickled import Opcode, is_beyond, refuse_alike

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

_NUMBERS = re.compile(r"b1|[iu][1248]|f[248]")
_PLAIN = (bool, int, float, str, bytes)
_MOST_NESTED = 20
_MEMOS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


class _Record:
    """What a pickle says of one object: what it is called with, and its state."""

    __slots__ = ("args", "state")
    args: tuple[object, ...]
    state: object

    def __new__(cls, *args: object) -> Self:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: object) -> None:
        """Of a class in the place of an object, `pickle` calls this without `self`: a TypeError."""
        self.state = state


class _List(_Record): ...


class _Mapping(dict[object, object]):
    """A defaultdict, without its default."""

    __slots__ = ()

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("it gives a dict a state")


class _Type(_Record): ...


class _NDArray(_Record): ...


class _Array(_Record): ...


class _Scalar(_Record): ...


class _Csr(_Record): ...


_RECORDS = {
    ("__builtin__", "list"): _List,  # as Python 2 wrote the adjacency of Planetoid
    ("builtins", "list"): _List,
    ("collections", "defaultdict"): _Mapping,
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _NDArray,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.multiarray", "scalar"): _Scalar,
    ("numpy._core.multiarray", "scalar"): _Scalar,
    ("scipy.sparse.csr", "csr_matrix"): _Csr,
    ("scipy.sparse._csr", "csr_matrix"): _Csr,
}


class _Reader(pickle.Unpickler):
    """UnpicklingError where a pickle names anything that is no record; nothing of it is called."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _RECORDS:
            raise pickle.UnpicklingError(f"it names {module[:80]}.{name[:80]}, which is no array")
        return _RECORDS[module, name]


def load_arrays(file: IO[bytes], *, encoding: str = "ASCII") -> object:
    """`pickle.load` of numbers, text, lists, tuples, dicts, arrays of plain numbers and sparse matrices of them.

    Raises UnpicklingError, and whatever `pickle` raises for a file that is damaged.
    """
    content = file.read()
    if not content.startswith(pickle.PROTO):  # errors of pickletools would quote the content
        raise pickle.UnpicklingError("it does not begin like a pickle")
    _refuse_far_memos(content)
    return _made(_Reader(io.BytesIO(content), encoding=encoding).load(), _Found(len(content)), 0)


class _Found(dict[int, object]):
    """What records have become, by their identity. `left`: bytes that arrays may still take; all stand in the file,
    each for one. So do the members of what lists, dicts and tuples hold."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left, self._members = left, left

    def given(self, member: object) -> object:
        self._members -= len(member) if isinstance(member, (list, tuple, dict)) else 1
        if self._members < 0:
            raise pickle.UnpicklingError("it gives one list to many")
        return member

    def take(self, content: bytes) -> bytes:
        self.left -= len(content)
        if self.left < 0:
            raise pickle.UnpicklingError("it gives the bytes of one array to many")
        return content


def _refuse_far_memos(content: bytes) -> None:
    """A memo is a table as long as its largest index: one that no number of objects before it explains takes memory
    of the file's choice."""
    refuse_alike(_near(content), most=_MOST_STEPS)


_MOST_STEPS = 4_000_000  # a list of neighbours takes one a neighbour and five a node


def _near(content: bytes) -> Iterator[Opcode]:
    for code, argument, place in pickletools.genops(content):
        if is_beyond(code, argument):
            raise pickle.UnpicklingError("it holds a whole number beyond 64 bits")
        if code.name in _MEMOS and not 0 <= int(argument or 0) <= (place or 0):
            raise pickle.UnpicklingError(f"it keeps its object {argument} after {place} bytes")
        yield code, argument, place


ARRAY_PICKLE = SimpleNamespace(__name__="pickle of arrays", load=load_arrays)
"""The module `pickle` for a library that reads arrays with it, and runs code where a file brings some."""


def checked_csr(
    make: Callable[..., csr_matrix], parts: tuple[np.ndarray, np.ndarray, np.ndarray], shape: Iterable[int]
) -> csr_matrix:
    """`make`, scipy's csr_matrix, of (data [E], indices [E], indptr [rows + 1]). ValueError where they are none of this
    shape: scipy looks at the ends of indptr alone, and then writes wherever they say."""
    data, indices, indptr = parts
    rows, columns = map(int, shape)
    kinds = data.dtype.kind in "biuf" and indices.dtype.kind in "iu" and indptr.dtype.kind in "iu"
    if not (kinds and data.ndim == indices.ndim == indptr.ndim == 1):
        raise ValueError(
            "a sparse matrix needs data, indices and indptr: numbers, of one dimension, the last two whole"
        )
    if len(indptr) != rows + 1 or indptr[0] != 0 or indptr[-1] != len(indices) or len(data) != len(indices):
        raise ValueError(
            f"a sparse matrix of {rows} rows has {len(indptr)} entries of indptr, {len(indices)} indices and "
            f"{len(data)} numbers, which do not belong together"
        )
    if bool((indptr[1:] < indptr[:-1]).any()):
        raise ValueError("indptr of a sparse matrix goes down")
    if len(indices) and (indices.min() < 0 or indices.max() >= columns):
        raise ValueError(f"indices of a sparse matrix of {columns} columns are {indices.min()} to {indices.max()}")
    return make((data, indices, indptr), shape=(rows, columns))


def _made(node: object, made: _Found, depth: int) -> object:
    """A tree with its records made into what they say."""
    if node is None or type(node) in _PLAIN:
        return node
    if id(node) in made:
        return made[id(node)]
    if depth > _MOST_NESTED:
        raise pickle.UnpicklingError(f"it is nested more than {_MOST_NESTED} deep")
    found: object
    if isinstance(node, dict):
        if any(type(key) not in _PLAIN for key in node):
            raise pickle.UnpicklingError("it holds a dict whose keys are neither numbers nor text")
        found = {key: made.given(_made(value, made, depth + 1)) for key, value in node.items()}
    elif type(node) is list:
        found = [made.given(_made(value, made, depth + 1)) for value in node]
    elif type(node) is tuple:
        found = tuple(made.given(_made(value, made, depth + 1)) for value in node)
    elif isinstance(node, _Array):
        found = _array(node, made)
    elif isinstance(node, _Scalar):
        found = _scalar(node)
    elif isinstance(node, _Csr):
        found = _csr(node, made)
    else:
        raise pickle.UnpicklingError("it holds what is no array")
    made[id(node)] = found
    return found


def _type(record: object) -> np.dtype:
    match record:
        case _Type(args=(str(code), _, _), state=(3, "<" | ">" | "|" | "=" as order, None, None, None, -1, -1, 0)):
            if _NUMBERS.fullmatch(code):
                return np.dtype(order + code)
    raise pickle.UnpicklingError("it holds an array that is not of plain numbers")


def _bytes(data: object) -> bytes:
    if isinstance(data, str):  # as Python 2 wrote it, read with the encoding latin1
        return data.encode("latin-1")
    if isinstance(data, bytes):
        return data
    raise pickle.UnpicklingError("it holds an array without its bytes")


def _array(record: _Array, made: _Found) -> np.ndarray:
    match record.args, record.state:
        case (of, (0,), b"b" | "b"), (1, tuple(shape), kind, fortran, content) if of is _NDArray:
            data, dtype = made.take(_bytes(content)), _type(kind)
            if all(type(length) is int and length >= 0 for length in shape):
                count = int(np.prod(shape, dtype=object)) if shape else 1
                if count * dtype.itemsize == len(data):
                    flat = np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))  # a copy that may be written to
                    return flat.reshape(shape, order="F" if fortran else "C")
    raise pickle.UnpicklingError("it holds an array whose shape, type and bytes do not belong together")


def _scalar(record: _Scalar) -> np.generic:
    match record.args:
        case (kind, content) if record.state is None:
            data, dtype = _bytes(content), _type(kind)
            if len(data) == dtype.itemsize:
                return np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))[0]
    raise pickle.UnpicklingError("it holds a number whose type and bytes do not belong together")


_DENSE = 24  # bytes a number: PyG makes it dense, of 4 bytes, joins several matrices, and each is copied


def _csr(record: _Csr, made: _Found) -> csr_matrix:
    from scipy import sparse

    match record.args, record.state:
        case (), {
            "data": _Array() as data,
            "indices": _Array() as indices,
            "indptr": _Array() as indptr,
            "_shape": shape,
        }:
            match shape:
                case (int() as rows, int() as columns) if min(rows, columns) >= 0:
                    arrays = _array(data, made), _array(indices, made), _array(indptr, made)
                    require_memory(_DENSE * rows * columns, "a matrix of the file", "compare its checksum")
                    return checked_csr(sparse.csr_matrix, arrays, (rows, columns))
    raise pickle.UnpicklingError("it holds a sparse matrix without data, indices, indptr and _shape")
