"""Graph kernels as pure functions without autograd: sums, attention, maxima, row moves, products, dropout, codes."""

from gnnpar_kernels.attend import (
    attend,
    attend_finish,
    attend_grad,
    attend_grad_dst,
    attend_grad_dst_of,
    attend_grad_src,
    row_dots,
)
from gnnpar_kernels.attend_dot import attend_dot, attend_dot_grad
from gnnpar_kernels.attend_v2 import attend_v2, attend_v2_grad
from gnnpar_kernels.csr import Csr
from gnnpar_kernels.dense import dense
from gnnpar_kernels.dispatch import Choice, implementations
from gnnpar_kernels.dropout import apply_mask, dropout, keep_mask
from gnnpar_kernels.extremum import extremum, extremum_finish, extremum_grad
from gnnpar_kernels.gather import gather_rows, scatter_add_rows_
from gnnpar_kernels.hashing import Key, fold_key
from gnnpar_kernels.quantize import dequantize_rows, quantize_rows
from gnnpar_kernels.spmm import spmm

__all__ = [
    "Choice",
    "Csr",
    "Key",
    "apply_mask",
    "attend",
    "attend_dot",
    "attend_dot_grad",
    "attend_finish",
    "attend_grad",
    "attend_grad_dst",
    "attend_grad_dst_of",
    "attend_grad_src",
    "attend_v2",
    "attend_v2_grad",
    "dense",
    "dequantize_rows",
    "dropout",
    "extremum",
    "extremum_finish",
    "extremum_grad",
    "fold_key",
    "gather_rows",
    "implementations",
    "keep_mask",
    "quantize_rows",
    "row_dots",
    "scatter_add_rows_",
    "spmm",
]
