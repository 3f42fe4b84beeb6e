"""Triton's interpreter without most of its overhead."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

MODULES = (tl, tl.core)


def patch_once_a_launch(interpreter: Any = triton_interpreter) -> None:  # Any: its names are private
    """The interpreter replaces the functions of triton.language for a launch, and again at every call of a device
    function inside, 38 % of its time on a kernel of attention. What is replaced already is left alone here.

    Versions of Triton that do this in another way are left as they are.
    """
    if not hasattr(interpreter, "_LangPatchScope") or hasattr(interpreter, "patched"):
        return
    patch, interpreter.patched = interpreter._patch_lang, set()  # the modules that are replaced now

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            interpreter.patched.clear()

    def patch_what_is_not(function: FunctionType) -> object:
        used = {i for i, module in enumerate(MODULES) if any(each is module for each in function.__globals__.values())}
        if used and used <= interpreter.patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        if not interpreter.patched:  # the launch, which restores what it replaced
            scope.__class__ = Scope
        interpreter.patched |= used
        return scope

    interpreter._patch_lang = patch_what_is_not
