"""Attention weights made again in backward sum to 1 for every destination, whatever the codec, pulled and pushed.

With x_j = 1 and dO_i the i-th unit vector, the gradient of all sources together has sum_j alpha_ij in channel i.
"""

import threading
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from composing import configured
from engines import on_ranks
from gnnpar.codecs.codec import BFloat16, ConfigDefaults, Exactness, Identity, _Cast
from gnnpar.comm import CodedExchange
from gnnpar.folds.softmax import Softmax
from gnnpar.parallel.local import Pass
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.verify.conformance import make_job, small_graph
from gnnpar_kernels import fold_key

WORLD, HEADS, SEED = 4, 2, 5


class _Stochastic(_Cast):
    """Stochastic rounding to quarters, keyed as codecs must be; `fresh` keys by phase too, which they must not."""

    def __init__(self, lists, seed, fresh):
        super().__init__(None)
        self.lists, self.seed, self.fresh = lists, seed, fresh

    def encode(self, rows, index, tag, peer):
        if index is None:
            ids = self.lists.read[peer][tag.first : tag.first + len(rows[0])]
        else:
            ids = self.lists.node_ids[index]
            rows = tuple(t[index] for t in rows)
        rounded = tuple(self._round(t, ids, tag, operand) for operand, t in enumerate(rows))
        return super().encode(rounded, None, tag, peer)

    def _round(self, rows, ids, tag, operand):
        phase = sum(map(ord, tag.phase)) if self.fresh else 0
        noise = torch.stack([self._noise(rows[0], fold_key(*tag[:3], operand, i, phase)) for i in ids.tolist()])
        return (rows * 4 + noise).floor() / 4

    def _noise(self, like, key):
        gen = torch.Generator().manual_seed((self.seed ^ key) & 0x7FFFFFFF)
        return torch.rand(like.shape, dtype=like.dtype, generator=gen)


@dataclass(frozen=True, kw_only=True)
class Stochastic(ConfigDefaults):
    fresh: bool = False
    exactness = frozenset[Exactness]({"quantized"})

    def build(self, lists, comm, seed):
        return _Stochastic(lists, seed, self.fresh)


SUMS: dict[str, torch.Tensor] = {}
LOCK = threading.Lock()


@dataclass(frozen=True)
class Observed(Softmax):
    """Adds up what every block gives to its sources, before anything is sent."""

    def grad_src(self, back, src, pushed):
        grads = super().grad_src(back, src, pushed)
        with LOCK:
            SUMS["x"] = SUMS.get("x", 0) + grads[0].sum(0)
        return grads


def weight_sums(strategy, alter=lambda view: view):
    """sum_j alpha_ij as backward has it [N], per head, and which destinations have in-edges."""
    data = small_graph()
    config = configured("model", "gat", "model.hidden=8", f"model.heads={HEADS}")
    job = make_job(strategy, config, data, world=WORLD, seed=SEED)
    gen = torch.Generator().manual_seed(1)
    score_src, score_dst = (torch.randn(data.num_nodes, HEADS, dtype=torch.float64, generator=gen) for _ in range(2))
    SUMS.clear()

    def look(rank):
        view = alter(rank.engine._view).during(Pass(SEED, epoch=1, training=True))
        ids, n = rank.shard.node_ids, data.num_nodes
        x = torch.ones(len(ids), HEADS, n, dtype=torch.float64, requires_grad=True)
        a_src, a_dst = score_src[ids].requires_grad_(), score_dst[ids].requires_grad_()
        out = view.aggregate(Observed(), (x, a_src), (a_dst,))
        out.backward(torch.eye(n, dtype=torch.float64)[ids][:, None, :].expand(-1, HEADS, -1))

    on_ranks(job, look)
    return SUMS["x"].T, data.in_degree > 0


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("backward", "rounds", "codec"),
    product(["push", "pull"], ["part", "peer", 0.01], [Identity(), BFloat16(), Stochastic()]),
)
def test_weights_made_again_sum_to_one(backward, rounds, codec):
    sums, reached = weight_sums(SAR(backward=backward, rounds=rounds, codec=codec))
    torch.testing.assert_close(sums[reached], torch.ones_like(sums[reached]), rtol=0, atol=1e-6)
    assert not sums[~reached].any()
    assert reached.any() and not reached.all()


def test_fresh_random_numbers_would_show():
    for backward in ("push", "pull"):
        sums, reached = weight_sums(SAR(backward=backward, codec=Stochastic(fresh=True)))
        wrong = float((sums[reached] - 1).abs().max())
        assert wrong > 1e-2 if backward == "pull" else wrong < 1e-6, "the owner always reads what was sent forward"


def test_rounded_statistics_would_show():
    def rounded(view):
        comm, codec = view.exchange.comm, view.exchange.codec
        return replace(view, push_exchange=CodedExchange(comm, codec))

    sums, reached = weight_sums(SAR(codec=BFloat16()), rounded)
    assert float((sums[reached] - 1).abs().max()) > 1e-3
