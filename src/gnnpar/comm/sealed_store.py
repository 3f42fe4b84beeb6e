"""The store through which gloo's ranks tell each other their addresses, with a proof beside each.

Anybody may reach torch's store and write there. Without the proof, who overwrites an address has a rank connect to him.
"""

# torch.distributed declares no types of its stores
# pyright: reportUnknownMemberType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gnnpar.comm.authentication import SIZE, NotOfThisRun, proof, proves


class SealedStore(Store):
    """`store`, whose values carry an HMAC of their name and of themselves with the key of this meeting of ranks.

    Counts (`add`) carry none: who changes one can end the meeting, and no more.
    """

    def __init__(self, store: Store, key: bytes) -> None:
        super().__init__()
        self._store, self._key = store, key

    def set(self, key: str, value: str | bytes | Sequence[int]) -> None:
        plain = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, proof(self._key, key.encode(), plain) + plain)  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        """Raises NotOfThisRun for what a stranger has put there."""
        given = bytes(self._store.get(key))
        if not proves(given[:SIZE], self._key, key.encode(), given[SIZE:]):
            raise NotOfThisRun(
                f"the ranks' store holds as {key} what proves no knowledge of the run's key: a stranger writes there"
            )
        return given[SIZE:]

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
