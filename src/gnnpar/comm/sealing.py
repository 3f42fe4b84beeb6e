"""Objects between the ranks of one host, with an HMAC-SHA256 of a key that only these ranks know."""

from __future__ import annotations

import hashlib
import hmac
import pickle

_SIZE = hashlib.sha256().digest_size


class NotOfThisRun(ConnectionError):
    """Bytes without the HMAC of this run's key arrived; they were not read."""


def sealed(key: bytes, label: bytes, obj: object) -> bytes:
    """Pickle an object for another rank. `label` names sender, receiver and call. No `key`, of joined ranks: no HMAC,
    as torch's own object collectives have none."""
    data = pickle.dumps(obj, protocol=5)
    return (_hmac(key, label, data) if key else b"") + data


def opened(key: bytes, label: bytes, data: bytes) -> object:
    """Return the object that `sealed` was given. Raises NotOfThisRun before anything is unpickled."""
    if not key:
        return pickle.loads(data)
    if not hmac.compare_digest(data[:_SIZE], _hmac(key, label, data[_SIZE:])):
        raise NotOfThisRun(f"message {label.decode()} has a wrong HMAC: a process of another run is connected")
    return pickle.loads(data[_SIZE:])


def _hmac(key: bytes, label: bytes, data: bytes) -> bytes:
    return hmac.digest(key, len(label).to_bytes(8, "little") + label + data, "sha256")
