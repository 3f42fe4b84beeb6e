"""Bytes that prove that they come from a rank of the same run: HMAC-SHA256 with a key that only its ranks know; and,
where anybody may read them, encrypted."""

from __future__ import annotations

import hashlib
import hmac
import pickle
import secrets

SIZE = 32
_NONCE = 16


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


def encrypted(key: bytes, name: bytes, plain: bytes) -> bytes:
    """Bytes under a name in a place that anybody may read and write: a proof, a fresh nonce, and the bytes under the
    key stream of that nonce (SHAKE-256 of its HMAC). Encrypted, then proved."""
    nonce = secrets.token_bytes(_NONCE)
    body = nonce + _under_stream(key, nonce, plain)
    return proof(key, name, body) + body


def decrypted(key: bytes, name: bytes, given: bytes) -> bytes:
    """What `encrypted` was given. Raises NotOfThisRun for bytes of anybody else, or of another name."""
    body = given[SIZE:]
    if not proves(given[:SIZE], key, name, body):
        raise NotOfThisRun(f"{name.decode()} proves no knowledge of the run's key: a stranger writes there")
    return _under_stream(key, body[:_NONCE], body[_NONCE:])


def _under_stream(key: bytes, nonce: bytes, data: bytes) -> bytes:
    stream = hashlib.shake_256(proof(key, b"stream", nonce)).digest(len(data))
    return bytes(a ^ b for a, b in zip(data, stream, strict=True))


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
