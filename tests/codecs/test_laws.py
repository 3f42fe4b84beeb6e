"""The laws of a codec hold for every codec of the project, and each is noticed when it is broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from composing import configured, names
from gnnpar.cli import check
from gnnpar.codecs.codec import Codec, ConfigDefaults, Exactness, Identity
from gnnpar.comm import RowLike
from gnnpar.verify.codec_laws import check_codec


@pytest.mark.quick(1)
@pytest.mark.parametrize("codec", names("codec"))
def test_every_codec_keeps_them(codec: str) -> None:
    laws = check_codec(configured("codec", codec))
    assert len(laws) >= 6
    assert all(law.passed for law in laws), laws


class _Wrong:
    """Identity, but for one thing."""

    def __init__(self, inner: Codec, how: str) -> None:
        self._inner, self._how, self._calls = inner, how, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def nbytes(self, num_rows: int, like: Any, tag: Any, peer: int) -> int:
        return self._inner.nbytes(num_rows, like, tag, peer) + (self._how == "size")

    def encode(self, rows: Any, index: Any, tag: Any, peer: int) -> torch.Tensor:
        buffer = self._inner.encode(rows, index, tag, peer)
        self._calls += 1
        return buffer * 0 if self._how == "moody" and self._calls % 2 else buffer

    def decode(self, buffer: Any, num_rows: int, like: Any, tag: Any, peer: int) -> Any:
        rows = self._inner.decode(buffer, num_rows, like, tag, peer)
        if self._how == "flat":
            return tuple(t.flatten(1) for t in rows)
        if self._how == "raises":
            raise IndexError("no such row")
        if self._how == "noisy":  # by the state of a generator
            return tuple(t + torch.rand_like(t) for t in rows)
        return tuple(t * 1.001 for t in rows) if self._how == "off" else rows

    def as_received(self, rows: Any, index: Any, tag: Any, peer: int) -> Any:
        if self._how == "known":
            return tuple(t[index] + 1 for t in rows)
        return self.decode(self.encode(rows, index, tag, peer), len(index), RowLike.of(rows), tag, peer)


@dataclass(frozen=True)
class Wrong(ConfigDefaults):
    how: str
    exactness = frozenset[Exactness]({"exact"})

    def build(self, lists: Any, comm: Any, seed: int) -> Any:
        return _Wrong(Identity().build(lists, comm, seed), self.how)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("how", "law", "words"),
    [
        ("size", "both ends know every size", "nbytes says"),
        ("flat", "rows keep shape and type", "came for"),
        ("raises", "rows keep shape and type", "IndexError: no such row"),
        ("moody", "the same rows are the same numbers", "sent again (phase remat) are other numbers"),
        ("noisy", "the same rows are the same numbers", "two runs send other numbers"),
        ("known", "the same rows are the same numbers", "as_received is not what the peer decodes"),
        ("off", "it is as exact as it says", "it says exact, and is off by 1"),
    ],
)
def test_a_broken_law_is_noticed(how: str, law: str, words: str) -> None:
    found = {each.name: each for each in check_codec(Wrong(how))}
    assert not found[law].passed
    assert words in found[law].seen


def test_check_says_so(capsys: pytest.CaptureFixture) -> None:
    assert check.run(["codec=bf16"]) == 0
    assert "6 of 6 laws hold" in capsys.readouterr().out
    assert check.run_codec(Wrong("off"), "codec=off") == 1
    assert "FAILED" in capsys.readouterr().out
