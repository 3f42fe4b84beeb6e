"""Bytes that prove that they come from a rank of the same run: HMAC-SHA256 with a key that only its ranks know."""

from __future__ import annotations

import hmac
import pickle

SIZE = 32


class NotOfThisRun(ConnectionError):
    """Bytes that arrived prove no knowledge of the run's key; they were not read."""


def proof(key: bytes, *parts: bytes) -> bytes:
    """The HMAC of parts, each with its length, so that none can be moved across a border."""
    mac = hmac.new(key, digestmod="sha256")
    for part in parts:
        mac.update(len(part).to_bytes(8, "little"))
        mac.update(part)
    return mac.digest()


def proves(given: bytes, key: bytes, *parts: bytes) -> bool:
    """Whether `given` is the proof of these parts, in constant time."""
    return hmac.compare_digest(given, proof(key, *parts))


def sealed(key: bytes, label: bytes, obj: object) -> bytes:
    """An object for another rank. `label`: who sends it to whom and when, so that it stands for nothing else."""
    data = pickle.dumps(obj, protocol=5)
    return proof(key, label, data) + data


def opened(key: bytes, label: bytes, data: bytes) -> object:
    """What `sealed` was given. Raises NotOfThisRun, before anything is unpickled, for bytes of anybody else."""
    if not proves(data[:SIZE], key, label, data[SIZE:]):
        raise NotOfThisRun(
            f"a message ({label.decode()}) proves no knowledge of the run's key: a stranger is connected"
        )
    return pickle.loads(data[SIZE:])
