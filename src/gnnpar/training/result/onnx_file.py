"""ONNX, which other runtimes read. Needs the extra [onnx]."""

# this file alone uses torch's ONNX exporter, whose results have no types where onnx is not installed
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
    """The first package of the extra that is not installed; empty where all are."""
    return next((name for name in NEEDED if importlib.util.find_spec(name) is None), "")


def onnx_bytes(
    module: nn.Module, inputs: tuple[Tensor, ...], dims: Mapping[str, Mapping[int, torch.export.Dim]], output: str
) -> bytes:
    """A file of a module's forward pass. `dims`: of each input, by the name of its argument, the sizes that may be any.
    Errors of the exporter as they are."""
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
        node.ClearField("metadata_props")  # lines of the source, with the folders of this machine
    return proto.SerializeToString()


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter names every package that it does without."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
