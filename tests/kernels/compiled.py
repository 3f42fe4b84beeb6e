"""Compile kernel variants ahead of time and report what the machine code does: one JSON line each.

    python tests/kernels/compiled.py sm_90 spmm.triton ...      # modules of gnnpar_kernels; none: all with kernels
    python tests/kernels/compiled.py sm_90 spmm.triton --first  # one variant of every kernel

A process of its own, as kernels imported under TRITON_INTERPRET=1 cannot be compiled.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import gnnpar_kernels
from gnnpar_kernels.triton_tuning import Variant

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def variants(module: str, *, first: bool) -> list[Variant]:
    """All variants of a module, or one of every kernel."""
    found = importlib.import_module(f"gnnpar_kernels.{module}").variants()
    return list({id(each.kernel): each for each in reversed(found)}.values()) if first else found


def modules() -> list[str]:
    """The modules that compile kernels ahead of time, as `kernel.module`."""
    root = Path(gnnpar_kernels.__path__[0])
    paths = sorted(path for path in root.glob("*/triton*.py") if "def variants(" in path.read_text())
    return [f"{path.parent.name}.{path.stem}" for path in paths]


def _compile(variant: Variant, target: str):
    name, kernel, types, constants, num_warps, _ = variant
    names = kernel.arg_names
    missing = set(names) ^ (set(types) | set(constants))
    if missing:
        raise ValueError(f"{name}: arguments {sorted(missing)} are not given once, as type or constant")
    signature = {name: types.get(name, "constexpr") for name in names}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=TARGETS[target], options={"num_warps": num_warps})


def report(variant: Variant, target: str) -> dict:
    """Registers, spilled bytes, and the widest global loads, of one variant on one target."""
    built = _compile(variant, target)
    row = {"name": variant.name, "target": target, "wide": variant.wide}
    if "amdgcn" in built.asm:
        text = built.asm["amdgcn"]
        spills = sum(int(n) for n in re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", text))
        return row | {"spills": spills, "wide_loads": len(re.findall(r"(?:global|buffer)_load_dwordx4", text))}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    registers, stack, local = (int(n) for n in found)
    wide = len(re.findall(r"ld\.global[\w.]*\.(?:v4\.b32|v2\.b64|b128)", built.asm["ptx"]))
    return row | {"registers": registers, "spills": stack + local, "wide_loads": wide}


def main() -> None:
    target, *asked = sys.argv[1:]
    named = [name for name in asked if name != "--first"]
    for module in named or modules():
        for variant in variants(module, first="--first" in asked):
            sys.stdout.write(json.dumps({"module": module, **report(variant, target)}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
