"""`gnnpar doctor`: report the capabilities of this machine."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import ArgumentParser

from rich.markup import escape
from rich.table import Table

from gnnpar.files import JsonDict
from gnnpar.track.console import stdout
from gnnpar.training.result.result import installed, processor, versions

EXTRAS = {
    "torch_sparse": "[sparse]",
    "torch_scatter": "[sparse]",
    "onnx": "[onnx]",
    "onnxscript": "[onnx]",
    "wandb_workspaces": "[dashboard]",
}


def run(argv: list[str]) -> int:
    parser = ArgumentParser("gnnpar doctor", description="Report the capabilities of this machine.")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    options = parser.parse_args(argv)
    facts = diagnose()
    if options.json:
        sys.stdout.write(json.dumps(facts, indent=1) + "\n")
        return 0
    table = Table(box=None, show_header=False)
    for section, values in facts.items():
        for i, (name, value) in enumerate(values.items()):
            table.add_row(section if i == 0 else "", name, escape(str(value)))
    stdout().print(table)
    return 0


def diagnose() -> dict[str, JsonDict]:
    """Return versions, devices, backends, launches, kernels, extras."""
    import torch

    from gnnpar.comm.process import backends
    from gnnpar.launch.emulated.paced import trial

    packages = ("torch_geometric", "hydra-core", "pymetis", "scipy", "wandb")
    named = versions() | {"torch": torch.__version__} | {name: installed(name) for name in packages}
    return {
        "versions": {name: version or "not installed" for name, version in named.items()},
        "devices": devices(),
        "backends": {name: "yes" if there else "not in this torch" for name, there in backends().items()}
        | {"threads": "yes"},
        "launch": {"local": "yes", "paced": trial()},
        "kernels": kernels(),
        "extras": {name: extra(name, how) for name, how in EXTRAS.items()},
    }


def devices() -> dict[str, str]:
    import torch

    from gnnpar.comm.world import num_cores

    devices = {"cpu": f"{processor()}, {num_cores()} cores for ranks, {torch.get_num_threads()} threads by default"}
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        devices[f"cuda:{i}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if not torch.cuda.is_available():
        devices["cuda"] = "none that torch sees"
    return devices


def kernels() -> dict[str, str]:
    """Return operation -> its body on this machine, and why."""
    import gnnpar_kernels

    try:
        chosen = gnnpar_kernels.implementations()
    except ValueError as error:  # GNNPAR_KERNELS forces a body that cannot run here
        return {"error": str(error)}
    return {op: f"{choice.body} ({choice.reason})" for op, choice in chosen.items()}


def extra(name: str, how: str) -> str:
    if importlib.util.find_spec(name) is None:
        return f"not installed; pip install gnnpar{how}"
    return installed(name) or "installed"
