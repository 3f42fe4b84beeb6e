"""Graph kernels as pure functions: sums, attention, maxima, row moves and keyed dropout over CSR. No autograd here."""

from gnnpar_kernels.csr import Csr
from gnnpar_kernels.dispatch import (
    Choice,
    apply_mask,
    attend,
    attend_finish,
    attend_grad,
    attend_grad_dst,
    attend_grad_src,
    dropout,
    extremum,
    extremum_finish,
    extremum_grad,
    gather_rows,
    implementations,
    keep_mask,
    scatter_add_rows_,
    spmm,
)
from gnnpar_kernels.hashing import fold_key

__all__ = [
    "Choice",
    "Csr",
    "apply_mask",
    "attend",
    "attend_finish",
    "attend_grad",
    "attend_grad_dst",
    "attend_grad_src",
    "dropout",
    "extremum",
    "extremum_finish",
    "extremum_grad",
    "fold_key",
    "gather_rows",
    "implementations",
    "keep_mask",
    "scatter_add_rows_",
    "spmm",
]
