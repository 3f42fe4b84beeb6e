"""Several ranks of NCCL on one GPU, for correctness alone: GNNPAR_SHARE_GPU=1. NVIDIA supports one rank a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gnnpar.comm.interfaces import loopback

VARIABLE = "GNNPAR_SHARE_GPU"


def is_shared(environ: Mapping[str, str] = os.environ) -> bool:
    """May ranks share a GPU? ValueError where the variable has another value than 0 and 1."""
    told = environ.get(VARIABLE, "0")
    if told not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={told} is neither 0 nor 1: 1 lets ranks share a GPU")
    return told == "1"


def variables(rank: int) -> dict[str, str]:
    """What NCCL reads when a communicator is made: a rank that calls itself a host of its own talks to the others by
    sockets, and does not refuse a GPU that another rank has."""
    return {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": loopback() or "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }
