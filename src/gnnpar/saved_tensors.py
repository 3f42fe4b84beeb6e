"""Files of torch.save that anybody may have written: no code runs, and no tensor has memory that it does not fill."""

from __future__ import annotations

import functools
import os
import pickletools
import re
import struct
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch
from torch import Tensor
from torch.types import Storage

from gnnpar.capacity import require_memory
from gnnpar.pickled import Opcode, is_beyond, refuse_alike


def load_saved(
    file: Path, *, places: str | dict[str, str] = "cpu", known: Iterable[type] = (), mmap: bool = False
) -> object:
    """What torch.save wrote, of tensors, plain values and the classes in `known` alone. `places`: as map_location.

    Names that torch or a library lets in beside them, for the whole process, are refused: classes that read other files
    when they are made, or take memory by a number. Indices of sparse tensors are held to their shapes, which torch.load
    leaves out by itself, and whose sums and conversions then write where indices say. Raises ValueError, where records
    are compressed too, which torch.save never does and which may fill any memory, and where the file is in the format
    before torch 1.6, of which torch leaves storages unfilled; and whatever torch's readers raise.
    """
    classes, filled = tuple(known), _Filled(places)
    _refuse_packed(file)
    _refuse_names(file, classes)
    if not mmap:
        require_memory(file.stat().st_size, file.name, "give one that was saved")  # holes cost no disk
    with _these_alone(classes), _for_torch(file) as content:
        found = torch.load(content, map_location=filled.place, weights_only=True, mmap=mmap and content is file)
    for tensor in tensors_in(found):
        filled.check(tensor)
        if tensor.layout != torch.strided and not tensor.is_nested:
            _hold_to_shape(tensor)
        elif tensor.layout == torch.strided and is_expanded(tensor) and tensor.numel() > _MOST_REPEATED:
            raise ValueError(
                f"a tensor of {tensor.nbytes} bytes repeats the {tensor.untyped_storage().nbytes()} that the file has; "
                "save it as tensor.contiguous()"
            )
    return found


class _Filled:
    """The storages of a file, as torch makes them: with their size, which a tensor that is larger raises on a GPU."""

    def __init__(self, places: str | dict[str, str]) -> None:
        self._places, self._made = places, dict[int, tuple[Storage, int]]()

    def place(self, storage: Storage, location: str) -> Storage:
        there = self._places if isinstance(self._places, str) else self._places.get(location, location)
        placed: Storage = torch.serialization.default_restore_location(storage, there)  # pyright: ignore[reportArgumentType, reportAssignmentType]
        self._made[placed._cdata] = placed, placed.nbytes()
        return placed

    def check(self, tensor: Tensor) -> None:
        """ValueError where a tensor has other memory than the file has filled."""
        if tensor.is_nested or tensor.is_meta:  # refused by what they are (`oddity`)
            return
        for part in _parts_of(tensor):
            storage = part.untyped_storage()
            _, nbytes = self._made.get(storage._cdata, (None, 0))
            if storage.nbytes() != nbytes:
                raise ValueError(f"a tensor takes {storage.nbytes()} bytes, of which the file has {nbytes}")


_LOADING = threading.RLock()
_MOST_REPEATED = 1 << 26  # numbers: a column of ones, expanded, is common; gigabytes out of a small file are not


@contextmanager
def _these_alone(classes: Iterable[type]) -> Iterator[None]:
    """Inside, torch.load lets in these classes, and none of those that libraries have added, as PyG its ClusterData,
    which unpickles a file that its arguments name. One thread is inside at a time."""
    with _LOADING:
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        try:
            torch.serialization.add_safe_globals(list(classes))
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


_PLAIN = {
    "collections OrderedDict",
    "builtins set",
    *("torch Size", "torch device", "torch.nn.parameter Parameter", "torch.serialization _get_layout"),
    *(f"torch._utils _rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "sparse_tensor", "parameter")),
    "torch.storage UntypedStorage",  # of types that have no storage of their own; it is named, and not called
    # refused later, by what they are
    *(f"torch._utils _rebuild_{kind}" for kind in ("qtensor", "nested_tensor", "meta_tensor_no_storage")),
}
_STORAGE = re.compile(r"torch (Bool|Byte|Char|Short|Int|Long|Half|BFloat16|Float|Double|Complex\w+|Q\w+)Storage")
_DTYPE = re.compile(r"torch (bool|b?float\d+\w*|u?int\d+|complex\d+|q\w+|per_(tensor|channel)_\w+)")
_CALLS = frozenset({"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID"})
"""By which a pickle names what it calls in another way; torch.save writes none of them."""
_MOST_STEPS = 1_000_000  # a graph or a checkpoint takes some thousands: its numbers are in tensors


def _refuse_names(file: Path, classes: Iterable[type]) -> None:
    """ValueError where the pickle of a file names anything but tensors, plain values and `classes`."""
    known = _PLAIN | {f"{each.__module__} {each.__qualname__}" for each in classes}
    with _for_torch(file) as named:
        reader = torch._C.PyTorchFileReader
        content = (reader(str(named)) if isinstance(named, Path) else reader(named)).get_record("data.pkl")
    refuse_alike(_named(content, known), most=_MOST_STEPS)


def _named(content: bytes, known: set[str]) -> Iterator[Opcode]:
    """The opcodes of a pickle that names nothing else."""
    for code, argument, place in pickletools.genops(content):
        if is_beyond(code, argument):
            raise ValueError("it holds a whole number beyond 64 bits")
        name = str(argument).replace("__builtin__ ", "builtins ")  # as Python 2 had it
        plain = name in known or _STORAGE.fullmatch(name) or _DTYPE.fullmatch(name)
        if code.name in _CALLS or (code.name == "GLOBAL" and not plain):
            raise ValueError(f"it names {name.replace(' ', '.')[:80]}, which is no tensor and no plain value")
        yield code, argument, place


@contextmanager
def _for_torch(file: Path) -> Iterator[Path | IO[bytes]]:
    """As torch can read it: by a name only where that is UTF-8, which is faster."""
    try:
        str(file).encode()
    except UnicodeEncodeError:
        with file.open("rb") as content:
            yield content
    else:
        yield file


def _refuse_packed(file: Path) -> None:
    with file.open("rb") as content:
        if content.read(4) != _ZIP:
            raise ValueError("it does not begin like a file of torch.save since 1.6; if it is older, save it again")
        size = content.seek(0, os.SEEK_END)
        content.seek(max(0, size - _END.size - _LOCATOR.size - _END64.size))
        if not _ends_as_saved(content.read(), size):
            raise ValueError("its end is not what torch.save writes: it is damaged, or was made by another program")
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
    stated = sum(record.file_size for record in records)
    if any(record.compress_type != zipfile.ZIP_STORED for record in records) or stated > size:
        raise ValueError(f"its records are compressed, or lie over each other ({stated} bytes); save it by torch.save")


_ZIP = b"PK\x03\x04"  # by which torch tells
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")


def _ends_as_saved(tail: bytes, size: int) -> bool:
    """Whether Python's zipfile and torch's reader, which look for it in different ways, find one directory of records:
    it ends where the last bytes of the file begin, which say so, and nothing follows them."""
    if len(tail) < _END.size:
        return False
    name, _, _, _, count, nbytes, offset, comment = _END.unpack(tail[-_END.size :])
    if name != b"PK\x05\x06" or comment:
        return False
    end, before = size - _END.size, tail[: -_END.size]
    if before[-_LOCATOR.size :].startswith(b"PK\x06\x07"):
        end -= _LOCATOR.size + _END64.size
        if len(before) < _LOCATOR.size + _END64.size:
            return False
        _, _, at, _ = _LOCATOR.unpack(before[-_LOCATOR.size :])
        name64, *_, count64, nbytes64, offset64 = _END64.unpack(before[: _END64.size])
        given = ((count, count64, 0xFFFF), (nbytes, nbytes64, 0xFFFFFFFF), (offset, offset64, 0xFFFFFFFF))
        if at != end or name64 != b"PK\x06\x06" or any(small not in (large, full) for small, large, full in given):
            return False
        nbytes, offset = nbytes64, offset64
    return offset + nbytes == end


def tensors_in(found: object) -> Iterator[Tensor]:
    """All that containers and other objects hold, each once; these may hold each other in a circle.

    A file may give an object attributes: they are looked through too, and ValueError where one is in the place of a
    method, by which the object would show others something else than what it holds.
    """
    met: dict[int, object] = {}
    left = [found]
    while left:
        each = left.pop()
        if id(each) in met or isinstance(each, type):
            continue
        met[id(each)] = each
        if isinstance(each, Tensor):
            yield each
        if isinstance(each, dict):
            left.extend(dict.values(each))
        elif isinstance(each, (list, tuple, set)):
            left.extend(each)
        with suppress(TypeError):  # it has no attributes
            own = vars(each)
            if hidden := own.keys() & _methods(type(each)):
                raise ValueError(f"a {type(each).__name__} has its own {min(hidden)} in the place of a method")
            left.extend(own.values())


@functools.cache
def _methods(kind: type) -> frozenset[str]:
    members = ((name, found) for each in kind.__mro__ for name, found in vars(each).items())
    return frozenset(name for name, found in members if callable(found) or isinstance(found, classmethod))


def is_expanded(tensor: Tensor) -> bool:
    """Whether a strided tensor has more numbers than its memory holds: what copies it takes memory that no file has."""
    return tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()


def _require_small(indices: Sequence[Tensor], values: Tensor) -> None:
    """ValueError where the strided tensors of a sparse one take more memory than the file or this machine has."""
    if any(map(is_expanded, indices)):  # torch's checks would make them whole
        raise ValueError("indices of a sparse tensor are one number, repeated; store each")
    nbytes = sum(part.numel() * part.element_size() for part in (*indices, values))
    require_memory(nbytes, "a sparse tensor", "store fewer numbers")


def _hold_to_shape(tensor: Tensor) -> None:
    """RuntimeError where an index of a sparse tensor is outside its shape; ValueError where it takes more memory than
    its file or this machine has.

    torch's switch for such checks is one for the whole process: ranks that are threads would be checked by it too.
    """
    parts = _parts_of(tensor)
    _require_small(parts[:-1], parts[-1])
    if tensor.layout == torch.sparse_coo:
        torch._validate_sparse_coo_tensor_args(  # pyright: ignore[reportPrivateImportUsage]
            parts[0], parts[1], tensor.shape, tensor.is_coalesced()
        )
        return
    torch._validate_sparse_compressed_tensor_args(  # pyright: ignore[reportPrivateImportUsage]
        parts[0], parts[1], parts[2], tensor.shape, tensor.layout
    )


def _parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors that hold it: itself, or indices and values of a sparse one."""
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


_NUMBERS = {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


def oddity(tensor: Tensor) -> str | None:
    """What makes a tensor nothing to compute with: 'nested', 'quantized', ..., its type; None: nothing."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_meta:
        return "without values"
    if tensor.dtype not in _NUMBERS:
        return str(tensor.dtype)
    if min(tensor.shape, default=0) < 0 or tensor.is_neg():
        return "a view of other numbers"
    return None
