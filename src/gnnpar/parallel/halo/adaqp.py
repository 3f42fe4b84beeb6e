"""AdaQP: Y[N_P, F] = A[N_P, N] . halo(Q_b(X[N_P, F])), messages of few bits, hidden behind inner edges.

Wan, Zhao, Wu, Adaptive Message Quantization and Parallelization for Distributed Full-graph GNN Training, MLSys 2023
(arXiv 2306.01381). Its modes are the 2 x 2 of codec and overlap: vanilla is strategy=graph_parallel overlap=none,
adaqp_q quantizes, adaqp_p overlaps, adaqp does both. Evaluation is exact.

Deviations: overlap=edges hides messages behind all inner edges, of marginal nodes too, without copies; the paper's
split is overlap=central_marginal. Any model runs, attention included. Deviations of the codec:
`gnnpar.codecs.adaptive.codec`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import CodecConfig
from gnnpar.parallel.halo.strategy import QUANTIZED, GraphParallel
from gnnpar.pricing.candidate import Scope, Values


@dataclass(frozen=True, kw_only=True)
class AdaQP(GraphParallel):
    """Graph parallelism with AdaQP's defaults: every codec and every overlap combine."""

    codec: CodecConfig = Adaptive()

    def proposals(self, scope: Scope, ranks: int) -> Iterable[Values]:
        return [{"bits": bits} for bits in QUANTIZED] if ranks > 1 else []
