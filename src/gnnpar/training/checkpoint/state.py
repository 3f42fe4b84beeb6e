"""Trees of tensors and plain values: how a state is hashed, written and read. Reading never unpickles foreign objects.

A tree is a tensor, None, a bool, int, float or str, or a dict, list or tuple of trees. A NamedTuple becomes a tuple:
what needs its names back makes it again.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnpar.durable import JsonDict, file_hash
from gnnpar.saved_tensors import is_expanded, load_saved, oddity, tensors_in
from gnnpar.track.text import one_line

_SCALARS = (bool, int, float, str)
_DEEPEST = 100
_WORDS, _LEFT, _NEXT = 624, 8, 16  # of a generator: its words, and where it says how many are left and used


def plain(tree: object, at: str = "state") -> Any:  # Any: a tree, as above
    """The same tree of exact types; TypeError names the place of anything else. Tensors keep their memory, unless they
    show a part of a larger one."""
    if tree is None or type(tree) in _SCALARS:
        return tree
    if isinstance(tree, Tensor):
        part = tree.untyped_storage().nbytes() != tree.numel() * tree.element_size()
        return tree.detach().clone() if part else tree.detach()
    if isinstance(tree, Mapping):
        return {plain(k, f"a key of {at}"): plain(v, f"{at}[{k!r}]") for k, v in tree.items()}
    if isinstance(tree, tuple):
        return tuple(plain(v, f"{at}[{i}]") for i, v in enumerate(tree))
    if isinstance(tree, list):
        return [plain(v, f"{at}[{i}]") for i, v in enumerate(tree)]
    raise TypeError(
        f"{at} is a {type(tree).__name__}: a state holds tensors, None, bool, int, float, str, and dict, "
        "list and tuple of them"
    )


def tree_hash(tree: object) -> str:
    """sha256 over structure, types, shapes and bytes; equal for equal bits, wherever a tensor lies."""
    digest = hashlib.sha256()
    for piece in _pieces(plain(tree)):
        digest.update(struct.pack("<q", len(piece)))
        digest.update(piece)
    return digest.hexdigest()


def _pieces(tree: object) -> Iterator[bytes | memoryview]:
    if isinstance(tree, Tensor):
        yield f"tensor {tree.dtype} {tuple(tree.shape)}".encode()
        flat = tree.cpu().contiguous().view(-1)
        yield flat.view(torch.uint8).numpy().data if flat.numel() else b""
    elif isinstance(tree, dict):
        yield f"dict {len(tree)}".encode()
        for key in sorted(tree, key=repr):
            yield repr(key).encode()
            yield from _pieces(tree[key])
    elif isinstance(tree, (list, tuple)):
        yield f"{type(tree).__name__} {len(tree)}".encode()
        for each in tree:
            yield from _pieces(each)
    else:
        yield f"{type(tree).__name__} {tree!r}".encode()


def write_tree(file: Path, tree: object) -> JsonDict:
    """Write a tree through to the disk; its size and checksum."""
    file.unlink(missing_ok=True)  # of an attempt before, or a link of somebody else
    with file.open("xb") as out:
        torch.save(plain(tree), out)
        out.flush()
        os.fsync(out.fileno())
    return {"nbytes": file.stat().st_size, "sha256": file_hash(file)}


def check_tree(file: Path) -> None:
    """ValueError where a file is nothing that a rank left, or cannot be opened."""
    try:
        flaw = _flaw(read_tree(file, torch.device("cpu")))
    except Exception as error:  # torch's readers raise errors of all kinds
        why = one_line(error)[:160] if type(error) is ValueError else type(error).__name__
        raise ValueError(f"{file.name} cannot be opened ({why})") from error
    if flaw:
        raise ValueError(f"{file.name} holds {flaw}")


def _flaw(tree: JsonDict) -> str | None:
    """What no rank writes; tensors first, before anything reads their numbers."""
    if not _is_written_out(tree):
        return "one dict, list or tuple in several places, or too many in each other"
    if any(oddity(t) or t.layout != torch.strided for t in tensors_in(tree)):
        return "a tensor that is sparse, nested, quantized or has no values"
    if any(map(is_expanded, tensors_in(tree))):
        return "a tensor of more numbers than its memory has"
    parts = [tree["model"], tree["optimizer"]["state"], tree["engine"], tree["random"]]
    kinds = all(isinstance(part, dict) for part in parts) and isinstance(tree["optimizer"]["kind"], str)
    kinds = kinds and _is_random_state(tree["random"]["cpu"]) and "cuda" in tree["random"]
    kinds = kinds and all(
        isinstance(k, str) and (isinstance(v, Tensor) or is_extra(k)) for k, v in tree["model"].items()
    )
    return None if kinds else "no model, optimizer, engine and random state"


def is_extra(name: str) -> bool:
    """Is a weight of this name what a module's get_extra_state gave? Such may be any tree."""
    return name.rpartition(".")[2] == "_extra_state"


def _is_written_out(tree: object) -> bool:
    """Whether all of a tree stands in it once, as `plain` makes it: read as often as it is held, a small file has no
    end. The empty tuple is one object in all of Python."""
    met, left = set[int](), [(tree, 0)]
    while left:
        each, depth = left.pop()
        if not isinstance(each, (dict, list, tuple)) or each == ():
            continue
        if id(each) in met or depth > _DEEPEST:
            return False
        met.add(id(each))
        inside = [*each, *each.values()] if isinstance(each, dict) else each
        left += [(part, depth + 1) for part in inside]
    return True


def _is_random_state(state: object) -> bool:
    """Of torch's generator of the CPU, a Mersenne Twister; torch itself takes one that reads beyond its 624 words."""
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or len(state) < _NEXT + 8:
        return False
    said = bytes(state.tolist())
    left = int.from_bytes(said[_LEFT : _LEFT + 4], sys.byteorder)
    used = int.from_bytes(said[_NEXT : _NEXT + 8], sys.byteorder)
    return left + used == _WORDS + 1 or (left, used) == (1, 0)


def read_tree(file: Path, device: torch.device) -> Any:  # Any: a tree
    """What `write_tree` wrote; tensors of any GPU come to `device`, others to the CPU."""
    places = {f"cuda:{i}": str(device) for i in range(64)}
    return load_saved(file, places=places)
