"""GAT aggregation over in-edges with online softmax: the fold, its normalisation, and its gradients by side.

    e_ij = leaky_relu(a_src_j + a_dst_i)        out_i = sum_j softmax_j(e_ij) K_ij x_j, K the dropout mask over 1 - p

Shapes: x [M, H, D], a_src [M, H], a_dst [N, H] -> state (m, l [N, H], acc [N, H, D]) -> out [N, H, D], lse [N, H].
Floor, F = H D entries of b bytes: forward E (F b + 4 H + 4) + N (F b + 12 H + 8) bytes, backward
E (F b + 12 H + 4) + N (4 F b + 8 H + 8) with one gather per edge, which `attend_grad_src` with `attend_grad_dst_of`
reaches; `attend_grad` gathers for both sides.
"""

from torch import Tensor

from gnnpar_kernels.attend import naive
from gnnpar_kernels.attend.naive import State, uninitialised_state
from gnnpar_kernels.dispatch import body_of
from gnnpar_kernels.registration import define, like, operator, public

attend = operator(
    naive.attend,
    __name__,
    fake=lambda num_rows, x, branch, **rest: uninitialised_state(num_rows, x, branch),
    updates="state",
)


@define("attend_finish_(Tensor(a!) m, Tensor mass, Tensor(b!) acc, Tensor(c!)? mass_pos, Tensor(d!)? pos) -> ()")
def _attend_finish_(m: Tensor, mass: Tensor, acc: Tensor, mass_pos: Tensor | None, pos: Tensor | None) -> None:
    """Overwrite the state: acc becomes the output, m the logsumexp."""
    state = (m, mass, acc) if mass_pos is None else (m, mass, acc, mass_pos, pos)
    places = (acc, m, mass_pos, pos)
    for place, result in zip(places, body_of("attend_finish", m.device)(state), strict=False):
        if place is not None and result is not place:
            place.copy_(result)


@public(naive.attend_finish, __name__)
def attend_finish(state: State) -> tuple[Tensor, ...]:
    m, mass, acc, *branch = state
    mass_pos, pos = branch or (None, None)
    _attend_finish_(m, mass, acc, mass_pos, pos)
    return acc, m, *branch


attend_grad_src = operator(naive.attend_grad_src, __name__, fake=like("x", "a_src"))
attend_grad_dst = operator(naive.attend_grad_dst, __name__, fake=like("a_dst"))
attend_grad = operator(naive.attend_grad, __name__, fake=like("x", "a_src", "a_dst"))
attend_grad_dst_of = operator(naive.attend_grad_dst_of, __name__, fake=like("mass_pos"))
row_dots = operator(naive.row_dots, __name__, fake=lambda a, dtype, **rest: a.new_empty(a.shape[:-1], dtype=dtype))
