"""The grouped GEMM in Triton, run in the interpreter: outputs and gradients against float64, an expert at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from support.triton_interpreter import shuffled_programs  # noqa: E402
from support.triton_moe import WIDE, pretend_small, use_for_cpu  # noqa: E402

from pyfast import ops  # noqa: E402
from pyfast.kernels.triton import backend_moe  # noqa: E402
from pyfast.kernels.triton.grouped_gemm import grouped_gemm, grouped_wgrad  # noqa: E402

pytestmark = pytest.mark.triton_interpreter

# A product's error relative to its norm: one rounding of the dtype, or of float32 sums.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3, torch.float16: 3e-4}
# Counts of rows: no rows, one, less than a tile, exactly tiles, one more.
OFFSETS = torch.tensor([0, 0, 1, 12, 44, 44, 61], dtype=torch.int32)
ROWS = 70  # nine behind the last offset


def expected_product(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [R, K] times w [E, K, N] of each row's expert, in float64; 0 in rows without one."""
    y = torch.zeros(x.shape[0], w.shape[2], dtype=torch.float64)
    for e, (a, b) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        y[a:b] = x[a:b].double() @ w[e].double() + (0 if bias is None else bias[e].double())
    return y


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.fixture(autouse=True)
def _any_order():
    with shuffled_programs(seed=1):
        yield


@pytest.mark.parametrize("transpose", [False, True], ids=["", "transpose"])
@pytest.mark.parametrize(
    ("dtype", "n", "k"),
    [(torch.float32, 15, 31), (torch.float32, 48, 32), (torch.bfloat16, 24, 40), (torch.float16, 15, 31)],
    ids=str,
)
def test_products_and_gradients(monkeypatch, dtype, n, k, transpose):
    """Sizes of no tile, of 16-byte rows (descriptors read past the end), of whole tiles; rows beyond hold NaN."""
    pretend_small(monkeypatch)
    use_for_cpu(monkeypatch, backend_moe)
    torch.manual_seed(0)
    inner, outer = (n, k) if transpose else (k, n)
    x, dy = torch.randn(ROWS, inner).to(dtype), torch.randn(ROWS, outer).to(dtype)
    x[61:], dy[61:] = float("nan"), float("nan")
    w, bias = torch.randn(6, n, k).to(dtype), torch.randn(6, outer).to(dtype)
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    y = ops.grouped_gemm(x, w, OFFSETS.long(), transpose=transpose, bias=bias)
    dx, dw, dbias = torch.autograd.grad(y, leaves, dy)

    w64 = w.detach() if transpose else w.detach().transpose(1, 2)
    dx64 = expected_product(dy, w64.transpose(1, 2), OFFSETS)
    dw64 = torch.stack([dy[a:b].double().t() @ x[a:b].double() for a, b in zip(OFFSETS, OFFSETS[1:], strict=False)])
    dw64 = dw64.transpose(1, 2) if transpose else dw64
    dbias64 = torch.stack([dy[a:b].double().sum(0) for a, b in zip(OFFSETS, OFFSETS[1:], strict=False)])
    expected = (expected_product(x.detach(), w64, OFFSETS, bias.detach()), dx64, dw64.detach(), dbias64)
    for ours, reference in zip((y, dx, dw, dbias), expected, strict=True):
        assert ours.dtype == dtype and relative_error(ours, reference) <= TOLERANCE[dtype]
    assert not y[61:].any() and not dx[61:].any() and not dw[[0, 4]].any() and not dbias[[0, 4]].any()


@pytest.mark.parametrize("descriptors", [True, False], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("weights_are_larger", [True, False], ids=["rows first", "columns first"])
def test_every_way_through_the_kernel_gives_the_same_bits(monkeypatch, descriptors, weights_are_larger):
    """Descriptors or pointers, tiles walked down rows or along columns, two or five programs: one result."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 32), torch.randn(6, 48, 32)
    expected = expected_product(x, w.transpose(1, 2), OFFSETS)
    results = []
    for processors in (2, 5):
        pretend_small(monkeypatch, processors=processors, descriptors=descriptors)
        monkeypatch.setattr("pyfast.kernels.triton.grouped_gemm.rows_first", lambda w, x: weights_are_larger)
        results.append(grouped_gemm(x, w, OFFSETS))
    assert torch.equal(*results) and relative_error(results[0], expected) <= 1e-6


@pytest.mark.parametrize("first", [0, 3])
def test_rows_outside_the_offsets_are_zero_before_and_behind(monkeypatch, first):
    pretend_small(monkeypatch, config=WIDE)
    offsets = torch.tensor([first, 20, 20], dtype=torch.int64)
    x, w = torch.full((60, 16), float("nan")), torch.randn(2, 40, 16)
    x[first:20] = torch.randn(20 - first, 16)
    y = grouped_gemm(x, w, offsets)
    assert not y[:first].any() and not y[20:].any()
    assert relative_error(y, expected_product(x, w.transpose(1, 2), offsets)) <= 1e-6


def test_wrong_offsets_touch_no_foreign_memory(monkeypatch):
    """On a GPU nobody looks at them first. The interpreter raises if an address lies outside every argument."""
    pretend_small(monkeypatch, processors=1)  # experts that overlap write the same rows, which several would race for
    x, w = torch.randn(20, 16), torch.randn(3, 16, 16)
    for values in ([-5, 4, 900, 1000], [0, 2**40, 5, 7], [10, 5, 3, 20]):
        offsets = torch.tensor(values)
        grouped_gemm(x, w, offsets)
        grouped_wgrad(x, x, offsets, torch.empty(3, 16, 16), False)


def test_weight_gradients_are_added_into_main_grad_and_empty_experts_left_alone(monkeypatch):
    pretend_small(monkeypatch)
    torch.manual_seed(0)
    dy, x = torch.randn(ROWS, 24).bfloat16(), torch.randn(ROWS, 40).bfloat16()
    dw64 = torch.stack([dy[a:b].double().t() @ x[a:b].double() for a, b in zip(OFFSETS, OFFSETS[1:], strict=False)])
    main_grad = torch.full((6, 24, 40), 7.0)
    grouped_wgrad(dy, x, OFFSETS, main_grad, True)
    assert (main_grad[[0, 4]] == 7.0).all()
    assert relative_error(main_grad - 7, dw64) <= 1e-6
    # Written instead, in a layout of its own: nothing of what was there stays.
    dw = torch.full((40, 6, 24), float("nan")).permute(1, 2, 0)
    grouped_wgrad(dy, x, OFFSETS, dw, False)
    assert not dw[[0, 4]].any() and relative_error(dw, dw64) <= 1e-6


def test_an_infinite_row_of_another_expert_spoils_nothing(monkeypatch):
    """The last step of an expert's sum over rows reaches into the next expert's rows."""
    pretend_small(monkeypatch)
    x = torch.randn(ROWS, 16)
    dy = torch.randn(ROWS, 16)
    x[44:61], dy[44:61] = float("inf"), float("nan")
    dw = torch.empty(6, 16, 16)
    grouped_wgrad(dy, x, OFFSETS, dw, False)
    assert dw[:5].isfinite().all() and relative_error(dw[2], dy[1:12].double().t() @ x[1:12].double()) <= 1e-6


@pytest.mark.parametrize("descriptors", [True, False], ids=["descriptors", "pointers"])
def test_strides(monkeypatch, descriptors):
    """A transposed weight, every second row of x, an expanded gradient."""
    pretend_small(monkeypatch, descriptors=descriptors)
    use_for_cpu(monkeypatch, backend_moe)
    x = torch.randn(2 * ROWS, 32)[::2].requires_grad_()
    w = torch.randn(32, 6, 24).permute(1, 2, 0).requires_grad_()
    y = ops.grouped_gemm(x, w, OFFSETS)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    ones = torch.ones(ROWS, 24)
    assert relative_error(y.detach(), expected_product(x.detach(), w.detach().transpose(1, 2), OFFSETS)) <= 1e-6
    assert relative_error(dx, expected_product(ones, w.detach(), OFFSETS)) <= 1e-6
    sums = [x.detach()[a:b].double().sum(0).expand(24, 32) for a, b in zip(OFFSETS, OFFSETS[1:], strict=False)]
    assert relative_error(dw, torch.stack(sums)) <= 1e-6


@pytest.mark.parametrize(("rows", "experts", "n", "k"), [(0, 3, 16, 16), (5, 0, 16, 16), (5, 2, 0, 16), (5, 2, 16, 0)])
def test_nothing_to_do(monkeypatch, rows, experts, n, k):
    pretend_small(monkeypatch)
    offsets = torch.full((experts + 1,), rows, dtype=torch.int32)
    offsets[0] = 0
    y = grouped_gemm(torch.randn(rows, k), torch.randn(experts, n, k), offsets)
    assert y.shape == (rows, n) and not y.any()
    dw = torch.empty(experts, n, k)
    grouped_wgrad(torch.randn(rows, n), torch.randn(rows, k), offsets, dw, False)
    assert rows or not dw.any()


def test_float64_goes_through_plain_torch():
    x, w = torch.randn(ROWS, 8, dtype=torch.float64), torch.randn(6, 5, 8, dtype=torch.float64)
    y = backend_moe.grouped_gemm_forward(x, w, OFFSETS, None, False)
    assert y.dtype == torch.float64 and relative_error(y, expected_product(x, w.transpose(1, 2), OFFSETS)) <= 1e-14
