"""torch's optimizers without its compiler.

An optimizer of torch imports torch._dynamo when it is made and at every step, to keep the compiler out of them: with
sympy, Triton and the inductor, as long again as torch itself takes. Nothing is compiled here. What these do is what
torch's do, to the bit: the same functions, without the wrapper that calls the compiler.
"""

from __future__ import annotations

from inspect import unwrap
from typing import TypeVar, cast

import torch

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def eager(kind: type[Kind]) -> type[Kind]:
    """A class of the same name, whose step records no gradient, as torch's does by default."""
    plain = {
        "add_param_group": unwrap(kind.add_param_group),
        "zero_grad": unwrap(kind.zero_grad),
        "step": torch.no_grad()(unwrap(kind.step)),
    }
    return cast("type[Kind]", type(kind.__name__, (kind,), plain))


Adam = eager(torch.optim.Adam)
AdamW = eager(torch.optim.AdamW)
SGD = eager(torch.optim.SGD)
