"""Sum over in-edges: out_i += sum_j w_ij x_j, the sum fold and, on the transposed CSR, its gradient; without weights
w_ij is 1.

Shapes: indptr [R + 1], indices [E], x [M, ...], rows [R] or None, weights [E] or None -> [num_rows, ...]; 16-bit rows
are summed in fp32. Floor, rows of F entries of b bytes: E (F b + 4) + N (F b + 8) bytes, every gathered row once and
every output row once; weights add their bytes once.
"""

from gnnpar_kernels.registration import operator
from gnnpar_kernels.spmm import naive

spmm = operator(
    naive.spmm,
    __name__,
    fake=lambda x, num_rows, **rest: x.new_empty((num_rows, *x.shape[1:])),
    updates="out",
)
