"""The store through which gloo's ranks tell each other their addresses, encrypted and with a proof beside each.

Anybody may reach torch's store, read and write there. Without the proof, who overwrites an address has a rank connect
to him; and beside each address gloo leaves some bytes of the stack of its process, which say where its memory lies.
"""

# torch.distributed declares no types of its stores
# pyright: reportUnknownMemberType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gnnpar.comm.authentication import NotOfThisRun, decrypted, encrypted
from gnnpar.deadline import within

T = TypeVar("T")
_MORE_SECONDS = 5.0  # than the store itself waits for a key


class SealedStore(Store):
    """`store`, whose values are encrypted and proved, with their names, by the key of this meeting of ranks.

    Counts (`add`) carry none: who changes one can end the meeting, and no more. Each call is TimeoutError where the
    store's host does not answer in its time, for which torch's client would wait without an end, and deaf to signals.
    """

    def __init__(self, store: Store, key: bytes) -> None:
        super().__init__()
        self._store, self._key = store, key

    def set(self, key: str, value: str | bytes | Sequence[int]) -> None:
        plain = value.encode() if isinstance(value, str) else bytes(value)
        kept = encrypted(self._key, key.encode(), plain)
        self._ask(lambda: self._store.set(key, kept))  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        """Raises NotOfThisRun for what a stranger has put there."""
        given = bytes(self._ask(lambda: self._store.get(key)))
        try:
            return decrypted(self._key, key.encode(), given)
        except NotOfThisRun as error:
            raise NotOfThisRun(f"the ranks' store holds what a stranger has put there: {error}") from error

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda: self._store.add(key, amount))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        patience = self.timeout if timeout is None else timeout
        self._ask(lambda: self._store.wait(keys, patience), patience)

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda: self._store.check(keys))

    def delete_key(self, key: str) -> bool:
        return self._ask(lambda: self._store.delete_key(key))

    def num_keys(self) -> int:
        return self._ask(self._store.num_keys)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]

    def _ask(self, act: Callable[[], T], patience: timedelta | None = None) -> T:
        seconds = (self.timeout if patience is None else patience).total_seconds() + _MORE_SECONDS
        try:
            return within(seconds, act, name="store")
        except TimeoutError as error:
            raise TimeoutError(
                f"the store of the ranks does not answer within {seconds:g} s: its host, or the way to it, is down"
            ) from error
