"""Row moves: torch's own are at the speed of memory, so the specification is the body."""

from gnnpar_kernels.naive.gather import gather_rows, scatter_add_rows_

__all__ = ["gather_rows", "scatter_add_rows_"]
