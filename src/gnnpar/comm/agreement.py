"""What every rank must have alike, because it decides who takes part in a collective."""

from __future__ import annotations

from gnnpar.comm.communicator import Communicator


def refuse_disagreement(value: object, what: str, comm: Communicator) -> None:
    """ValueError on every rank where one has another value than rank 0: they would wait for each other. Collective."""
    everyone = comm.gather(repr(value)) or []
    unlike = comm.broadcast([rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]][:1])
    if unlike:
        raise ValueError(
            f"rank {unlike[0]} has saved another {what} than rank 0: its checkpoint is of another run, or forged"
        )
