"""Objects between the ranks of one host, with an HMAC-SHA256 of a key shared by these ranks."""

from __future__ import annotations

import hashlib
import hmac
import pickle

_SIZE = hashlib.sha256().digest_size


class NotOfThisRun(ConnectionError):
    """Bytes without the HMAC of this run's key arrived, and were not unpickled."""


def sealed(key: bytes, label: bytes, obj: object) -> bytes:
    """Pickle an object for another rank. label: sender, receiver and call. Without a key (joined ranks), add no HMAC,
    as in torch's own object collectives."""
    data = pickle.dumps(obj, protocol=5)
    return (_hmac(key, label, data) if key else b"") + data


def opened(key: bytes, label: bytes, data: bytes) -> object:
    """Return the object passed to `sealed`. Raise NotOfThisRun before unpickling."""
    if not key:
        return pickle.loads(data)
    if not hmac.compare_digest(data[:_SIZE], _hmac(key, label, data[_SIZE:])):
        raise NotOfThisRun(f"message {label.decode()} has a wrong HMAC: a process of another run is connected")
    return pickle.loads(data[_SIZE:])


def _hmac(key: bytes, label: bytes, data: bytes) -> bytes:
    return hmac.digest(key, len(label).to_bytes(8, "little") + label + data, "sha256")
