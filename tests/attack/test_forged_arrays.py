"""Files of arrays that say of an array what is not so: refused before numpy or scipy believe it.

Of numpy and scipy, such a file chooses what memory they write to, and which class of the process it changes.
"""

from __future__ import annotations

import _codecs
import functools
import gzip
import io
import pickle
import pickletools
import shutil
import struct
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy._core.multiarray import _reconstruct, scalar
from scipy.sparse import csr_matrix
from torch_geometric.data import Data
from torch_geometric.loader import ClusterData

from data.samples import shared
from gnnpar import capacity, saved_tensors
from gnnpar.comm import Communicator, RowLike, ThreadWorld
from gnnpar.data import files as data_files
from gnnpar.data import ogb
from gnnpar.data.array_pickle import load_arrays
from gnnpar.data.pyg import PyGDataset
from gnnpar.data.saved import PT
from gnnpar.parallel.pipeline.history import History
from gnnpar.parallel.sancus.copies import Copies, Rule
from gnnpar.pickled import refuse_alike
from gnnpar.saved_tensors import load_saved
from gnnpar_kernels.cpu_bags import bag, weighted_sums
from gnnpar_kernels.extremum.cpu import extremum

look = functools.partial(refuse_alike, most=1_000_000)
POINTER = struct.pack("<Q", 0x41414141)
WITH_OBJECTS = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
FAR_AWAY = (3, "|", None, ("a",), {"a": (np.dtype("f8"), 1 << 40)}, 8, 1, 0)
CSR = csr_matrix(np.eye(3, dtype=np.float32))


class Calls:
    """A pickle of it calls `what`, and gives the result a state."""

    def __init__(self, what: object, args: tuple[object, ...], state: object = None) -> None:
        self.reduced = (what, args) if state is None else (what, args, state)

    def __reduce__(self) -> tuple[object, ...]:
        return self.reduced


def array(dtype: object, shape: tuple[int, ...], content: bytes) -> Calls:
    return Calls(_reconstruct, (np.ndarray, (0,), b"b"), (1, shape, dtype, False, content))


def typed(state: object, code: str = "V8") -> Calls:
    return Calls(np.dtype, (code, False, True), state)


def sparse(**changed: object) -> object:
    """A csr_matrix whose state says something else."""
    forged = CSR.copy()
    vars(forged).update(changed)
    return forged


FORGED = {
    "objects of a buffer": Calls(np.ndarray, ((4,), np.dtype("O"), POINTER * 4)),
    "an empty array of objects": Calls(np.ndarray, ((4,), np.dtype("O"))),
    "objects": array(np.dtype("O"), (1,), POINTER),
    "objects that a type hides": array(typed(WITH_OBJECTS), (4,), POINTER * 4),
    "a field beyond the array": array(typed(FAR_AWAY), (4,), POINTER * 4),
    "a number of a hidden object": Calls(scalar, (typed(WITH_OBJECTS), POINTER)),
    "a number without its bytes": Calls(scalar, (np.dtype("i8"), b"")),
    "an item of another size": array(typed((3, "<", None, None, None, 1 << 40, 1, 0), "i8"), (4,), POINTER * 4),
    "fewer bytes than numbers": array(np.dtype("i8"), (1 << 40,), POINTER),
    "a negative length": array(np.dtype("i8"), (-1, -1), POINTER),
    "a subclass": Calls(_reconstruct, (csr_matrix, (0,), b"b")),
    "an array of no state": Calls(_reconstruct, (np.ndarray, (1 << 20,), b"b")),
    "indices beyond the columns": sparse(indices=np.array([0, 1 << 29, 2], np.int32)),
    "negative indices": sparse(indices=np.array([0, -1, 2], np.int32)),
    "rows that begin far away": sparse(indptr=np.array([0, 1 << 30, 0, 3], np.int32)),
    "rows that begin far away, without an entry": sparse(
        indptr=np.array([0, 1 << 30, 5, 0], np.int32), indices=np.zeros(0, np.int32), data=np.zeros(0, np.float32)
    ),
    "unsigned rows that go down": sparse(indptr=np.array([0, 1 << 30, 0, 3], np.uint64)),
    "more rows than there are": sparse(_shape=(1 << 20, 3)),
    "a matrix beyond memory": sparse(_shape=(3, 1 << 60)),
    "a type in a list": [np.dtype("i8")],
    "an array as a key": {Calls(scalar, (np.dtype("i8"), POINTER)): 0},
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_array_is_refused(kind: str) -> None:
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        load_arrays(io.BytesIO(pickle.dumps(FORGED[kind], protocol=4)), encoding="latin1")


@pytest.mark.parametrize(
    "name", ["scipy.sparse.csr csr_matrix", "numpy dtype", "numpy ndarray", "collections defaultdict", "builtins list"]
)
def test_a_pickle_changes_no_class(name: str) -> None:
    """It gave a class a state, which the whole process had from then on."""
    module, member = name.split()
    text = f"c{module}\n{member}\n".encode() + b"}X\x05\x00\x00\x00shapeX\x01\x00\x00\x00xsb."
    with pytest.raises((TypeError, pickle.UnpicklingError)):
        load_arrays(io.BytesIO(b"\x80\x02" + text))
    assert csr_matrix((2, 3)).shape == (2, 3)


def test_items_of_an_array_are_set_by_nobody() -> None:
    """numpy's arrays took them while the pickle was read, after their indices were checked."""
    content = pickle.dumps(np.arange(3), protocol=4)[:-1] + b"K\x00K\x07s."
    with pytest.raises(TypeError):
        load_arrays(io.BytesIO(content))


def test_a_list_in_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(pickle.UnpicklingError, match="nested more than 20 deep"):
        load_arrays(io.BytesIO(pickle.dumps(endless)))


@pytest.mark.parametrize(
    "given",
    [
        *(np.arange(6).reshape(2, 3).astype(code) for code in ("?", "i1", "u1", "<i4", ">i4", "u8", "f2", "f4", ">f8")),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros((0, 3), np.float32),
        np.array(7),
        np.float64(0.1),
        np.bool_(True),
    ],
)
def test_arrays_are_read_as_they_were_written(given: np.ndarray | np.generic) -> None:
    read = load_arrays(io.BytesIO(pickle.dumps(given, protocol=4)), encoding="latin1")
    assert type(read) is type(given)
    assert isinstance(read, np.ndarray | np.generic)
    assert read.dtype == given.dtype.newbyteorder("=")
    assert np.array_equal(read, given)
    if isinstance(read, np.ndarray) and isinstance(given, np.ndarray):
        assert read.flags.f_contiguous == given.flags.f_contiguous
        assert read.flags.writeable


def test_what_holds_arrays_is_read_as_it_was_written() -> None:
    graph = defaultdict(list, {0: [1, 2], 1: [0]})
    given = {"graph": graph, "both": (np.arange(2), None), "text": "x", "number": 0.5}
    read = load_arrays(io.BytesIO(pickle.dumps(given, protocol=4)))
    assert str(read) == str(given | {"graph": dict(graph)})


@pytest.mark.parametrize("folder", ["Cora", "CiteSeer"])
def test_planetoid_is_read_bit_by_bit(folder: str) -> None:
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph"):
        with (shared(folder) / folder / "raw" / f"ind.{folder.lower()}.{part}").open("rb") as file:
            read = load_arrays(file, encoding="latin1")
            file.seek(0)
            theirs = pickle.load(file, encoding="latin1")  # noqa: S301 - files with known checksums
        if isinstance(read, dict):
            assert read == theirs
        else:
            mine, other = (each.toarray() if isinstance(each, csr_matrix) else each for each in (read, theirs))
            assert mine.dtype == other.dtype
            assert mine.tobytes() == other.tobytes()


def npz(file: Path, **changed: np.ndarray) -> None:
    """The raw file of Amazon's and Coauthor's graphs."""
    of = {"data": CSR.data, "indices": CSR.indices, "indptr": CSR.indptr, "shape": np.array(CSR.shape)}
    parts = {f"{which}_{key}": value for which in ("attr", "adj") for key, value in of.items()}
    np.savez(file, allow_pickle=False, labels=np.arange(3), **(parts | changed))


@pytest.mark.parametrize("which", ["attr", "adj"])
@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"indices": np.array([0, 1 << 29, 2], np.int32)},
            "indices of a sparse matrix of 3 columns are 0 to",
        ),
        ({"indptr": np.array([0, 1 << 30, 2, 3], np.int32)}, "indptr of a sparse matrix goes down"),
    ],
)
def test_a_forged_matrix_of_an_npz_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, change: dict[str, np.ndarray], line: str
) -> None:
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    raw = tmp_path / "Computers" / "raw"
    raw.mkdir(parents=True)
    npz(raw / "amazon_electronics_computers.npz", **{f"{which}_{key}": value for key, value in change.items()})
    with pytest.raises(ValueError, match=f"cannot be read .*{line}"):
        PyGDataset(name="computers").load(tmp_path, 0)


@pytest.mark.parametrize("place", ["data_dir", "cache"])
def test_raw_arrays_beyond_memory_are_refused_before_they_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(capacity, "memory_bytes", lambda: 10**6)
    root = tmp_path if place == "data_dir" else tmp_path / "cache" / "pyg" / "computers-downloaded"
    raw = root / "Computers" / "raw"
    raw.mkdir(parents=True)
    np.savez_compressed(raw / "amazon_electronics_computers.npz", attr_data=np.zeros(10**6, np.float32))
    with pytest.raises(ValueError, match=r"cannot be read \(ValueError: amazon_.*npz, unpacked, needs"):
        PyGDataset(name="computers").load(tmp_path, 0)


def test_features_beyond_memory_are_refused_before_their_zeros_are_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    raw = tmp_path / "Computers" / "raw"
    raw.mkdir(parents=True)
    npz(raw / "amazon_electronics_computers.npz", attr_shape=np.array([3, 10**13]))
    with pytest.raises(ValueError, match=r"amazon_.*npz: features \[3, 10000000000000\] needs .* GiB"):
        PyGDataset(name="computers").load(tmp_path, 0)


def test_raw_lines_beyond_memory_are_refused_before_they_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(capacity, "memory_bytes", lambda: 10**6)
    monkeypatch.setattr(data_files, "memory_bytes", lambda: 10**6)
    monkeypatch.setattr(ogb, "_table", lambda file, dtype: pytest.fail("it was unpacked"))
    for name in ogb.required_files("ogbn_arxiv"):
        file = tmp_path / "ogbn_arxiv" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(b"0," * 10**6 if "node-feat" in name else b"0"))
    with pytest.raises(ValueError, match=r"cannot be read \(ValueError: node-feat.csv.gz, unpacked, needs"):
        ogb.OGBDataset(name="ogbn_arxiv").load(tmp_path, 0)


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


def repeated(indices: int, *, values: int) -> torch.Tensor:
    """A COO matrix whose entries are one in the file, repeated."""
    ends = torch.zeros(2, 1, dtype=torch.int64).expand(2, indices)
    matrix = torch.sparse_coo_tensor(ends, torch.ones(1).expand(values), (NODES, NODES), check_invariants=False)
    return matrix._coalesced_(True)


SPARSE: dict[str, Callable[[], dict[str, object]]] = {
    "a row that ends far away": lambda: {"x": compressed(NODES, 4, end=NODES + 3000)},
    "a column that is none": lambda: {"x": compressed(NODES, 4, column=4)},
    "an entry beyond the rows": lambda: {"x": listed(4, (NODES, 0))},
    "an entry beyond the columns": lambda: {"x": listed(4, (1, 4))},
    "one that says it is coalesced": lambda: {"x": listed(4, (NODES, 1), coalesced=True)},
    "indices of one number": lambda: {"edge_index": None, "adj_t": repeated(10**10, values=10**10)},
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


def test_reading_a_file_switches_no_check_on_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own checks are switched for the whole process, of which ranks may be threads."""
    torch.save(listed(4, (1, 1)), tmp_path / "a.pt")
    read, during = torch.load, list[bool]()

    def load(*args: Any, **options: Any) -> Any:
        during.append(torch.sparse.check_sparse_tensor_invariants.is_enabled())
        return read(*args, **options)

    monkeypatch.setattr(torch, "load", load)
    load_saved(tmp_path / "a.pt")
    assert during == [False]


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


def test_compressed_records_of_a_saved_graph_are_refused(tmp_path: Path) -> None:
    """torch unpacks them before anybody can ask how much they are."""
    torch.save(graph_of({"x": torch.zeros(NODES, 1000)}), tmp_path / "g.pt")
    with zipfile.ZipFile(tmp_path / "g.pt") as whole, zipfile.ZipFile(tmp_path / "p.pt", "w") as packed:
        for record in whole.infolist():
            packed.writestr(record.filename, whole.read(record), zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="its records are compressed, or lie over each other"):
        PT(path=str(tmp_path / "p.pt")).load(None, 0)


@pytest.mark.parametrize("change", ["more behind it", "half of an end behind it", "before it", "another directory"])
def test_a_zip_that_two_readers_may_read_differently_is_refused(tmp_path: Path, change: str) -> None:
    """Python's zipfile looks for the directory of records in another way than torch's reader, which unpacks them."""
    file = tmp_path / "g.pt"
    torch.save(graph_of({}), file)
    whole = file.read_bytes()
    assert PT(path=str(file), split="random").load(None, 0).num_nodes == NODES
    changed = {
        "more behind it": whole + b"x",
        "half of an end behind it": whole + b"PK\x05\x06",
        "before it": whole[:4] + b"x" + whole[4:],
        "another directory": whole[:-42] + struct.pack("<4sLQL", b"PK\x06\x07", 0, 0, 1) + whole[-22:],
    }
    file.write_bytes(changed[change])
    with pytest.raises(ValueError, match=r"its end is not what torch\.save writes"):
        PT(path=str(file), split="random").load(None, 0)


def test_test_nodes_that_lie_far_apart_are_refused_before_rows_are_made_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    shutil.copytree(shared("CiteSeer") / "CiteSeer" / "raw", tmp_path / "CiteSeer" / "raw")
    index = tmp_path / "CiteSeer" / "raw" / "ind.citeseer.test.index"
    index.write_text(index.read_text() + "90000000\n")
    with pytest.raises(ValueError, match=r"ind.citeseer.test.index has 1001 nodes, from 2312 to 90000000"):
        PyGDataset(name="citeseer").load(tmp_path, 0)


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


def test_ranks_that_saved_different_broadcasts_do_not_wait_for_each_other() -> None:
    """Who broadcast when decides who broadcasts next, and that is a collective."""

    def load(comm: Communicator) -> str:
        copies = Copies(comm, Rule(period=2, bound=None))
        try:
            copies.load_state_dict({(0, 0): ((0, comm.rank), [0, 0], (), {})})
        except ValueError as error:
            return str(error)
        return ""

    lines = ThreadWorld(2).run(load)
    assert (
        lines
        == ["rank 1 has saved another history of broadcasts than rank 0: its checkpoint is of another run, or forged"]
        * 2
    )


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


@pytest.mark.parametrize("code", ["LONG_BINPUT", "PUT"])
def test_a_memo_is_no_longer_than_its_file(code: str) -> None:
    far = 1 << 28
    put = b"r" + struct.pack("<I", far) if code == "LONG_BINPUT" else b"p%d\n" % far
    with pytest.raises(pickle.UnpicklingError, match=f"keeps its object {far}"):
        load_arrays(io.BytesIO(b"\x80\x02K\x01" + put + b"."))


NAMES: dict[str, object] = {
    "a class that reads another file": Calls(ClusterData, (Data(), 1, False, "elsewhere")),
    "as many bytes as it likes": Calls(bytearray, (1 << 40,)),
    "a tensor by its size": Calls(torch.Tensor, (1 << 40,)),
    "an encoder": Calls(_codecs.encode, ("x", "zlib")),
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_saved_file_names_tensors_and_plain_values_alone(tmp_path: Path, kind: str) -> None:
    """Although torch.load allows more: importing PyG adds ClusterData, whose constructor unpickles a second file."""
    assert ClusterData in torch.serialization.get_safe_globals()
    torch.save({"x": NAMES[kind]}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"it names .*, which is no tensor and no plain value"):
        load_saved(tmp_path / "a.pt", known=[Data])
    assert ClusterData in torch.serialization.get_safe_globals()


def test_what_a_library_lets_in_is_not_let_in_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the look at the names has missed it."""
    monkeypatch.setattr(saved_tensors, "_refuse_names", lambda file, classes: None)
    torch.save(Calls(ClusterData, (Data(), 1, False, "elsewhere")), tmp_path / "a.pt")
    with pytest.raises(pickle.UnpicklingError, match="ClusterData was not an allowed global by default"):
        load_saved(tmp_path / "a.pt", known=[Data])


def test_what_graphs_and_checkpoints_hold_is_read(tmp_path: Path) -> None:
    rows = {
        str(dtype): torch.ones(2, dtype=dtype) for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.complex64)
    }
    saved = {**rows, "p": torch.nn.Parameter(torch.ones(3)), "n": [None, 1, 2.5, "x", (True,)], "s": {1, 2}}
    saved |= {"sparse": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr(), "size": torch.ones(2, 3).shape}
    torch.save(saved, tmp_path / "a.pt")
    found = load_saved(tmp_path / "a.pt")
    assert isinstance(found, dict) and found.keys() == saved.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in rows.items())
    assert torch.equal(found["csr"].to_dense(), torch.eye(3)) and found["n"] == saved["n"] and found["s"] == {1, 2}


def test_keys_that_hash_alike_are_refused(tmp_path: Path) -> None:
    """A megabyte of them was read for a minute and a half, ten for two hours."""
    keys = {k * (2**61 - 1): None for k in range(10)}
    torch.save(keys, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="a whole number beyond 64 bits"):
        load_saved(tmp_path / "a.pt")
    with pytest.raises(pickle.UnpicklingError, match="a whole number beyond 64 bits"):
        load_arrays(io.BytesIO(pickle.dumps(keys, protocol=2)))


PAIRS: dict[str, object] = {
    "a dict": {(1 << 16, "a"): None},
    "a dict of many": {((1, "a", 2), 3, 4): None},
    "a set": {(1, -2)},
    "a set of frozen sets": {frozenset({1})},
    "an ordered dict": OrderedDict({(1, 2.5): 3}),
    "within": [{"a": {(1.5, 2): 3}}],
}


@pytest.mark.parametrize("what", PAIRS)
def test_tuples_of_large_or_many_numbers_are_no_keys(tmp_path: Path, what: str) -> None:
    """Their hashes hold no secret of the process: a file may bring any number that hash alike."""
    torch.save(PAIRS[what], tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a dict or set with a key that is|names builtins\.frozenset"):
        load_saved(tmp_path / "a.pt")


@pytest.mark.parametrize("protocol", range(5))
def test_a_list_of_pairs_makes_no_dict_unseen(protocol: int) -> None:
    """As arguments of the class, and by opcodes that torch.save does not write."""
    pairs = [((1, 2, 3, 4), None)]
    for kind in (dict, OrderedDict, set):
        with pytest.raises(ValueError, match="a key that is a tuple"):
            look(pickletools.genops(pickle.dumps(Calls(kind, (pairs,)), protocol=protocol)))
    with pytest.raises(ValueError, match="a key that is a tuple"):
        look(pickletools.genops(pickle.dumps({(1, 1e9): 3}, protocol=protocol)))
    kept = {
        "a": {1e9: 2, ("a", "to", "b"): 1, (("b", 1), 2): [1, (2, 3)], None: 1.5, False: {4}},
        "b": OrderedDict({"c": (1, {2: 3})}),
    }
    look(pickletools.genops(pickle.dumps([kept, kept], protocol=protocol)))
    if protocol == 4:
        with pytest.raises(ValueError, match="a key that is"):
            look(pickletools.genops(pickle.dumps({frozenset({1}), 2}, protocol=protocol)))


@pytest.mark.parametrize("kind", ["size", "set", "state"])
def test_a_list_that_is_given_to_many_objects_is_refused_before_they_are_made(kind: str) -> None:
    """A file of 400 kB took 20 GB."""
    parts = tuple(range(2000))
    state = dict.fromkeys(map(str, parts))
    made = {
        "size": [Calls(torch.Size, (parts,)) for _ in range(100)],
        "set": [Calls(set, (parts,)) for _ in range(100)],
        "state": [Calls(OrderedDict, (), state) for _ in range(100)],
    }[kind]
    with pytest.raises(ValueError, match="it gives one list to many objects"):
        look(pickletools.genops(pickle.dumps(made, protocol=2)))
    look(pickletools.genops(pickle.dumps(made[:2], protocol=2)))


def test_many_keys_of_large_numbers_are_refused() -> None:
    keys = {(1 << 20) + key: None for key in range(70_000)}
    with pytest.raises(ValueError, match="more than 65536 keys of large numbers"):
        look(pickletools.genops(pickle.dumps(keys, protocol=2)))
    look(pickletools.genops(pickle.dumps(dict.fromkeys(range(60_000)), protocol=2)))


def test_bytes_that_are_given_to_many_arrays_are_refused() -> None:
    content = np.zeros(1000).tobytes()
    state = (1, (1000,), np.dtype("<f8"), False, content)
    arrays = [Calls(_reconstruct, (np.ndarray, (0,), b"b"), state) for _ in range(10)]
    with pytest.raises(pickle.UnpicklingError, match="it gives the bytes of one array to many"):
        load_arrays(io.BytesIO(pickle.dumps(arrays, protocol=3)))


def test_opcodes_that_do_not_belong_together_are_a_line() -> None:
    for broken in (b"s.", b"(u.", b"g7\n.", b"0.", b"\x86."):
        with pytest.raises(ValueError, match="it is damaged"):
            look(pickletools.genops(broken))


def test_lists_that_are_shared_a_thousandfold_are_looked_at_once(tmp_path: Path) -> None:
    node: list[object] = [torch.zeros(1)]
    for _ in range(60):
        node = [node, node]
    assert len(list(saved_tensors.tensors_in(node))) == 1
