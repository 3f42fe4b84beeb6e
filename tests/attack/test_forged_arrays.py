"""Files of arrays that say of an array what is not so: refused before numpy or scipy believe it.

Of numpy and scipy, such a file chooses what memory they write to, and which class of the process it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy._core.multiarray import _reconstruct
from scipy.sparse import csr_matrix
from torch_geometric.data import Data

from gnnpar.comm import RowLike
from gnnpar.data.saved import PT
from gnnpar.parallel.pipeline.history import History
from gnnpar_kernels.cpu_bags import bag, weighted_sums
from gnnpar_kernels.extremum.cpu import extremum

CSR = csr_matrix(np.eye(3, dtype=np.float32))


class Calls:
    """A pickle of it calls `what`, and gives the result a state."""

    def __init__(self, what: object, args: tuple[object, ...], state: object = None) -> None:
        self.reduced = (what, args) if state is None else (what, args, state)

    def __reduce__(self) -> tuple[object, ...]:
        return self.reduced


def array(dtype: object, shape: tuple[int, ...], content: bytes) -> Calls:
    return Calls(_reconstruct, (np.ndarray, (0,), b"b"), (1, shape, dtype, False, content))


def sparse(**changed: object) -> object:
    """A csr_matrix whose state says something else."""
    forged = CSR.copy()
    vars(forged).update(changed)
    return forged


NODES = 40


def compressed(rows: int, columns: int, **changed: int) -> torch.Tensor:
    """A CSR matrix with an entry a row, of which one pointer or index says something else."""
    ends, at = torch.arange(rows + 1), torch.zeros(rows, dtype=torch.int64)
    ends[5] = changed.get("end", int(ends[5]))
    at[3] = changed.get("column", 0)
    layout = torch.sparse_csr
    return torch.sparse_compressed_tensor(
        ends, at, torch.ones(rows), (rows, columns), layout=layout, check_invariants=False
    )


def listed(columns: int, entry: tuple[int, int], *, coalesced: bool = False) -> torch.Tensor:
    """A COO matrix whose second entry lies elsewhere."""
    indices = torch.tensor([[0, entry[0]], [0, entry[1]]])
    return torch.sparse_coo_tensor(
        indices, torch.ones(2), (NODES, columns), is_coalesced=coalesced, check_invariants=False
    )


SPARSE: dict[str, Callable[[], dict[str, object]]] = {
    "a row that ends far away": lambda: {"x": compressed(NODES, 4, end=NODES + 3000)},
    "a column that is none": lambda: {"x": compressed(NODES, 4, column=4)},
    "an entry beyond the rows": lambda: {"x": listed(4, (NODES, 0))},
    "an entry beyond the columns": lambda: {"x": listed(4, (1, 4))},
    "one that says it is coalesced": lambda: {"x": listed(4, (NODES, 1), coalesced=True)},
    "attributes of edges": lambda: {"edge_attr": listed(2, (1, 2))},
    "an adjacency": lambda: {"edge_index": None, "adj_t": compressed(NODES, NODES, end=NODES + 3000)},
    "a nested tensor": lambda: {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
    "a quantized tensor": lambda: {"x": torch.quantize_per_tensor(torch.ones(NODES, 4), 0.1, 0, torch.qint8)},
}


def graph_of(changed: dict[str, object]) -> Data:
    """A ring of nodes with some of its fields changed; None: it has none."""
    ring = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])
    graph = Data()
    for name, value in (
        {"x": torch.ones(NODES, 4), "edge_index": ring, "y": torch.arange(NODES) % 2} | changed
    ).items():
        if value is not None:
            graph[name] = value
    return graph


@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:.*quantize", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", SPARSE)
def test_a_forged_tensor_of_a_saved_graph_is_refused(kind: str, tmp_path: Path) -> None:
    """Of torch, its indices would choose what memory is written to when it is made dense."""
    torch.save(graph_of(SPARSE[kind]()), tmp_path / "g.pt")
    with pytest.raises(
        ValueError, match=r"^dataset pt: [^\n]*(is not satisfied|inconsistent|is nested|is quantized|one number)"
    ):
        PT(path=str(tmp_path / "g.pt")).load(None, 0)


ODD: dict[str, tuple[Callable[[], dict[str, object]], str]] = {
    "negative": (
        lambda: {"x": torch.ones(NODES, 4, dtype=torch.complex64).conj().imag},
        "x is a view of other numbers",
    ),
    "float8": (lambda: {"x": torch.ones(NODES, 4).to(torch.float8_e4m3fn)}, "x is torch.float8_e4m3fn"),
    "complex": (lambda: {"y": torch.ones(NODES).to(torch.complex64)}, "y is torch.complex64"),
    "a number": (lambda: {"x": torch.tensor(3.0)}, "x is a number; give a row a node"),
}


@pytest.mark.parametrize("kind", ODD)
def test_tensors_that_hold_no_numbers_are_refused(kind: str, tmp_path: Path) -> None:
    fields, line = ODD[kind]
    torch.save(graph_of(fields()), tmp_path / "g.pt")
    with pytest.raises(ValueError, match=f"^dataset pt: {line}"):
        PT(path=str(tmp_path / "g.pt")).load(None, 0)


def test_parameters_are_data_of_a_saved_graph(tmp_path: Path) -> None:
    torch.save(graph_of({"x": torch.nn.Parameter(torch.ones(NODES, 4))}), tmp_path / "g.pt")
    assert not PT(path=str(tmp_path / "g.pt"), split="random").load(None, 0).x.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("column", [5, -1, 1 << 30])
def test_no_sum_reads_outside_of_its_table(dtype: torch.dtype, column: int) -> None:
    """On a CPU, whoever made the columns: the last line behind the checks of shards and checkpoints."""
    indptr, indices = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, column], dtype=torch.int32)
    table, weights = torch.ones(5, 3, dtype=dtype), torch.ones(2, dtype=dtype)
    outside = pytest.raises((ValueError, RuntimeError), match=r"of a table of 5 rows|not in the valid range")
    with outside:
        bag(table, indices, indptr)
    with outside:
        bag(table, indices, indptr, weights)
    with outside:
        weighted_sums(table[:, 0].contiguous(), indices, indptr, weights)
    with outside:
        extremum(indptr, indices, table, torch.arange(5), num_rows=1)


def a_history() -> History:
    """Of five rows, three of them owned, after an epoch."""
    history = History(5, 3, refresh=2, remembers=True)
    like = RowLike((4,), torch.float64, torch.device("cpu"))
    history.sources((0, 0), [like])
    history.gradients((0, 0), like)
    history.end_epoch(0)
    return history


@pytest.mark.parametrize(
    "change",
    [
        {"_flipped": -1},
        {"_flipped": 1 << 40},
        {"_turned": 2},
        {"_turned": True},
        {"_finished": "0"},
        {"taken_after": 0.5},
        {"_sources": {(0, 0): (torch.zeros(9, 4),)}},
        {"_gradients": {(0, 0): torch.zeros(1, 3, 4)}},
    ],
)
def test_a_forged_history_of_a_pipeline_is_refused(change: dict[str, object]) -> None:
    """Where its halves lie is added to the columns of blocks."""
    saved = a_history().state_dict()
    a_history().load_state_dict(saved)
    with pytest.raises(ValueError, match=r"a saved history has tables of .* or forged"):
        a_history().load_state_dict({**saved, **change})
