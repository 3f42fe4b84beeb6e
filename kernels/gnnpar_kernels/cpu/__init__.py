"""Fast torch bodies for a CPU; same names and signatures as `naive`, which defines them."""

from gnnpar_kernels.cpu.attend import attend, attend_finish
from gnnpar_kernels.cpu.attend_grad import attend_grad, attend_grad_dst, attend_grad_dst_of, attend_grad_src, row_dots
from gnnpar_kernels.cpu.dropout import apply_mask, dropout, keep_mask
from gnnpar_kernels.cpu.extremum import extremum, extremum_finish, extremum_grad
from gnnpar_kernels.cpu.gather import gather_rows, scatter_add_rows_
from gnnpar_kernels.cpu.quantize import dequantize_rows, quantize_rows
from gnnpar_kernels.cpu.spmm import spmm

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
