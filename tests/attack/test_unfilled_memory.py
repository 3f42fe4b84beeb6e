"""Saved tensors of memory that their file does not fill: it holds what the process has freed, and no file its size."""

import struct
from pathlib import Path

import pytest
import torch

from gnnpar import saved_tensors
from gnnpar.saved_tensors import load_saved

WIDE = 1 << 16


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def together(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def name(module: str, of: str) -> bytes:
    return f"c{module}\n{of}\n".encode()


def call(called: bytes, *given: bytes) -> bytes:
    return called + together(*given) + b"R"


STORAGE = together(text("storage"), name("torch", "FloatStorage"), text("0"), text("cpu"), number(1)) + b"Q"
GROWING = call(name("torch.storage", "UntypedStorage"), number(0))
EMPTY = call(name("torch.nn.parameter", "Parameter"))
SHAPE = (number(0), together(number(WIDE)), together(number(1)))
HOOKS = call(name("collections", "OrderedDict"))


def tensor(storage: bytes, *shape: bytes) -> bytes:
    return call(name("torch._utils", "_rebuild_tensor_v2"), storage, *shape, b"\x89", HOOKS)


ONE = tensor(STORAGE, number(0), together(number(1)), together(number(1)))
LOOKS_LIKE_A_STORAGE = (
    HOOKS + b"}(" + text("dtype") + name("torch", "float32") + text("_untyped_storage") + EMPTY + b"u" + b"b"
)
UNFILLED = {
    "memory of a size": call(name("torch.storage", "UntypedStorage"), number(4 * WIDE)),
    "a tensor that is made larger": ONE + together(GROWING, *SHAPE) + b"b",
    "a tensor that takes another's": ONE + together(EMPTY, *SHAPE) + b"b",
    "a parameter that is made larger": EMPTY + together(EMPTY, *SHAPE) + b"b",
    "a tensor of no storage": tensor(LOOKS_LIKE_A_STORAGE, *SHAPE),
}


def saved(file: Path, pickled: bytes) -> Path:
    """Of one storage of four bytes."""
    writer = torch._C.PyTorchFileWriter(str(file))
    content = b"\x80\x02}" + text("x") + pickled + b"s."
    for record, data in {"data.pkl": content, "byteorder": b"little", "data/0": b"\0\0\x80\x3f"}.items():
        writer.write_record(record, data, len(data))
    writer.write_end_of_file()
    return file


def test_a_file_of_such_opcodes_is_read_where_all_is_filled(tmp_path: Path) -> None:
    assert load_saved(saved(tmp_path / "a.pt", ONE)) == {"x": torch.ones(1)}


@pytest.mark.parametrize("kind", UNFILLED)
def test_memory_that_no_file_fills_is_refused(tmp_path: Path, kind: str) -> None:
    """A file of a kilobyte had the weights of a training hold 5,441 lines of a table that its process had read."""
    with pytest.raises(ValueError, match=r"memory of which it has no content|gives a tensor that is made"):
        load_saved(saved(tmp_path / "a.pt", UNFILLED[kind]))


@pytest.mark.parametrize("kind", [kind for kind in UNFILLED if kind.startswith("a tensor")])
def test_nor_does_one_pass_that_the_look_at_its_opcodes_has_missed(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_tensors, "_refuse_names", lambda file, classes: None)
    with pytest.raises(ValueError, match=f"a tensor takes {4 * WIDE} bytes, of which the file has 0"):
        load_saved(saved(tmp_path / "a.pt", UNFILLED[kind]))


def test_a_file_before_torch_1_6_is_refused(tmp_path: Path) -> None:
    """Such a file says itself which of its storages it fills: 200 bytes were a tensor of gigabytes."""
    torch.save({"x": torch.ones(1)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"does not begin like a file of torch\.save since 1\.6; if it is older"):
        load_saved(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("module", "of"),
    [("torch", "Size"), ("collections", "OrderedDict"), ("builtins", "set"), ("__builtin__", "set")],
)
def test_no_object_is_made_of_the_numbers_of_a_tensor(tmp_path: Path, module: str, of: str) -> None:
    """One number, expanded to a billion, in a file of a kilobyte: a set of a billion tensors."""
    file = saved(tmp_path / "a.pt", call(name(module, of), ONE))
    with pytest.raises(ValueError, match="it makes an object of the numbers of a tensor, one by one"):
        load_saved(file)


def test_no_object_takes_a_tensor_for_its_state(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.pt", call(name("collections", "OrderedDict")) + ONE + b"b")
    with pytest.raises(ValueError, match="it makes an object of the numbers of a tensor, one by one"):
        load_saved(file)
    assert load_saved(saved(tmp_path / "b.pt", together(ONE, ONE))) == {"x": (torch.ones(1), torch.ones(1))}
