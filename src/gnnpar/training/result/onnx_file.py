"""Export a module to ONNX. Needs the extra [onnx]."""

# torch's ONNX exporter has no types without onnx
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

NEEDED = ("onnx", "onnxscript")


def missing() -> str:
    """Return the first missing package of the extra, else ''."""
    return next((name for name in NEEDED if importlib.util.find_spec(name) is None), "")


def onnx_bytes(
    module: nn.Module, inputs: tuple[Tensor, ...], dims: Mapping[str, Mapping[int, torch.export.Dim]], output: str
) -> bytes:
    """Return the ONNX file of a module's forward pass. Raises errors of the exporter.

    `dims`: argument -> its dimensions of any size."""
    with _quiet():
        exported = torch.onnx.export(
            module,
            inputs,
            dynamo=True,
            verbose=False,
            input_names=list(dims),
            output_names=[output],
            dynamic_shapes={name: dict(sizes) for name, sizes in dims.items()},
        )
    assert exported is not None
    proto = exported.model_proto
    for node in [*proto.graph.node, *(node for function in proto.functions for node in function.node)]:
        node.ClearField("metadata_props")  # source lines with local paths
    return proto.SerializeToString()


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager: silence the exporter's warnings about optional packages."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
