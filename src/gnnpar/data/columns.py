"""Arrays in .npy files, read and written by slices of rows: graphs beyond memory pass through them in chunks.

What is read is a copy: nothing stays mapped, so that the resident set is the chunk and not the file.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gnnpar.files import require_file

_PARSER = threading.Lock()  # CPython 3.11.7 raises SystemError where two threads parse headers (ast) at once


class Slices(Protocol):
    """What gives rows by slices: an array, or a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


def load_npy(file: Path, *, mapped: bool = False) -> np.ndarray:
    """Load an array without pickles. mapped: pages are read when used, and copied when written to.

    Raises OSError, and ValueError where the file is no array: numpy raises errors of many kinds for wrong headers.
    """
    require_file(file)
    try:
        with _PARSER:
            array = np.load(file, mmap_mode="c" if mapped else None, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError("it is an archive (.npz), not an array")
    return array


def tensor_of(array: np.ndarray) -> Tensor:
    """Numbers as torch has them: it has no arithmetic for the wider unsigned types. ValueError where it has none."""
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise ValueError(f"dtype {array.dtype}; store numbers of at most 64 bits")
    if not array.size and max(array.shape, default=0) > 1 << 24:
        raise ValueError(f"shape {list(array.shape)}, which is no number")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.dtype.itemsize == 8 and array.size and int(array.max()) >= 1 << 63:
            raise ValueError(f"the number {int(array.max())} is beyond 2^63; store int64")
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))


class Column:
    """A .npy file; ValueError where it is none, or shorter than its header says."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            require_file(file)
            with file.open("rb") as opened:
                version = np.lib.format.read_magic(opened)
                read = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }.get(version)
                if read is None:
                    raise ValueError(f"version {version} of the format")
                with _PARSER:
                    shape, fortran, dtype = read(opened)
                self._start = opened.tell()
        except Exception as error:  # numpy evaluates the header
            raise ValueError(
                f"{file} cannot be read as .npy ({' '.join(str(error).split())[:160]}); save it with numpy.save"
            ) from error
        if (fortran and len(shape) > 1) or dtype.hasobject or not dtype.itemsize:
            raise ValueError(f"{file} holds columns or objects, not rows of numbers; save it with numpy.save, C order")
        self.shape: tuple[int, ...] = tuple(shape)
        self.dtype: np.dtype = dtype
        expected = self._start + int(np.prod(shape, dtype=object)) * dtype.itemsize
        actual = file.stat().st_size
        if 0 in shape[1:] or min(shape, default=0) < 0:
            raise ValueError(f"{file} has shape {list(shape)}, rows of no width; write it again")
        if not shape or actual != expected:
            size = f"is {actual} bytes, its header says {expected}" if shape else "holds a single number"
            raise ValueError(f"{file} {size}; write it again")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        first, last, step = rows.indices(len(self))
        assert step == 1, "rows are read in order"
        width = int(np.prod(self.shape[1:], dtype=np.int64))
        at = self._start + first * width * self.dtype.itemsize
        count = max(0, last - first) * width
        found = np.fromfile(self.file, dtype=self.dtype, count=count, offset=at)
        if len(found) != count:
            raise ValueError(f"{self.file} ends in the middle; write it again")
        return found.reshape(-1, *self.shape[1:])


class ColumnWriter:
    """A .npy file of as many rows as come; its header is right when it is closed."""

    def __init__(self, file: Path, dtype: np.dtype | type, width: tuple[int, ...] = ()) -> None:
        self.file, self.dtype, self.width, self.num_rows = file, np.dtype(dtype), width, 0
        self._out = file.open("wb")
        self._header()

    def _header(self) -> None:
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.num_rows, *self.width)}
        np.lib.format.write_array_header_1_0(self._out, header)  # padded: it is as long for any number of rows

    def write(self, rows: np.ndarray) -> None:
        assert rows.shape[1:] == self.width
        self._out.write(np.ascontiguousarray(rows, dtype=self.dtype).data)
        self.num_rows += len(rows)

    def close(self) -> None:
        data = self._out.tell() - self.num_rows * self.dtype.itemsize * int(np.prod(self.width, dtype=np.int64))
        self._out.seek(0)
        self._header()
        assert self._out.tell() == data, "the header has grown into the data"
        self._out.close()

    def __enter__(self) -> ColumnWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
