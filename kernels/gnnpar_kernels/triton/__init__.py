"""Bodies in Triton, for GPUs; under TRITON_INTERPRET=1 they run on a CPU, slowly, for tests."""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns unless it is told

from gnnpar_kernels.triton.attend import attend, attend_finish
from gnnpar_kernels.triton.attend_grad import (
    attend_grad,
    attend_grad_dst,
    attend_grad_dst_of,
    attend_grad_src,
    row_dots,
)
from gnnpar_kernels.triton.dropout import apply_mask, dropout, keep_mask
from gnnpar_kernels.triton.extremum import extremum, extremum_finish, extremum_grad
from gnnpar_kernels.triton.gather import gather_rows, scatter_add_rows_
from gnnpar_kernels.triton.quantize import dequantize_rows, quantize_rows
from gnnpar_kernels.triton.spmm import spmm

__all__ = [
    "apply_mask",
    "attend",
    "attend_finish",
    "attend_grad",
    "attend_grad_dst",
    "attend_grad_dst_of",
    "attend_grad_src",
    "dequantize_rows",
    "dropout",
    "extremum",
    "extremum_finish",
    "extremum_grad",
    "gather_rows",
    "keep_mask",
    "quantize_rows",
    "row_dots",
    "scatter_add_rows_",
    "spmm",
]
