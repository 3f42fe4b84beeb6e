"""Configurations that are timed once per shape class on a GPU, and the variants that must compile without one."""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns at the first compilation if it is unset


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU: decided by TRITON_INTERPRET=1 when they are imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def configs(*meta: dict[str, int], num_warps: Sequence[int] = (1,)) -> list[triton.Config]:
    """All pairs of meta-parameters and warp counts, the first being the best guess."""
    return [triton.Config(dict(each), num_warps=warps) for warps in num_warps for each in meta]


def autotuned(
    candidates: list[triton.Config], *, key: Sequence[str], restores: Sequence[str] = ()
) -> Callable[[JITFunction], Autotuner]:
    """Decorator above `triton.jit`: the fastest of these per `key`, remembered on disk.

    The first one, without timing, when interpreting or under GNNPAR_TUNE=0. `restores` names the tensors a kernel
    accumulates into, so that trials do not add up.
    """
    if interpreting() or os.environ.get("GNNPAR_TUNE", "1") == "0":
        candidates = candidates[:1]
    return triton.autotune(
        configs=candidates, key=list(key), restore_value=list(restores) or None, cache_results=not interpreting()
    )


class Variant(NamedTuple):
    """A kernel as it is compiled ahead of time: the test compiles it for every target and reads the machine code.

    `types` gives every argument that is not a constant ("*bf16", "i32", "fp32"); pointers count as 16-byte aligned.
    `wide`: its hot loop must load 16 bytes at once.
    """

    name: str
    kernel: JITFunction
    types: dict[str, str]
    constants: dict[str, object]
    num_warps: int = 1
    wide: bool = True


ROW_SHAPES = (
    (128, "bf16"), (128, "fp32"), (512, "bf16"), (512, "fp32"), (300, "fp32"), (47, "fp32"), (47, "bf16"), (8, "bf16"),
    (128, "fp16"), (47, "fp64"),
)  # fmt: skip


def row_shape(width: int, dtype: str) -> tuple[int, dict[str, object], bool]:
    """(item size, constants, whether rows load 16 bytes at once) of rows of this width and Triton type."""
    item = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[dtype]
    acc = tl.float64 if dtype == "fp64" else tl.float32
    return item, {"W": width, "ACC": acc}, width * item % 16 == 0
