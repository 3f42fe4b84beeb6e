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
    """out_i = finish(fold over in-edges j -> i). A stateless value; the kernels do the work.

    Splitting the in-edges into blocks, in any order, gives the same result up to rounding; a fixed order gives the
    same bits. An empty state means that nothing was folded yet; `update` may change the state it is given in place.
    """

    @property
    def needs_src(self) -> bool:
        """Must the gradient see the source rows again? False for Sum: linear folds never refetch."""
        ...

    @property
    def linear(self) -> bool:
        """Is the fold a fixed linear map of its source rows, so that constant rows give a constant result?"""
        ...

    @property
    def summed(self) -> bool:
        """Does the result grow with the number of in-edges, so that k of d of them give k / d of it on average?"""
        ...

    @property
    def separates(self) -> Separates:
        """By what a fold of slices of its operands is the slice of its fold, so that ranks may share the work.

        columns: any entries of the rows of sources (there is one operand). heads: dimension 1 of every operand and of
        the result, dimension 0 of shared tensors. no: neither.
        """
        ...

    @property
    def separates_values(self) -> bool:
        """Do weights depend on all operands but the first alone?

        Then the last dimension of the first operand and of the result also separates, with all others whole, whose
        gradients are sums over the slices.
        """
        ...

    @property
    def whole_neighborhood(self) -> bool:
        """Must one block hold all in-edges of a destination? True for what is no fold over blocks."""
        ...

    @property
    def needs_edge_ids(self) -> bool:
        """Does this value read Block.edge_ids (attention dropout)?"""
        ...

    def init(self, num_dst: int, x: Operands) -> Rows: ...
    def update(self, state: Rows, block: Block, x: Operands) -> Rows: ...
    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        """(out, saved); saved is O(N), never O(E)."""
        ...

    def prepare(self, saved: Rows, grad_out: Tensor) -> Rows:
        """What both gradients below read in place of `saved`, made once per backward."""
        ...

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        """The gradient's share of this block; shares add up over blocks.

        x.src holds the source rows when `needs_src`, else tensors of their shape whose values are not read. `dst` is ()
        where it has no share by block.
        """
        ...

    def grad_dst(self, prepared: Rows, grad_out: Tensor) -> Rows:
        """The destinations' gradient where it follows from what was saved, without an edge; () where it has shares."""
        ...


class ByBlock:
    """An aggregation whose gradient is the sum of its blocks' shares alone; it separates only if it says so."""

    @property
    def separates(self) -> Separates:
        return "no"

    @property
    def separates_values(self) -> bool:
        return False

    @property
    def whole_neighborhood(self) -> bool:
        return False

    def prepare(self, saved: Rows, grad_out: Tensor) -> Rows:
        return saved

    def grad_dst(self, prepared: Rows, grad_out: Tensor) -> Rows:
        return ()


@runtime_checkable
class Pushable(Aggregator, Protocol):
    """A fold whose gradient separates by side, so that no remote source row is needed for it.

    The rank of the destinations has their part at once; their `pushed` rows, on the rank of the sources, give the rest.
    """

    def pushing(self) -> Self:
        """The same fold, saving what `grad_dst` reads: without that, destinations' gradients have shares in blocks."""
        ...

    def pushed(self, x: Operands, prepared: Rows, grad_out: Tensor) -> Rows:
        """Rows of the destinations, the gradient of the output first, then statistics, which must travel exactly."""
        ...

    def grad_src(self, back: Csr, src: Rows, pushed: Rows) -> Rows:
        """The share of a block, given transposed (row = source, index = pushed row), in the sources' gradients."""
        ...
