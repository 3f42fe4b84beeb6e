"""Statistics of the kernels' machine code without a GPU: compile ahead of time for several GPUs, and parse the code.

    python kernels/bench/static.py sm_90 triton_rows ...      # one JSON line per variant; no module: all
    python kernels/bench/static.py sm_90 triton_rows --first  # one variant of every kernel
    python kernels/bench/static.py sm_80 --main               # variants of the table
    python kernels/bench/static.py --table                    # results/static-VERSION.csv
    python kernels/bench/static.py --names                    # names in the table, without compiling

`ahead.py` lists the variants. Run this as a separate process, since kernels imported under TRITON_INTERPRET=1 cannot be
compiled. Rows of other commits are kept: each was made by its commit's static.py.
"""

import csv
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.ahead import MAIN, Variant, variants

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
RESULTS = Path(__file__).parent / "results" / f"static-{triton.__version__}.csv"
_LOAD = re.compile(r"\bld\.global[\w.]*?(?:\.v([24]))?\.[busf](8|16|32|64|128)\b")
_STORE = re.compile(r"\bst\.global[\w.]*?(?:\.v([24]))?\.[busf](8|16|32|64|128)\b")
_AMD = re.compile(r"\b(?:global|buffer)_(load|store)_(ubyte|sbyte|byte|ushort|short|dword)(?:x([234]))?(?:_d16\w*)?\b")
_AMD_BYTES = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "short": 2, "dword": 4}


def _compile(variant: Variant, target: str):
    name, kernel, types, constants, num_warps, *_ = variant
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
    """Return, for one variant on one target: registers per thread, spilled bytes (AMD: registers), instructions in the
    text (PTX or GCN), bytes that a thread loads and stores if every line runs once, and the widest global loads."""
    built = _compile(variant, target)
    row = {
        "name": variant.name,
        "kernel": variant.kernel.fn.__name__,
        "target": target,
        "triton": triton.__version__,
        "wide": variant.wide,
    }
    if "amdgcn" in built.asm:
        text = built.asm["amdgcn"]
        code = text.partition(".amdhsa_kernel")[0].partition("s_endpgm")[0]
        moved = {"load": 0, "store": 0}
        for way, kind, count in _AMD.findall(code):
            moved[way] += _AMD_BYTES[kind] * int(count or 1)
        return row | {
            "registers": max(int(n) for n in re.findall(r"\.vgpr_count:\s*(\d+)", text)),
            "spills": sum(int(n) for n in re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", text)),
            "instructions": sum(bool(re.match(r"\s+[a-z]\w+[_ ]", line)) for line in code.splitlines()),
            "loaded": moved["load"],
            "stored": moved["store"],
            "wide_loads": len(re.findall(r"(?:global|buffer)_load_dwordx4", text)),
        }
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    registers, stack, local = (int(n) for n in found)
    ptx = built.asm["ptx"]
    body = [line for line in ptx.partition("\n{")[2].splitlines() if re.match(r"\s+(@!?%p\d+ )?[a-z]", line)]
    return row | {
        "registers": registers,
        "spills": stack + local,
        "instructions": len(body),
        "loaded": sum(int(n or 1) * int(bits) // 8 for n, bits in _LOAD.findall(ptx)),
        "stored": sum(int(n or 1) * int(bits) // 8 for n, bits in _STORE.findall(ptx)),
        "wide_loads": len(re.findall(r"ld\.global[\w.]*\.(?:v4\.b32|v2\.b64|b128)", ptx)),
    }


COLUMNS = ("kernels", "triton", "target", "module", "name", "registers", "spills", "instructions", "loaded", "stored")


def write_table() -> None:
    """Write the main variants on all targets by this Triton; rows of other kernels stay."""
    rows: list[dict[str, Any]] = []  # text of CSV, or numbers
    if RESULTS.exists():
        with RESULTS.open(newline="") as file:
            rows += [row for row in csv.DictReader(file) if row["kernels"] != "now"]
    for variant in filter(_is_main, variants()):
        for target in TARGETS:
            found = {"kernels": "now", "module": variant.module} | report(variant, target)
            rows.append({name: found[name] for name in COLUMNS})
            print(*rows[-1].values(), flush=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _is_main(variant: Variant) -> bool:
    return MAIN.match(variant.name) is not None


def main() -> None:
    if sys.argv[1:] == ["--table"]:
        write_table()
        return
    if sys.argv[1:] == ["--names"]:
        print(*(each.name for each in filter(_is_main, variants())), sep="\n")
        return
    target, *asked = sys.argv[1:]
    named = {name for name in asked if not name.startswith("--")}
    if unknown := named - (known := {each.module for each in variants()}):
        sys.exit(f"no kernels in {', '.join(sorted(unknown))}: choose from {', '.join(sorted(known))}")
    chosen = [each for each in variants() if not named or each.module in named]
    if "--first" in asked:
        chosen = list({each.kernel.fn: each for each in reversed(chosen)}.values())
    for variant in chosen:
        if "--main" not in asked or _is_main(variant):
            print(json.dumps({"module": variant.module, **report(variant, target)}), flush=True)


if __name__ == "__main__":
    main()
