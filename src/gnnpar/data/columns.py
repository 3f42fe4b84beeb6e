"""Arrays in .npy files, read and written by slices of rows, for graphs beyond memory. Slices are copied, not mapped, so
that only a chunk is resident and not the file."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_PARSER = threading.Lock()  # CPython 3.11.7 raises SystemError if two threads parse headers (ast) at once


def load_npy(file: Path, *, mapped: bool = False) -> np.ndarray:
    """Load an array without pickles. mapped: read pages when used, copy them when written to.

    Raises OSError, and ValueError for a file that is not an array: numpy raises many kinds of errors for wrong headers.
    """
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


def tensor_of(array: np.ndarray, title: str) -> Tensor:
    """Return a tensor; wide unsigned integers become int64, long doubles float64. Raises ValueError, with the title."""
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{title} has dtype {array.dtype}; store numbers.")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.dtype.itemsize == 8 and array.size and int(array.max()) >= 1 << 63:
            raise ValueError(f"{title} has the number {int(array.max())}, beyond 2^63; store int64.")
        array = array.astype(np.int64)  # torch has no arithmetic for the wider unsigned types
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))


class Column:
    """A .npy file. Raises ValueError for another format, or a size that differs from its header."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            array = load_npy(file, mapped=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read as .npy ({error}); save it with numpy.save") from error
        assert isinstance(array, np.memmap)
        self.shape, self.dtype = array.shape, array.dtype
        if not array.ndim or 0 in array.shape[1:] or not array.flags.c_contiguous:
            raise ValueError(f"{file} of shape {list(array.shape)} has no rows in C order; save it with numpy.save")
        expected, actual = array.offset + array.nbytes, file.stat().st_size
        if actual != expected:
            raise ValueError(f"{file} is {actual} bytes, its header says {expected}; write it again")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        try:
            return np.array(load_npy(self.file, mapped=True)[rows])
        except ValueError as error:
            raise ValueError(f"{self.file} ends in the middle; write it again") from error


class ColumnWriter:
    """Writer of a .npy file row by row; the header is complete after `close`."""

    def __init__(self, file: Path, dtype: np.dtype | type, width: tuple[int, ...] = ()) -> None:
        self.file, self.dtype, self.width, self.num_rows = file, np.dtype(dtype), width, 0
        self._out = file.open("wb")
        self._header()

    def _header(self) -> None:
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.num_rows, *self.width)}
        np.lib.format.write_array_header_1_0(self._out, header)  # padded to the same length for any number of rows

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
