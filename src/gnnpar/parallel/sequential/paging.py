"""Virtual memory for tensors: idle storages lie on the host and are loaded when an operation reads them.

The host memory of a GPU is pinned memory; that of a CPU is a file. Other code is unaware: a tensor that was paged out
keeps its identity, its views and its place in the autograd graph; only its storage is empty meanwhile.
"""

# torch's functions for the identity of a storage and for building one are private and untyped
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor, cuda
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

SMALLEST = 1 << 16  # bytes; smaller storages stay in memory
ALIGNED = 1 << 12
MEMORY_FILES = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


class HostFile:
    """One unnamed file, which disappears with the process. Bytes are there when a call returns."""

    ahead = False  # reading before use does not pay

    def __init__(self, folder: Path) -> None:
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ValueError(f"strategy.host_dir={folder} is no folder to write to: give one on a disk, or null.")
        if (kind := file_system(folder)) in MEMORY_FILES:
            raise ValueError(
                f"strategy.host_dir={folder} is a {kind}, which is memory itself: give a folder on a disk."
            )
        self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # open as long as this is
        self._end, self._free = 0, defaultdict[int, list[int]](list)

    def slot(self, nbytes: int) -> _InFile:
        """Return a free place of the same size, else one at the end. Sizes repeat from epoch to epoch."""
        size = -(-nbytes // ALIGNED) * ALIGNED
        if self._free[size]:
            return _InFile(self, self._free[size].pop(), size)
        self._end += size
        return _InFile(self, self._end - size, size)

    def freed(self, offset: int, size: int) -> None:
        self._free[size].append(offset)

    def arriving(self) -> AbstractContextManager[object]:
        return nullcontext()

    def turn(self) -> None:
        """Do nothing: nothing is under way."""


@dataclass
class _InFile:
    """A place in the file. Shapes: [n] uint8."""

    host: HostFile
    offset: int
    size: int

    def write(self, data: Tensor) -> None:
        view, done = _memory(data), 0
        while done < len(view):  # one call moves 2 GiB at most
            done += os.pwrite(self.host.file.fileno(), view[done:], self.offset + done)

    def read(self, into: Tensor) -> None:
        view, done = _memory(into), 0
        while done < len(view):
            done += os.preadv(self.host.file.fileno(), [view[done:]], self.offset + done)

    def use(self, data: Tensor) -> None:
        """Do nothing: the bytes are there."""

    def free(self) -> None:
        self.host.freed(self.offset, self.size)


class HostMemory:
    """Pinned host memory for a GPU. Copies overlap kernels, on one stream for each direction.

    A copy out waits for the kernels launched before it; a copy in waits only for the last copy out of its place;
    kernels wait for the copies in that they read. Memory of a copy in belongs to its stream: it is used again when the
    kernels that read it are done. So the host launches at most two turns ahead of the device, and the device holds the
    pages of two turns.
    """

    ahead = True

    def __init__(self, device: torch.device) -> None:
        self._out, self._in = cuda.Stream(device), cuda.Stream(device)
        self._begun: deque[cuda.Event] = deque()

    def slot(self, nbytes: int) -> _Pinned:
        return _Pinned(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), self._out, self._in)

    def arriving(self) -> AbstractContextManager[object]:
        """Return a context in which device memory is allocated for bytes about to be read."""
        return cuda.stream(self._in)

    def turn(self) -> None:
        """Note that another part begins to work."""
        self._begun.append(_event(cuda.current_stream()))
        if len(self._begun) > 2:
            self._begun.popleft().synchronize()


def _event(stream: cuda.Stream) -> cuda.Event:
    """Return an event after all work launched on the stream so far."""
    event = cuda.Event()
    event.record(stream)
    return event


@dataclass
class _Pinned:
    """Pinned memory. `write` and `read` may be under way when they return; `use` waits before work on bytes read."""

    memory: Tensor
    outward: cuda.Stream
    inward: cuda.Stream
    _written: cuda.Event | None = None
    _arrived: cuda.Event | None = None

    def write(self, data: Tensor) -> None:
        self.outward.wait_stream(cuda.current_stream())
        with cuda.stream(self.outward):
            self.memory.copy_(data, non_blocking=True)
        data.record_stream(self.outward)
        self._written = _event(self.outward)

    def read(self, into: Tensor) -> None:
        if self._written is not None:
            self.inward.wait_event(self._written)
        with cuda.stream(self.inward):
            into.copy_(self.memory, non_blocking=True)
        self._arrived = _event(self.inward)

    def use(self, data: Tensor) -> None:
        if self._arrived is not None:
            cuda.current_stream().wait_event(self._arrived)
            data.record_stream(cuda.current_stream())
            self._arrived = None

    def free(self) -> None:
        """Do nothing: the memory is freed with the slot."""


def _memory(data: Tensor) -> memoryview:
    """Return the bytes of a storage. Not through numpy: a storage that numpy has seen cannot be resized."""
    return memoryview((ctypes.c_char * len(data)).from_address(data.data_ptr())).cast("B")


def file_system(folder: Path) -> str:
    """Return the type of the file system of a folder as the kernel names it; '' if unknown."""
    above, mounts = {str(p) for p in (folder.resolve(), *folder.resolve().parents)}, psutil.disk_partitions(all=True)
    fitting = [(len(mount.mountpoint), i, mount.fstype) for i, mount in enumerate(mounts) if mount.mountpoint in above]
    return max(fitting)[2] if fitting else ""


@dataclass
class Page:
    """A storage and its place on the host, if any. `changed`: the copy on the host is outdated. `unused`: loaded from
    the host and not read since."""

    ref: StorageWeakRef
    nbytes: int
    slot: _InFile | _Pinned | None = None
    changed: bool = True
    unused: bool = False


class Pager:
    """The table of pages. Threads share it and take turns; it is not thread-safe.

    `busy()` is held while bytes move. `moved`: bytes to and from the host so far. `most`: peak bytes of resident pages
    at the end of an operation, since it was last set to 0.

    Work repeats: if the host is worth it, a turn loads ahead the pages that the same turn of the last pass needed, in
    that order. Pages stay until the end of a turn.
    """

    def __init__(
        self,
        host: HostFile | HostMemory,
        *,
        smallest: int = SMALLEST,
        busy: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._host, self._smallest, self._busy = host, smallest, busy
        self._pages: dict[int, Page] = {}
        self._resident: dict[int, Page] = {}
        self._level = self.most = 0
        self.moved = {"out": 0, "in": 0}
        self._work, self._turns = "", defaultdict[int, int](int)
        self._needed: dict[tuple[str, int, int], list[Page]] = {}
        self._noted: list[Page] = []

    def start(self, work: str) -> None:
        """Begin a pass over all parts, equal to the last one of this name."""
        self._work = work
        self._turns.clear()

    def begin(self, part: int) -> None:
        """Begin the next turn of a part in this pass."""
        self._host.turn()
        turn = self._work, part, self._turns[part]
        self._turns[part] += 1
        if self._host.ahead:
            for page in self._needed.get(turn, []):
                storage = _storage(page.ref)
                if storage is not None and page.slot is not None and storage._cdata not in self._resident:
                    self._load(page)
        self._noted = self._needed[turn] = []

    @property
    def nbytes(self) -> int:
        """Return the bytes of all live pages, on the device or on the host."""
        return sum(page.nbytes for page in self._pages.values() if not page.ref.expired())

    def track(self, tensor: Tensor) -> None:
        """Make a tensor a page if it owns enough memory."""
        storage = tensor.untyped_storage()
        if storage.nbytes() >= self._smallest and storage._cdata not in self._pages and storage.resizable():
            self._pages[storage._cdata] = page = Page(StorageWeakRef(storage), storage.nbytes())
            self._count_in(storage._cdata, page)

    def need(self, tensor: Tensor) -> Page | None:
        """Load a tensor's bytes. Return its page, if it is one."""
        cdata = tensor.untyped_storage()._cdata
        page = self._pages.get(cdata)
        if page is not None and cdata not in self._resident:
            self._load(page)
        if page is not None and page.unused and page.slot is not None:
            page.slot.use(_bytes(tensor.untyped_storage()))
            page.unused = False
            self._noted.append(page)
        return page

    def release(self, tensor: Tensor) -> Tensor:
        """Load a tensor and stop paging it."""
        page = self.need(tensor)
        if page is not None:
            self._forget(tensor.untyped_storage()._cdata, page)
        return tensor

    def evict(self, tensor: Tensor) -> None:
        self.track(tensor)
        page = self._resident.get(tensor.untyped_storage()._cdata)
        if page is not None:
            self._offload(page)

    def evict_all(self) -> None:
        """Move everything to the host, after freeing the places of dead pages."""
        self._forget_dead(self._pages)
        for page in list(self._resident.values()):
            self._offload(page)

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Make pages of existing tensors, and send them to the host."""
        for tensor in tensors:
            self.evict(tensor)

    def _offload(self, page: Page) -> None:
        storage = _storage(page.ref)
        if storage is None:  # dead; it is buried later
            return
        if page.changed:
            with self._busy(), _disable_current_modes():
                page.slot = page.slot or self._host.slot(page.nbytes)
                page.slot.write(_bytes(storage))
            self.moved["out"] += page.nbytes
        storage.resize_(0)
        page.changed = page.unused = False
        self._count_out(storage._cdata)

    def _load(self, page: Page) -> None:
        storage = _storage(page.ref)
        assert storage is not None and page.slot is not None, "an operation reads a tensor that has died"
        with self._host.arriving():
            storage.resize_(page.nbytes)
        with self._busy(), _disable_current_modes():
            page.slot.read(_bytes(storage))
        page.unused = True
        self.moved["in"] += page.nbytes
        self._count_in(storage._cdata, page)

    def _count_in(self, cdata: int, page: Page) -> None:
        self._resident[cdata] = page
        self._level += page.nbytes
        if self._level > self.most:
            self._forget_dead(self._resident)
            self.most = max(self.most, self._level)

    def _count_out(self, cdata: int) -> None:
        page = self._resident.pop(cdata, None)
        self._level -= page.nbytes if page else 0

    def _forget_dead(self, pages: dict[int, Page]) -> None:
        for cdata, page in list(pages.items()):
            if page.ref.expired():
                self._forget(cdata, page)

    def _forget(self, cdata: int, page: Page) -> None:
        if page.slot is not None:
            page.slot.free()
        self._count_out(cdata)
        del self._pages[cdata]


def _storage(ref: StorageWeakRef) -> torch.UntypedStorage | None:
    return torch.UntypedStorage._new_with_weak_ptr(ref.cdata)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]


class Paging(TorchDispatchMode):
    """While active, operations of this thread load their operands, and their results become pages."""

    def __init__(self, pager: Pager) -> None:
        super().__init__()
        self.pager = pager

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        pager, kwargs = self.pager, kwargs or {}
        known: set[int] = set()  # a view has no memory of its own, and may show a parameter, which is no page
        for tensor in _tensors((args, kwargs)):
            pager.need(tensor)
            known.add(tensor.untyped_storage()._cdata)
        out = func(*args, **kwargs)
        schema = func._schema
        if schema.is_mutable:
            values = {given.name: value for given, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
            written = (a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
            for tensor in _tensors([values.get(name) for name in written]):
                if (page := pager.need(tensor)) is not None:
                    page.changed = True
        for tensor in _tensors(out):
            if tensor.untyped_storage()._cdata not in known:
                pager.track(tensor)
        return out


def _tensors(tree: object) -> Iterator[Tensor]:
    """Return the tensors among arguments or results: tensors, and lists, tuples and dictionaries of them."""
    if isinstance(tree, Tensor):
        if tree.layout is torch.strided:
            yield tree
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _tensors(each)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from _tensors(each)
