"""Blocks of in-edges with awkward degrees, cut into chains; uninitialised memory is NaN in every test here."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gnnpar_kernels import Csr
from gnnpar_kernels.dispatch import functions_of
from gnnpar_kernels.triton_tuning import interpreting
from interpreter import patch_once_a_launch

DEGREES = (0, 1, 15, 16, 17, 0, 300, 2, 0)


class Graph(NamedTuple):
    """Edges src -> dst with global ids, and both orientations of them."""

    src: Tensor
    dst: Tensor
    ids: Tensor
    num_src: int
    num_dst: int
    forward: Csr
    reverse: Csr


def _csr(row: Tensor, column: Tensor, ids: Tensor, num_rows: int, dtype: torch.dtype, compress: bool) -> Csr:
    order = torch.sort(row, stable=True).indices
    counts = torch.bincount(row, minlength=num_rows)
    rows = torch.nonzero(counts)[:, 0] if compress else None
    counts = counts if rows is None else counts[rows]
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Csr(indptr.to(dtype), column[order].to(dtype), rows, ids[order])


def make_graph(
    src: Tensor,
    dst: Tensor,
    *,
    num_src: int,
    num_dst: int,
    ids: Tensor | None = None,
    dtype: torch.dtype = torch.int32,
    compress: bool = False,
) -> Graph:
    """Both CSR orientations of an edge list; compress drops rows without edges from the row lists."""
    ids = torch.arange(src.shape[0]) * 3 + 2**33 if ids is None else ids
    forward = _csr(dst, src, ids, num_dst, dtype, compress)
    return Graph(src, dst, ids, num_src, num_dst, forward, _csr(src, dst, ids, num_src, dtype, compress))


def degree_graph(*, num_src: int = 60, seed: int = 0, **options) -> Graph:
    """Destinations of degrees 0, 1, 15, 16, 17 and 300; sources repeat, so some edges are multiple."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    degrees = torch.tensor(DEGREES)
    dst = torch.repeat_interleave(torch.arange(len(DEGREES)), degrees)
    src = torch.randint(0, num_src - 3, (int(degrees.sum()),), generator=generator)
    return make_graph(src, dst, num_src=num_src, num_dst=len(DEGREES), **options)


def cut(graph: Graph, pieces: int, *, seed: int = 0, **options) -> list[Graph]:
    """The edges at random over blocks that share the node numbering; one more block is empty."""
    owner = torch.randint(
        0, pieces, graph.src.shape, generator=torch.Generator(torch.get_default_device()).manual_seed(seed)
    )
    sizes = {"num_src": graph.num_src, "num_dst": graph.num_dst}
    return [
        make_graph(graph.src[owner == p], graph.dst[owner == p], ids=graph.ids[owner == p], **sizes, **options)
        for p in range(pieces + 1)
    ]


def assert_near(actual: Tensor, expected: Tensor, *, tolerance: float) -> None:
    """Largest difference against the largest finite entry of the reference; infinities must coincide."""
    assert actual.shape == expected.shape
    finite = torch.isfinite(expected)
    assert torch.equal(actual[~finite], expected[~finite])
    if finite.any():
        actual, expected = actual[finite].double(), expected[finite].double()
        assert float((actual - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


class Kit(NamedTuple):
    """The helpers of this file, handed to tests by fixture: test folders are not importable."""

    make_graph: Callable[..., Graph]
    degree_graph: Callable[..., Graph]
    cut: Callable[..., list[Graph]]
    assert_near: Callable[..., None]


@pytest.fixture
def kit() -> Kit:
    return Kit(make_graph, degree_graph, cut, assert_near)


@pytest.fixture(params=["naive", "cpu", "triton", pytest.param("gpu", marks=pytest.mark.gpu)])
def body(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """Each body of the ops; `triton` interpreted, `gpu` the same compiled, with every tensor of the test on the GPU."""
    if request.param == "triton":
        if not interpreting():
            pytest.skip("kernels are compiled here: the gpu case tests them")
        patch_once_a_launch()
    if request.param != "gpu":
        yield functions_of(request.param)
        return
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.set_default_device("cuda")
    yield functions_of("triton")
    torch.set_default_device("cpu")


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
