"""bfloat16 products on every instruction set: AVX512-BF16 multiplies pairs, the others widen to float32.

The pair kernels sum in float32 and round only what torch's own bfloat16 products round too. Small integers show that no
product or sum is rounded at all; torch's bfloat16 modules set how far a fused block may be from float64.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyfast import ops
from pyfast.kernels import cpu

SIZES = [(1, 1, 1), (3, 5, 2), (12, 32, 768), (13, 33, 769), (25, 70, 31), (100, 40, 1601)]


@pytest.fixture(params=["avx512bf16", "avx512", "avx2", "baseline"])
def isa(request):
    if request.param not in cpu.available_isas():
        pytest.skip(f"{request.param} was not built or this processor lacks it")
    cpu.use_isa(request.param)
    yield request.param
    cpu.use_isa(cpu.available_isas()[0])


def integers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Products and sums of these are exact in float32."""
    return torch.randint(-8, 9, shape).to(dtype)


def layouts(x: Tensor) -> list[Tensor]:
    """x by rows, by columns, with odd strides off an even address, and with no contiguous dimension."""
    odd = torch.zeros(x.numel() + x.shape[0] * 3 + 1, dtype=x.dtype)[1:]
    odd = odd.as_strided(x.shape, (x.shape[1] + (3 if x.shape[1] % 2 == 0 else 2), 1)).copy_(x)
    spread = torch.zeros(2 * x.shape[0], 3 * x.shape[1], dtype=x.dtype)[::2, ::3].copy_(x)
    return [x, x.t().contiguous().t(), odd, spread]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300)).item()


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_gemm_rounds_no_product(isa, m, n, k):
    torch.manual_seed(0)
    a, b = integers(m, k), integers(k, n)
    exact = (a.double() @ b.double()).float()
    for a_form in layouts(a):
        for b_form in layouts(b):
            assert torch.equal(cpu.gemm(a_form, b_form, torch.empty(m, n)), exact)
    assert torch.equal(cpu.gemm(a, b, torch.empty(m, n).bfloat16()), exact.bfloat16())
    assert torch.equal(cpu.gemm(a, b, torch.ones(m, n), accumulate=True, scale=0.5), 1 + exact / 2)


def test_gemm_rounds_factors_only_if_told(isa):
    torch.manual_seed(0)
    a, b = torch.randn(37, 403), torch.randn(403, 71).bfloat16()
    for a_form in layouts(a):
        assert relative_error(cpu.gemm(a_form, b, torch.empty(37, 71)), a.double() @ b.double()) < 1e-6
        used = a.bfloat16() if isa == "avx512bf16" else a
        for out in (torch.empty(37, 71), torch.empty(71, 37).t()):
            rounded = cpu.gemm(a_form, b, out, round_factors=True)
            assert relative_error(rounded, used.double() @ b.double()) < 1e-6
    # of two float32 factors neither is rounded
    c = torch.randn(403, 71)
    assert relative_error(cpu.gemm(a, c, torch.empty(37, 71), round_factors=True), a.double() @ c.double()) < 1e-6


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_nothing_is_read_beyond_a_row(isa, value):
    """What lies between rows of odd length must not meet a zero of padding: 0 * inf is NaN."""
    around_a, around_b = torch.full((26, 9), value).bfloat16(), torch.full((3, 50, 9), value).bfloat16()
    a, w = around_a[1:25, 1:8].copy_(integers(24, 7)), around_b[:, 1:49, 1:8].copy_(integers(3, 48, 7))
    offsets = torch.tensor([0, 5, 5, 24])
    exact = torch.cat([a[:5].double() @ w[0].t().double(), a[5:].double() @ w[2].t().double()])
    assert torch.equal(ops.grouped_gemm(a, w, offsets).double(), exact.bfloat16().double())
    back = ops.grouped_gemm(around_a[1:25, 1:8], w.transpose(1, 2), offsets, transpose=True)
    assert torch.equal(back.double(), exact.bfloat16().double())
    assert torch.equal(cpu.gemm(a, w[0].t(), torch.empty(24, 48)).double(), a.double() @ w[0].t().double())


@pytest.mark.parametrize(("width", "out"), [(31, 15), (1, 1), (70, 129), (1030, 64)])
@pytest.mark.parametrize("transpose", [False, True], ids=["", "transpose"])
def test_grouped_gemm_rounds_no_product(isa, width, out, transpose):
    torch.manual_seed(0)
    offsets = torch.tensor([0, 7, 7, 40, 90, 163])
    x, w = integers(163, width), integers(5, out, width)
    w = w.transpose(1, 2).contiguous() if transpose else w
    matrices = w if transpose else w.transpose(1, 2)
    dy, main_grad = integers(163, out), torch.ones(w.shape)
    w.requires_grad_()
    x.requires_grad_()
    y = ops.grouped_gemm(x, w, offsets, transpose=transpose, main_grad=main_grad)
    y.backward(dy)
    rows = [slice(low, high) for low, high in zip(offsets, offsets[1:], strict=False)]
    pairs = list(zip(rows, matrices.detach().double(), strict=True))
    assert torch.equal(y, torch.cat([x[r].double() @ m for r, m in pairs]).to(torch.bfloat16))
    assert torch.equal(x.grad, torch.cat([dy[r].double() @ m.t() for r, m in pairs]).to(torch.bfloat16))
    left, right = (x.detach(), dy) if transpose else (dy, x.detach())
    assert torch.equal(main_grad, 1 + torch.stack([left[r].double().t() @ right[r].double() for r in rows]).float())


class Experts(torch.nn.Module):
    """The mixture by torch's own functions, in the dtype of its inputs: an expert at a time."""

    def forward(self, x, experts, weights, w_gate_up, w_down):
        y = torch.zeros_like(x)
        for e in range(w_gate_up.shape[0]):
            token, slot = torch.where(experts == e)
            gate, up = F.linear(x[token], w_gate_up[e]).chunk(2, -1)
            rows = F.linear(F.silu(gate) * up, w_down[e]) * weights[token, slot, None].to(x.dtype)
            y = y.index_add(0, token, rows)
        return y


def outcome(function, x, experts, *rest, dy) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, *rest)]
    y = function(leaves[0], experts, *leaves[1:])
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize(("width", "ffn"), [(64, 96), (75, 54), (75, 53), (130, 640)])
def test_expert_mlp_is_no_further_from_float64_than_torch(isa, width, ffn, recompute):
    torch.manual_seed(0)
    experts = torch.randint(0, 3, (150, 2))
    x, dy, weights = torch.randn(150, width).bfloat16(), torch.randn(150, width).bfloat16(), torch.rand(150, 2)
    w_gate_up = (torch.randn(4, 2 * ffn, width) / width**0.5).bfloat16()
    w_down = (torch.randn(4, width, ffn) / ffn**0.5).bfloat16()
    arguments = (x, experts, weights, w_gate_up, w_down)
    exact = outcome(Experts(), *(t.double() if t.is_floating_point() else t for t in arguments), dy=dy.double())
    theirs = outcome(Experts(), *arguments, dy=dy)
    ours = outcome(lambda *leaves: ops.moe_mlp(*leaves, recompute=recompute), *arguments, dy=dy)
    for name, got, torchs, want in zip(
        ("y", "dx", "dweights", "dw_gate_up", "dw_down"), ours, theirs, exact, strict=True
    ):
        assert relative_error(got, want) <= relative_error(torchs, want), name


def test_expert_mlp_adds_its_weight_gradients_alike_now_and_later(isa):
    torch.manual_seed(0)
    x, experts, weights = torch.randn(90, 40).bfloat16(), torch.randint(-1, 3, (90, 2)), torch.rand(90, 2)
    matrices = [(torch.randn(3, *shape) / 7).bfloat16().requires_grad_() for shape in ((2 * 54, 40), (40, 54))]
    sums = []
    for later in (None, []):
        main_grads = tuple(torch.ones(w.shape) for w in matrices)
        defer = None if later is None else later.append
        ops.moe_mlp(x, experts, weights, *matrices, main_grads=main_grads, defer=defer).sum().backward()
        for closure in later or ():
            closure()
        sums.append(main_grads)
    assert all(torch.equal(now, then) for now, then in zip(*sums, strict=True))
