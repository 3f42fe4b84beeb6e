"""List the kernels to compile ahead of time: call ops with small tensors, and record their launches.

The list has all launches of training and evaluation at one width, and the main kernels at other widths. A call covers
rows of every class of length, one of them cut into pieces, and every tile that tuning may choose.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from gnnpar_kernels import Csr, triton_tasks, wire
from gnnpar_kernels.dispatch import functions_of
from gnnpar_kernels.dropout.triton import _keep_kernel
from gnnpar_kernels.hashing import Key, key_tensor
from gnnpar_kernels.triton_tuning import Tuned

DEGREES = (0, 2, 9, 40, 600)
TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.int8: "i8",
}  # fmt: skip
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
OPS = functions_of("triton")
ROWS = (
    (128, BF16), (128, FP32), (512, BF16), (512, FP32), (300, FP32), (47, FP32), (47, BF16), (8, BF16), (128, FP16),
    (47, FP64),
)  # fmt: skip
MAIN = re.compile(
    r"(fold|source|destination)( v2)? 4x64 (bf16|fp32)( branch)? all rows bound (0|16) tile (256|512)"
    r"( split)?( fresh)?$"
    r"|(fold|source|destination) dot( edges 4)? 4x64 (bf16|fp32) all rows bound (0|16) tile 256( split)?( fresh)?$"
    r"|dots 4x64 fp32 and (bf16|fp32)$|(de)?quantize (8|mixed) 128 0 (fp32|bf16)( all rows)?$"
    r"|(low|piece|combine) (weighted )?(sum|maximum) 128 (bf16|fp32) all rows( bound \d+)? fresh$"
    r"|(gather|scatter|dropout) 128 (bf16|fp32)$"
)
"""Names of the table of machine code (`static.py --table`)."""
Case = tuple[str, Callable[[], object]]  # (name of its kernels, call that launches them)


class Variant(NamedTuple):
    """A kernel of one case. `types` gives every argument that is not a constant ("*bf16", "i32"); pointers count as
    16-byte aligned. `wide`: its hot loop must load 16 bytes at once."""

    name: str
    kernel: Any  # a JITFunction, which pyright would bind as a method
    types: dict[str, str]
    constants: dict[str, object]
    num_warps: int
    wide: bool

    @property
    def module(self) -> str:
        return self.kernel.fn.__module__.removeprefix("gnnpar_kernels.")


@cache
def variants() -> list[Variant]:
    """Return all variants; of variants with the same code, only the first."""
    found: dict[object, Variant] = {}

    def note(kernel: JITFunction, *args: object, grid: object, warmup: bool, num_warps: int, **rest: object) -> None:
        if kernel.fn.__module__.endswith("triton_rows") and "sum " not in name and "maximum " not in name:
            return  # sums of pieces within attention, which the sums cover
        variant = _variant(name, kernel, dict(zip(kernel.arg_names, args, strict=False)) | rest, num_warps)
        found.setdefault((kernel.fn, *variant.types.items(), *variant.constants.items(), num_warps), variant)

    def with_every_tile(tuned: Tuned, grid: object, *args: object, **rest: object) -> None:
        for tile in tuned.candidates:
            tuned.launch(grid, args, rest, tile)

    kind = type(_keep_kernel)  # compiled or interpreted
    tiles, pieces = mock.patch.object(Tuned, "run", with_every_tile), mock.patch.object(triton_tasks, "SPLIT", 256)
    with mock.patch.object(kind, "run", note), tiles, pieces:
        for name, call in _cases():  # noqa: B007 (read by `note`)
            call()
    return list(found.values())


def _variant(case: str, kernel: JITFunction, given: dict[str, object], num_warps: int) -> Variant:
    fixed = {name for name, kind in kernel.fn.__annotations__.items() if kind is tl.constexpr}
    constants = {n: given[n] for n in kernel.arg_names if n in fixed or given[n] is None}
    types = {n: given[n] for n in kernel.arg_names if n not in constants}
    what = kernel.fn.__name__.strip("_").removesuffix("_kernel")
    if "SOURCE" in constants:
        what = "source" if constants["SOURCE"] else "destination"
    if constants.get("ADD"):
        what += " and add"
    flags = "".join(f" {name.lower()} {constants[name]}" for name in ("BOUND", "TILE") if name in constants)
    flags += " split" * bool(constants.get("SPLIT"))
    if "FRESH" in constants:
        flags += " fresh" if constants["FRESH"] else " added"
    rows = [each for each in types.values() if isinstance(each, Tensor) and each.dim() > 1 and each.is_floating_point()]
    wide = max((each.shape[-1] * each.element_size() for each in rows), default=1) % 16 == 0
    return Variant(
        f"{what} {case}{flags}",
        kernel,
        {n: "*" + TYPES[each.dtype] if isinstance(each, Tensor) else "i32" for n, each in types.items()},
        constants,
        num_warps,
        wide and what not in ("combine", "keep", "dequantize"),
    )


def _csr(index: torch.dtype = torch.int32, *, listed: bool = False) -> Csr:
    degrees = torch.tensor([0, *DEGREES])
    rows = torch.arange(len(DEGREES)) if listed else None
    return Csr(
        degrees.cumsum(0).to(index), torch.zeros(sum(DEGREES), dtype=index), rows, torch.zeros(sum(DEGREES)).long()
    )


def _rows(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(len(DEGREES), *shape, dtype=dtype)


def _cases() -> Iterator[Case]:
    yield from _sums_and_maxima()
    yield from _attention()
    yield from _moves()
    yield from _codes()


def _sums_and_maxima() -> Iterator[Case]:
    cases = [(*shape, torch.int32, True, bool(number % 2)) for number, shape in enumerate(ROWS)]
    cases += [(width, FP32, torch.int64, True, False) for width in (8, 10, 128)]
    cases += [(128, *each) for each in itertools.product((FP32, BF16), (torch.int32,), (True, False), (True, False))]
    for width, dtype, index, listed, added in cases:
        csr, x = _csr(index, listed=listed), _rows(width, dtype=dtype)
        how = {"num_rows": len(DEGREES), "rows": csr.rows}
        name = f"{width} {TYPES[dtype]}" + " by int64" * (index == torch.int64) + " all rows" * (not listed)
        state = (_rows(width, dtype=dtype), _rows(width).long()) if added else None
        yield f"maximum {name}", partial(OPS.extremum, *csr[:2], x, _rows().long(), **how, state=state)
        kinds = (dtype, FP32) if width == 128 and dtype != FP32 else (dtype,)  # a fold's state is fp32
        outs = [_rows(width, dtype=each) for each in kinds] if added else [None]
        for out, weights in itertools.product(outs, (None, torch.empty(sum(DEGREES)))):
            to = f" to {TYPES[out.dtype]}" if out is not None and out.dtype != dtype else ""
            case = "sum " if weights is None else "weighted sum "
            if weights is None or width == 128:
                yield case + name + to, partial(OPS.spmm, *csr[:2], x, **how, weights=weights, out=out)


class Heads(NamedTuple):
    """A case of attention. `grad`: type of the result's gradient, if it differs. `key`: of dropout. `listed`: rows are
    listed. `training`: also folds into a state, and attributes of edges."""

    heads: int
    width: int
    dtype: torch.dtype
    grad: torch.dtype | None = None
    key: Key | None = None
    listed: bool = True
    training: bool = False

    def name(self, branch: str = "") -> str:
        grad = f" of {TYPES[self.grad]}" if self.grad else ""
        drop = "" if self.key is None else " drop captured" if isinstance(self.key, Tensor) else " drop"
        return f"{self.heads}x{self.width} {TYPES[self.dtype]}{grad}{drop}{branch}{'' if self.listed else ' all rows'}"

    def rows(self, *columns: int, dtype: torch.dtype | None = None) -> Tensor:
        return _rows(self.heads, *columns, dtype=dtype or self.dtype)

    def folds(self, op: Callable[..., object], csr: Csr, *operands: Tensor, **how: Any) -> Iterator[Callable]:
        """Yield the fold without a state and, in training, into one."""
        acc = self.rows(self.width + (how["edge"].shape[1] if "edge" in how else 0), dtype=FP32)
        m = self.rows(dtype=FP32)
        for state in [None, (m, m, acc, m, acc) if how.get("branch") else (m, m, acc)][: 1 + self.training]:
            yield partial(op, *csr[:2], *operands, num_rows=len(DEGREES), rows=csr.rows, state=state, **how)


def _attention() -> Iterator[Case]:
    kinds = [(FP32, None), (BF16, None), (BF16, FP32), (FP32, BF16)]
    shapes = (4, 64), (8, 32), (4, 128), (4, 32), (1, 64), (1, 47)
    cases = [Heads(*shape, dtype) for dtype in (BF16, FP32) for shape in shapes]
    cases += [Heads(4, 64, FP16), Heads(1, 256, FP32), Heads(4, 128, BF16, key=7), Heads(1, 512, BF16, key=7)]
    for (dtype, grad), key, listed in itertools.product(kinds, (None, 7, key_tensor(7)[0]), (True, False)):
        cases.append(Heads(4, 64, dtype, grad, key, listed, training=True))
    for case in cases:
        yield from _by_sums(case)
        yield from _by_rows(case)


def _by_sums(case: Heads) -> Iterator[Case]:
    """Yield the cases of GAT."""
    csr, drop = _csr(listed=case.listed), None if case.key is None else (0.5, case.key)
    x, scores, dense = case.rows(case.width), case.rows(dtype=FP32), case.rows(case.width, dtype=FP32)
    grad_out = case.rows(case.width, dtype=case.grad)
    how = {"slope": 0.2, "drop": drop, "edge_ids": csr.edge_ids}
    for branch in (False, True):
        for call in case.folds(OPS.attend, csr, x, scores, scores, branch=branch, **how):
            yield case.name(" branch" * branch), call
    for side in (OPS.attend_grad_src, OPS.attend_grad_dst):
        given = (x, scores, scores, dense, scores, grad_out)
        yield case.name(), partial(side, *csr[:2], *given, rows=csr.rows, delta=scores, **how)
    for rows in (dense, x):
        name = f"{case.heads}x{case.width} {TYPES[rows.dtype]} and {TYPES[grad_out.dtype]}"
        yield name, partial(OPS.row_dots, rows, grad_out, dtype=FP32)


def _by_rows(case: Heads) -> Iterator[Case]:
    """Yield the cases of GATv2 and of dot-product attention, without and with attributes of edges."""
    csr, drop = _csr(listed=case.listed), None if case.key is None else (0.5, case.key)
    x, m, a = case.rows(case.width), case.rows(dtype=FP32), torch.empty(case.heads, case.width)
    order, dropping = torch.zeros(sum(DEGREES), dtype=torch.int64), {"drop": drop, "edge_ids": csr.edge_ids}
    for call in case.folds(OPS.attend_v2, csr, x, x, a, slope=0.2, **dropping):
        yield f"v2 {case.name()}", call
    ends = (m, case.rows(case.width, dtype=case.grad), m)
    yield f"v2 {case.name()}", partial(OPS.attend_v2_grad, csr, csr, order, x, x, a, *ends, slope=0.2, drop=drop)
    for beside in (0, 4)[: 1 + case.training]:
        edge = torch.empty(sum(DEGREES), beside, dtype=case.dtype)
        more = {"edge": edge, "edge_query": case.rows(beside)} if beside else {}
        kind = "dot" + f" edges {beside}" * bool(beside)
        for call in case.folds(OPS.attend_dot, csr, x, x, x, **dropping, **more):
            yield f"{kind} {case.name()}", call
        ends = (m, case.rows(case.width + beside, dtype=case.grad), m)
        for of_edge in (False, True)[: 1 + bool(beside)]:
            given, how = (csr, csr, order, x, x, x, *ends), {"drop": drop, "of_edge": of_edge, **more}
            yield f"{kind} {'and edges ' * of_edge}{case.name()}", partial(OPS.attend_dot_grad, *given, **how)


def _moves() -> Iterator[Case]:
    index, ids = torch.zeros(5).long(), torch.zeros(5).long()
    for width, dtype in ((128, BF16), (602, FP32), (128, FP32), (47, BF16), (8, FP16)):
        x, name = _rows(width, dtype=dtype), f"{width} {TYPES[dtype]}"
        yield name, partial(OPS.gather_rows, x, index)
        yield name, partial(OPS.scatter_add_rows_, x, index, x)
    for key, captured in ((7, ""), (key_tensor(7)[0], " captured")):
        for width, dtype in ((128, BF16), (128, FP32), (602, FP32), (47, BF16), (64, FP16)):
            yield (
                f"{width} {TYPES[dtype]}{captured}",
                partial(OPS.dropout, _rows(width, dtype=dtype), ids, p=0.5, key=key),
            )
        for width in (128, 47):
            yield f"{width}{captured}", partial(OPS.keep_mask, ids, width, p=0.5, key=key)
    for dtype in (BF16, FP32, FP64):
        yield TYPES[dtype], partial(OPS.apply_mask, _rows(8, dtype=dtype), _rows(8) > 0, p=0.5)


def _codes() -> Iterator[Case]:
    every = (0, *wire.CODES)  # 0: codes per row
    shapes = [(code, width, 0, FP32, True) for code in every for width in (128, 256)]
    shapes += [(code, 256, 0, BF16, True) for code in (0, 2, 8)]
    shapes += [(c, width, block, FP32, True) for c in (0, 8) for width, block in ((256, 64), (1433, 0), (602, 0))]
    shapes += [(c, 128, 0, t, listed) for c in (0, 8) for t in (FP32, BF16) for listed in (True, False)]
    for code, width, block, dtype, listed in shapes:
        x, ids = _rows(width, dtype=dtype), torch.arange(len(DEGREES))
        index = ids if listed else None
        codes = torch.full((len(DEGREES),), 8, dtype=torch.uint8)
        bits = (code,) if code else (codes, wire.row_offsets(codes, width, block=block))
        nbytes = wire.row_nbytes(width, code or 8, block=block) * len(DEGREES)
        name = f"{code or 'mixed'} {width} {block} {TYPES[dtype]}" + " all rows" * (not listed)
        yield name, partial(OPS.quantize_rows, x, index, *bits, ids=ids, key=7, block=block)
        for add in (False, True):
            buffer, how = torch.zeros(nbytes, dtype=torch.uint8), {"width": width, "block": block, "out": x}
            yield name, partial(OPS.dequantize_rows, buffer, *bits, index=index, add=add, **how)
