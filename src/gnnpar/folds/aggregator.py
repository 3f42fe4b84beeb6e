"""The Protocol of an aggregation: an associative fold over blocks of in-edges, with its gradient per block."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, Self, runtime_checkable

from torch import Tensor

from gnnpar.folds.block import Block, Operands, Rows
from gnnpar_kernels import Csr, Key

Separates = Literal["columns", "heads", "no"]


class EdgeDropout(NamedTuple):
    """Attention dropout: the mask of an edge is keyed by `key` and its global id, so every strategy draws the same."""

    p: float
    key: Key


class Aggregator(Protocol):
    """out_i = finish(fold over in-edges j -> i). A stateless value; kernels do the work.

    Splitting the in-edges into blocks, in any order, gives the same result up to rounding; a fixed order gives the same
    bits. An empty state means that nothing was folded yet. `update` may change the given state in place.
    """

    @property
    def needs_src(self) -> bool:
        """Whether the gradient reads the source rows again. False for linear folds such as Sum."""
        ...

    @property
    def linear(self) -> bool:
        """Whether the fold is a fixed linear map of its source rows, so that constant rows give a constant result."""
        ...

    @property
    def summed(self) -> bool:
        """Whether the result is a sum over in-edges, so that k of d in-edges give k / d of it on average."""
        ...

    @property
    def separates(self) -> Separates:
        """Slices of the operands that fold to a slice of the result, so that ranks may share the work.

        columns: any entries of the rows of sources (there is one operand). heads: dimension 1 of every operand and of
        the result, dimension 0 of shared tensors. no: neither.
        """
        ...

    @property
    def separates_values(self) -> bool:
        """Whether weights depend only on the operands after the first. Then the last dimension of the first operand and
        of the result also separates. All other operands stay whole; their gradients are sums over the slices."""
        ...

    @property
    def whole_neighborhood(self) -> bool:
        """Whether one block must hold all in-edges of a destination, since blocks cannot be folded separately."""
        ...

    @property
    def needs_edge_ids(self) -> bool:
        """Whether it reads Block.edge_ids (attention dropout)."""
        ...

    def init(self, num_dst: int, x: Operands) -> Rows: ...
    def update(self, state: Rows, block: Block, x: Operands) -> Rows: ...
    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        """Return (out, saved); saved is O(N), never O(E)."""
        ...

    def prepare(self, saved: Rows, grad_out: Tensor) -> Rows:
        """Return the input of both gradients below, made from `saved` once per backward."""
        ...

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        """Return this block's term of the gradient; terms add up over blocks. x.src holds the source rows if
        `needs_src`, else tensors of their shape with unused values. `dst` is () if it has no term per block."""
        ...

    def grad_dst(self, prepared: Rows, grad_out: Tensor) -> Rows:
        """Return the destinations' gradient if it follows from saved values alone; () if blocks have terms."""
        ...


class ByBlock:
    """Defaults of an aggregation: the gradient is the sum of its blocks' terms, and nothing separates."""

    @property
    def separates(self) -> Separates:
        return "no"

    @property
    def separates_values(self) -> bool:
        return False

    @property
    def whole_neighborhood(self) -> bool:
        return False

    @property
    def needs_edge_ids(self) -> bool:
        return False

    def init(self, num_dst: int, x: Operands) -> Rows:
        return ()

    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        return state[0], ()

    def prepare(self, saved: Rows, grad_out: Tensor) -> Rows:
        return saved

    def grad_dst(self, prepared: Rows, grad_out: Tensor) -> Rows:
        return ()


@runtime_checkable
class Pushable(Aggregator, Protocol):
    """A fold with a gradient that needs no remote source rows. The rank of the destinations computes `grad_dst` from
    saved values. The rank of the sources computes `grad_src` from the destinations' `pushed` rows."""

    def pushing(self) -> Self:
        """Return the same fold that also saves the input of `grad_dst`; else destinations have terms per block."""
        ...

    def pushed(self, x: Operands, prepared: Rows, grad_out: Tensor) -> Rows:
        """Return rows of the destinations: the gradient of the output, then statistics, which must be sent exactly."""
        ...

    def grad_src(self, back: Csr, src: Rows, pushed: Rows) -> Rows:
        """Return a transposed block's term of the sources' gradients (row = source, index = pushed row)."""
        ...
