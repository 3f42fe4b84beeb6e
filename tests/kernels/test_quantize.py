"""Quantized rows: one wire format in all bodies byte for byte, unbiased, with the variance that theory gives."""

import math

import pytest
import torch
from torch import Tensor

from gnnpar_kernels import fold_key, wire
from gnnpar_kernels.dispatch import functions_of
from gnnpar_kernels.quantize import cpu as fast
from gnnpar_kernels.quantize import naive as spec
from gnnpar_kernels.wire import BF16, CODES, FP8, FP32, GRID, row_nbytes, row_offsets

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, below the interpreter, on rows with NaNs

KEY = fold_key(0, 1, 2)
WIDTHS = (1, 3, 100, 256, 602, 1433)
KINDS = {
    "normal": lambda *shape: torch.randn(*shape),
    "shifted": lambda *shape: torch.randn(*shape) + 3,
    "uniform": lambda *shape: torch.rand(*shape),
    "relu": lambda *shape: torch.randn(*shape).relu(),
}


def _ids(count: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, (count,))


def _hard_rows(count: int, width: int) -> Tensor:
    """Rows of many magnitudes, constant, with signed zeros, and without a finite range."""
    x = torch.randn(count, width) * 10 ** torch.randint(-3, 4, (count, 1)) + torch.randn(count, 1)
    special = [0.0, -0.0, 1.7, 1e-40, -3e38, math.nan, math.inf, -math.inf]
    for row, value in zip(x, special, strict=False):
        row[:] = value
    if count > 9:
        x[8, -1], x[9, 0] = math.nan, -math.inf
    return x


def _expected(x: Tensor, index: Tensor | None, bits: wire.Codes, offsets: Tensor | None = None, **options) -> Tensor:
    """Bytes by the specification, on the CPU."""
    index, offsets = (None if each is None else each.cpu() for each in (index, offsets))
    bits = bits if isinstance(bits, int) else bits.cpu()
    ids = options.pop("ids").cpu()
    return spec.quantize_rows(x.cpu(), index, bits, offsets, ids=ids, **options).to(x.device)


def _same(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(actual.isnan(), expected.isnan()) and torch.equal(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.quick(42)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("width", WIDTHS)
def test_one_code_gives_the_bytes_of_the_specification(body, width, code):
    for count in (1, 2, 9) if body is functions_of("triton") else range(1, 10):
        x, ids = _hard_rows(12, width)[-count:], _ids(count)
        out = torch.full((count * row_nbytes(width, code),), 0xAA, dtype=torch.uint8)
        assert body.quantize_rows(x, None, code, ids=ids, key=KEY, out=out) is out
        assert torch.equal(out, _expected(x, None, code, ids=ids, key=KEY))
        rows = body.dequantize_rows(out, code, width=width)
        assert rows.shape == x.shape and rows.dtype == torch.float32
        assert _same(rows.cpu(), spec.dequantize_rows(out.cpu(), code, width=width))


@pytest.mark.parametrize(("width", "block"), [(47, 0), (256, 0), (256, 64), (100, 32), (1433, 0), (1100, 1024)])
def test_mixed_codes_give_the_bytes_of_the_specification(body, width, block):
    x, ids = _hard_rows(40, width), _ids(25)
    index = torch.randperm(40)[:25]
    codes = torch.tensor(CODES)[torch.randint(0, len(CODES), (25,))].to(torch.uint8)
    offsets = row_offsets(codes, width, block=block)
    out = torch.full((int(offsets[-1]),), 0xAA, dtype=torch.uint8)
    body.quantize_rows(x, index, codes, offsets, ids=ids, key=KEY, block=block, out=out)
    assert torch.equal(out, _expected(x, index, codes, offsets, ids=ids, key=KEY, block=block))
    rows = body.dequantize_rows(out, codes, offsets, width=width, block=block)
    assert _same(rows.cpu(), spec.dequantize_rows(out.cpu(), codes.cpu(), offsets.cpu(), width=width, block=block))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("width", "block"), [(256, 32), (70, 64), (20, 32)])
def test_blocks_give_the_bytes_of_the_specification(body, width, block, code):
    x, ids, index = _hard_rows(12, width), _ids(5), torch.tensor([11, 1, 8, 4, 10])
    data = body.quantize_rows(x, index, code, ids=ids, key=KEY, block=block)
    assert torch.equal(data, _expected(x, index, code, ids=ids, key=KEY, block=block))
    rows = body.dequantize_rows(data, code, width=width, block=block)
    assert _same(rows.cpu(), spec.dequantize_rows(data.cpu(), code, width=width, block=block))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_every_type(body, dtype):
    x, ids, index = torch.randn(30, 40).to(dtype), _ids(9), torch.randperm(30)[:9].to(torch.int32)
    data = body.quantize_rows(x, index, 4, ids=ids, key=KEY)
    assert torch.equal(data, _expected(x.float(), index, 4, ids=ids, key=KEY))
    rows = body.dequantize_rows(data, 4, width=40)
    # The interpreter cuts bf16 where a GPU rounds.
    tolerance = 2.0**-7 if dtype == torch.bfloat16 else 0.0
    assert torch.allclose(body.dequantize_rows(data, 4, width=40, dtype=dtype), rows.to(dtype), rtol=tolerance, atol=0)
    for add in (False, True):
        out = torch.randn(50, 40).to(dtype)
        where, wide = torch.randperm(50)[:9], torch.promote_types(dtype, torch.float32)
        expected = out.clone()
        expected[where] = (expected[where].to(wide) * add + rows).to(dtype)
        assert body.dequantize_rows(data, 4, width=40, index=where, out=out, add=add) is out
        assert torch.allclose(out, expected, rtol=tolerance, atol=0)


def test_rows_that_are_not_contiguous(body):
    x, ids = torch.randn(64, 20).t(), _ids(20)
    data = body.quantize_rows(x, None, 8, ids=ids, key=3)
    assert torch.equal(data, body.quantize_rows(x.contiguous(), None, 8, ids=ids, key=3))
    out = torch.zeros(64, 20).t()
    body.dequantize_rows(data, 8, width=64, out=out, add=True)
    assert torch.equal(out, body.dequantize_rows(data, 8, width=64))


def test_long_messages_are_cut_into_blocks(monkeypatch):
    x, ids, index = torch.randn(500, 33), _ids(400), torch.randperm(500)[:400]
    codes = torch.tensor(CODES)[torch.randint(0, len(CODES), (400,))]
    offsets = row_offsets(codes, 33, block=32)
    monkeypatch.setattr(fast, "BLOCK", 3000)
    monkeypatch.setattr(fast, "NOISE_BLOCK", 1000)
    data = fast.quantize_rows(x, index, codes, offsets, ids=ids, key=KEY, block=32)
    assert torch.equal(data, spec.quantize_rows(x, index, codes, offsets, ids=ids, key=KEY, block=32))
    out = fast.dequantize_rows(data, codes, offsets, width=33, block=32, index=index, out=torch.zeros(500, 33))
    assert torch.equal(out[index], spec.dequantize_rows(data, codes, offsets, width=33, block=32))


def test_no_rows_and_no_columns(body):
    for shape in ((0, 5), (4, 0)):
        x, ids = torch.randn(shape), _ids(shape[0])
        for bits in (2, torch.full((shape[0],), 8)):
            offsets = None if isinstance(bits, int) else row_offsets(bits, shape[1])
            data = body.quantize_rows(x, None, bits, offsets, ids=ids, key=KEY)
            assert data.shape == (0,)
            rows = body.dequantize_rows(data, bits, offsets, width=shape[1], out=x.clone())
            assert torch.equal(rows, x)
    assert body.dequantize_rows(torch.empty(0, dtype=torch.uint8), 8, width=7).shape == (0, 7)


def test_values_on_the_grid_and_constant_rows_are_exact(body):
    x = torch.empty(12, 300)
    for code in GRID:
        for row in x:
            step = (torch.rand(()) + 0.1).bfloat16().float()
            level = torch.randint(0, 2**code, (300,))
            level[:2] = torch.tensor([0, 2**code - 1])
            row[:] = level * step
        x[:4] = torch.tensor([0.0, -3.5, 1e30, 2.0**-130]).bfloat16().float()[:, None]
        x[4:8] -= x[4:8].max(1, keepdim=True).values.log2().ceil().exp2()
        data = body.quantize_rows(x, None, code, ids=_ids(12), key=KEY)
        assert torch.equal(body.dequantize_rows(data, code, width=300), x)


def test_a_block_without_finite_range_decodes_to_nan_alone(body):
    x = torch.randn(6, 96)
    x[0, 40], x[1, 0], x[2, 95], x[3, 33], x[3, 34] = math.nan, math.inf, -math.inf, 3e38, -3e38
    for code in (*GRID, FP8):
        data = body.quantize_rows(x, None, code, ids=_ids(6), key=KEY, block=32)
        blocks = body.dequantize_rows(data, code, width=96, block=32).view(6, 3, 32).isnan()
        lost = [[0, 1], [1, 0], [2, 2], [3, 1]]
        assert torch.equal(blocks.all(2), blocks.any(2))
        assert blocks.any(2).nonzero().tolist() == lost
    for code in (BF16, FP32):
        data = body.quantize_rows(x, None, code, ids=_ids(6), key=KEY)
        assert _same(
            body.dequantize_rows(data, code, width=96), x.to(torch.bfloat16 if code == BF16 else x.dtype).float()
        )


@pytest.mark.parametrize("code", GRID)
def test_metadata_are_bf16_and_enclose_the_range(code):
    x = torch.randn(3000, 9) * 10 ** torch.randint(-20, 20, (3000, 1)) + torch.randn(3000, 1)
    step, zero, word, finite = spec.ranges(x, code)
    low, high, levels = x.amin(1, keepdim=True), x.amax(1, keepdim=True).double(), 2**code - 1
    assert finite.all() and torch.equal(step.bfloat16().float(), step) and torch.equal(zero.bfloat16().float(), zero)
    assert (zero <= low).all() and (zero >= low - low.abs() * 2.0**-7).all()
    needed, given = high - zero.double(), step.double() * levels
    assert (given >= needed * (1 - 2.0**-23)).all() and (given <= needed * (1 + 2.0**-7)).all()
    halves = word.view(torch.bfloat16).float()
    assert torch.equal(halves[:, :1], step) and torch.equal(halves[:, 1:], zero)


def test_e4m3_is_the_format_of_torch():
    fields = torch.arange(256)
    theirs = fields.to(torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(spec.from_e4m3(fields)[~theirs.isnan()], theirs[~theirs.isnan()])
    grid = theirs[~theirs.isnan()].sort().values
    x = torch.cat([torch.linspace(-448, 448, 5000), torch.linspace(-0.05, 0.05, 5000)])[None]
    for draw in (0, 2**12, 2**13 - 1):
        y = spec.from_e4m3(spec._to_e4m3(x, torch.full(x.shape, draw)))
        below, above = grid[torch.searchsorted(grid, x, right=True) - 1], grid[torch.searchsorted(grid, x)]
        assert ((y == below) | (y == above)).all()


def test_rows_do_not_depend_on_their_company(body):
    x, ids, order = torch.randn(20, 50), _ids(20), torch.randperm(20)
    data = body.quantize_rows(x, None, 2, ids=ids, key=KEY).view(20, -1)
    assert torch.equal(body.quantize_rows(x, order, 2, ids=ids[order], key=KEY).view(20, -1), data[order])
    assert torch.equal(body.quantize_rows(x, None, 2, ids=ids, key=KEY).view(20, -1), data)
    codes = torch.tensor([2, 8, 4, FP8]).repeat(5)
    offsets = row_offsets(codes, 50)
    mixed = body.quantize_rows(x, None, codes, offsets, ids=ids, key=KEY)
    assert torch.equal(torch.stack([mixed[b : b + data.shape[1]] for b in offsets[:-1:4].tolist()]), data[::4])
    for other in ({"ids": ids + 1, "key": KEY}, {"ids": ids, "key": KEY + 1}, {"ids": ids + 2**32, "key": KEY}):
        assert not torch.equal(body.quantize_rows(x, None, 2, **other).view(20, -1), data)


@pytest.mark.parametrize("first_id", [0, 2**32 - 5000, 2**52])
def test_noise_is_uniform_and_independent(first_id):
    def noise(key):
        return (spec.random_bits(torch.arange(first_id, first_id + 10000), 64, key=key) + 0.5) / 2**13

    u = noise(KEY)
    count = u.numel()
    assert float(u.min()) > 0 and float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 4 * 12**-0.5 / count**0.5
    assert float(u.var()) == pytest.approx(1 / 12, rel=4 / count**0.5)
    shares = torch.bincount((u * 256).long().flatten(), minlength=256) * 256 / count
    assert float((shares - 1).square().mean()) == pytest.approx(255 / count, rel=0.4)
    z = (u - 0.5) * 12**0.5
    pairs = [(z[1:], z[:-1]), (z[:, 1:], z[:, :-1]), (z[1:, 1:], z[:-1, :-1]), (z[64:], z[:-64])]
    others = [(noise(key) - 0.5) * 12**0.5 for key in (KEY + 1, KEY ^ 2**63, KEY ^ 2**31, fold_key(0, 1, 3))]
    pairs += [(z, other) for other in others] + [(z[1:], other[:-1]) for other in others]
    for a, b in pairs:
        assert abs(float((a * b).mean())) < 4.5 / count**0.5


def _draws(x: Tensor, code: int, count: int, *, block: int = 0, copies: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Mean error, its variance and the largest error of entries over draws by different keys and ids of rows."""
    total, squares, worst = torch.zeros(3, *x.shape, dtype=torch.float64)
    many, ids = x.repeat(copies, 1), torch.arange(copies * x.shape[0])
    for draw in range(count // copies):
        data = fast.quantize_rows(many, None, code, ids=ids, key=fold_key(5, draw), block=block)
        rows = fast.dequantize_rows(data, code, width=x.shape[1], block=block)
        error = (rows - many).double().view(copies, *x.shape)
        total += error.sum(0)
        squares += (error**2).sum(0)
        worst = torch.maximum(worst, error.abs().amax(0))
    return total / count, squares / count - (total / count) ** 2, worst


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", GRID)
def test_unbiased_with_the_variance_of_theory(code, kind):
    x, count = KINDS[kind](16, 256), 800
    step, zero, _, finite = spec.ranges(x, code)
    assert bool(finite.all())
    step = step.double()
    mean, variance, worst = _draws(x, code, count)
    assert float((mean / step).square().mean().sqrt()) < 1.3 * 0.41 / count**0.5
    share = ((x.double() - zero) / step).frac()
    exact = (step**2 * share * (1 - share)).sum(1)
    assert torch.allclose(variance.sum(1), exact, rtol=0.05)
    assert (worst < step * 1.00001).all()
    assert (variance.sum(1) <= 256 * step[:, 0] ** 2 / 4 * 1.01).all()
    if code > 1:
        ratio = float(variance.sum() / (256 * step**2 / 6).sum())
        assert 0.45 < ratio < 0.55 if kind == "relu" else 0.94 < ratio < 1.03


def test_variance_falls_with_bits_and_with_blocks():
    x = torch.randn(64, 256)
    variance = {code: float(_draws(x, code, 100)[1].sum()) for code in (2, 4, 8)}
    assert variance[4] / variance[2] == pytest.approx(9 / 225, rel=0.1)
    assert variance[8] / variance[2] == pytest.approx(9 / 65025, rel=0.1)
    assert float(_draws(x, 4, 100, block=64)[1].sum()) / variance[4] == pytest.approx(0.68, rel=0.1)


def test_fp8_and_constant_rows_are_unbiased():
    x, count = torch.randn(16, 256), 800
    mean, _, worst = _draws(x, FP8, count)
    step = spec.ranges(x, FP8)[0]
    gap = step * (x / step).abs().log2().floor().clamp(min=-6).sub(3).exp2()
    assert float((mean / gap).square().mean().sqrt()) < 1.3 * 0.41 / count**0.5
    assert (worst < gap * 1.00001).all()
    x = torch.randn(16, 1).expand(-1, 256).contiguous()
    for code in GRID:
        mean, _, worst = _draws(x, code, 200)
        assert (worst <= x.abs() * 2.0**-6.9 / (2**code - 1)).all()
        assert (mean.mean(1).abs() <= 6 * 0.5 * worst.amax(1) / (200 * 256) ** 0.5 + 1e-7 * x[:, 0].abs()).all()


def test_wire_sizes():
    assert [row_nbytes(100, code) for code in CODES] == [4 + 16, 4 + 28, 4 + 52, 4 + 100, 4 + 100, 200, 400]
    assert row_nbytes(100, 2, block=32) == 16 + 28 and row_nbytes(100, BF16, block=32) == 200
    assert row_nbytes(1, 1) == 8 and row_nbytes(0, 8) == 0 and row_nbytes(3, BF16) == 8
    assert wire.metadata_nbytes(100, FP8) == 4 and wire.metadata_nbytes(100, FP32) == 0
    assert row_offsets(torch.tensor([2, FP8, FP32]), 100).tolist() == [0, 32, 136, 536]
    with pytest.raises(ValueError, match="3"):
        row_offsets(torch.tensor([2, 3]), 100)
    for code, block in ((3, 0), (8, 48), (8, 16)):
        with pytest.raises(ValueError, match=f"{block or code}"):
            row_nbytes(100, code, block=block)


def test_wrong_arguments_are_told(body):
    x, ids, codes = torch.randn(4, 8), _ids(4), torch.tensor([2, 4, 8, 8])
    offsets, index = row_offsets(codes, 8), torch.arange(4)
    data = body.quantize_rows(x, None, 8, ids=ids, key=1)
    quantize = [
        ((x.view(4, 2, 4), None, 8), {}, "flatten"),
        ((x.long(), None, 8), {}, "floating"),
        ((x, None, 7), {}, "code 7"),
        ((x, index[:3], 8), {}, "ids"),
        ((x, None, 8, offsets), {}, "leave them out"),
        ((x, None, codes), {}, "row_offsets"),
        ((x, None, codes[:3], offsets), {}, "one integer code"),
        ((x, None, codes, offsets[:-1]), {}, "offsets"),
        ((x, None, 8), {"block": 33}, "block 33"),
        ((x, None, 8), {"out": data[4:]}, "bytes"),
        ((x, None, 8), {"out": torch.empty(52, dtype=torch.uint8)[2:-2]}, "multiple of 4"),
    ]
    for given, options, words in quantize:
        with pytest.raises(ValueError, match=words):
            body.quantize_rows(*given, ids=ids, key=1, **options)
    dequantize = [
        ({"width": 8, "index": index}, "as out"),
        ({"width": 8, "add": True}, "as out"),
        ({"width": 13}, "bytes"),
        ({"width": 8, "out": x[:, :7]}, "out"),
        ({"width": 8, "out": torch.zeros(5, 8)}, "bytes"),
        ({"width": 8, "out": x, "index": index[:3]}, "bytes"),
    ]
    for options, words in dequantize:
        with pytest.raises(ValueError, match=words):
            body.dequantize_rows(data, 8, **options)
    with pytest.raises(ValueError, match="5 rows"):
        body.dequantize_rows(data, codes, offsets, width=8, out=torch.zeros(5, 8))
