"""The benchmark runs with every case of a GPU on a tiny graph, and stops a case whose op is wrong."""

import csv

import pytest
import torch

import gnnpar_kernels as kernels
from bench import baselines, measuring, report, run
from bench.graphs import SMALL, Size, draw
from bench.registry import Case, Race, cases


def test_every_case_of_a_gpu_runs_on_a_cpu(tmp_path, capsys):
    path = tmp_path / "bench.csv"
    options = ["--cases", "cuda", "--graph", "arxiv", "--scale", "0.0002", "--threads", "1", "--repeats", "1"]
    options += ["--without", "compiled"]
    assert run.main([*options, "--csv", str(path)]) == 0
    rows = list(csv.DictReader(path.open()))
    ours = [row for row in rows if row["contender"] == "gnnpar"]
    assert [(row["case"], row["shape"], row["dtype"]) for row in ours] == [
        (case.name, case.shape, str(case.dtype)[6:]) for case in cases("cuda")
    ]
    assert all(float(row["wall_p50_ms"]) > 0 and row["wall_ratio"] == "1.0" for row in ours)
    assert all(float(row["floor_percent"]) >= 0 for row in ours if not row["case"].endswith("layer fwd+bwd"))
    layers = [row for row in rows if row["contender"].startswith("PyG ")]
    assert {row["contender"] for row in layers} == {"PyG GATConv", "PyG GATv2Conv", "PyG TransformerConv"}
    assert {row["note"] for row in layers} == {""}
    printed = capsys.readouterr().out
    assert "spmm transposed against torch CSR product" in printed
    assert "attend backward, saved branch of its floor" in printed
    assert "gatv2 layer against PyG, memory" in printed


def test_a_wrong_op_is_not_timed(tmp_path, capsys, monkeypatch):
    wrong = Case(
        name="wrong",
        shape="3",
        dtype=torch.float32,
        race=lambda data: Race(op=lambda body: torch.full((3,), 1.0 + 0.01 * (body is kernels))),
    )
    broken = Case(name="broken", shape="3", dtype=torch.float32, race=lambda data: Race(op=lambda body: 1 / 0))
    monkeypatch.setattr(run, "cases", lambda kind: [wrong, broken])
    options = ["--quick", "--scale", "0.01", "--threads", "1", "--csv", str(tmp_path / "bench.csv")]
    assert run.main(options) == 1
    said = capsys.readouterr().err
    assert "FAILED wrong 3 float32 on power, 1 threads: RMS error 1.0e-02 of" in said
    assert "FAILED broken 3 float32 on power, 1 threads: ZeroDivisionError" in said


def test_a_rival_without_memory_leaves_a_row():
    def build():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 118 GiB")

    case = Case(
        name="sum",
        shape="2",
        dtype=torch.float32,
        race=lambda data: Race(op=lambda body: torch.ones(2), others={"rival": build}),
    )
    data, clock = draw(SMALL, device="cpu"), measuring.clock_of("cpu")
    measured, failure = measuring.measure(case, data, clock, device="cpu", repeats=2, seconds=1.0)
    assert failure == ""
    rows = report.rows_of(case, data.size, measured, copy_rate=1.0, context={"graph": "small", "threads": 1})
    assert [(row["contender"], row["note"]) for row in rows] == [("gnnpar", ""), ("rival", "out of memory")]
    assert rows[1]["wall_p50_ms"] == rows[1]["wall_ratio"] == ""


def test_what_cannot_be_written_or_measured_is_one_line(tmp_path, capsys):
    path = tmp_path / "old.csv"
    path.write_text("date,case\n")
    assert run.main(["--csv", str(path)]) == 2
    assert "has other columns" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert run.main(["--device", "cuda", "--csv", str(tmp_path / "new.csv")]) == 2
        assert "finds no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["torch CSR product", "index_add", "torch_sparse"])
def test_rivals_of_the_sum_compute_it(name):
    if name == "torch_sparse":
        pytest.importorskip("torch_sparse", reason="the extra [sparse] is not installed")
    data = draw(SMALL, device="cpu")
    x = torch.randn(data.size.nodes, 8)
    expected = torch.zeros_like(x).index_add(0, data.dst, x[data.src])
    found = baselines.spmm(data.forward, data.dst, data.src, x)[name]()()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hub", [1.0, 60.0])
def test_both_orientations_of_a_drawn_graph(hub):
    data = draw(Size(nodes=200, edges=4000, hub=hub), device="cpu")
    again = draw(data.size, device="cpu")
    assert torch.equal(data.src, again.src) and torch.equal(data.dst, again.dst)
    for csr, row, column in ((data.forward, data.dst, data.src), (data.reverse, data.src, data.dst)):
        assert torch.equal(torch.repeat_interleave(torch.arange(200), csr.indptr.diff()), row[csr.edge_ids])
        assert torch.equal(csr.indices.long(), column[csr.edge_ids])
    heaviest = int(data.forward.indptr.diff()[0])
    assert (heaviest > 300) == (hub > 1)


ANEMOI = """
import torch

def graph_transformer_attention_conv(query, key, value, edges, csc, reverse):
    (row, colptr), (rowptr, edge_ids, dst) = csc, reverse
    assert torch.equal(torch.repeat_interleave(colptr.diff()), dst) and torch.equal(row[edge_ids], row.sort().values)
    scores = (query[dst] * (key[row] + edges)).sum(-1) * query.shape[2] ** -0.5
    weight = scores.exp()
    mass = torch.zeros(query.shape[:2]).index_add(0, dst, weight)
    return torch.zeros_like(query).index_add(0, dst, (weight / mass[dst])[..., None] * (value[row] + edges))
"""


def test_anemoi_core_is_imported_from_the_path_given(tmp_path, monkeypatch):
    """A stand-in of its interface computes the layer that gnnpar does."""
    gt = tmp_path / "models/src/anemoi/models/triton/gt.py"
    gt.parent.mkdir(parents=True)
    gt.write_text(ANEMOI)
    monkeypatch.setattr(baselines, "anemoi_core", tmp_path)
    case = next(case for case in cases("cpu") if case.name.startswith("transformer") and case.shape.endswith("e3"))
    weights = [(0.1 * torch.randn(128, n)).requires_grad_() for n in (128, 128, 128, 3)]
    monkeypatch.setattr(baselines, "weights_of", lambda layer: weights)
    race = case.race(draw(SMALL, device="cpu"))
    found = race.others["anemoi-core"]()()
    assert isinstance(found, tuple)
    ours = race.op(kernels)
    assert isinstance(ours, tuple)
    for mine, theirs in zip(ours, found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PyG GATConv", "PyG TransformerConv"])
def test_a_compiled_layer_computes_what_the_layer_does(name):
    data = draw(Size(nodes=30, edges=90), device="cpu")
    layer = baselines.Layer(data, torch.randn(30, 8, requires_grad=True), torch.randn(30, 8), 2, 4)
    found = []
    for build in baselines.attention(name, layer).values():
        torch.manual_seed(1)
        found.append(build()())
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-4)
