"""The fused expert MLP in Triton, run in the interpreter below `ops.moe_mlp`: outputs and gradients against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from kernels.row_map_cases import random_experts  # noqa: E402
from support.triton_interpreter import shuffled_programs  # noqa: E402
from support.triton_moe import WIDE, pretend_small, use_for_cpu  # noqa: E402

from pyfast import ops  # noqa: E402
from pyfast.kernels import reference_moe  # noqa: E402
from pyfast.kernels.triton import backend_moe as moe  # noqa: E402
from pyfast.kernels.triton import backend_row_map  # noqa: E402
from pyfast.kernels.triton.gemm_config import GemmConfig  # noqa: E402

pytestmark = pytest.mark.triton_interpreter

TOKENS, K, EXPERTS = 23, 3, 5
NAMES = ("y", "dx", "dweights", "dw_gate_up", "dw_down")
# Relative to the norm. Half precision rounds the pre-activation, the activation and each slot's row.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


class Backend:
    """What `kernels.for_device` gives on a GPU, as far as moe_mlp goes."""

    row_map = staticmethod(backend_row_map.row_map)
    moe_mlp_forward = staticmethod(moe.moe_mlp_forward)
    moe_mlp_backward = staticmethod(moe.moe_mlp_backward)
    moe_mlp_weight_gradients = staticmethod(moe.moe_mlp_weight_gradients)


def problem(width: int, expert_width: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor, Tensor]:
    """((x, weights, w_gate_up, w_down), experts, dy): an expert nobody chose, dropped slots, a token with none left,
    an expert twice in one token, weights of 0."""
    torch.manual_seed(0)
    experts = random_experts(TOKENS, K, EXPERTS, dropped=0.2)
    experts[experts == 2] = 3
    experts[4], experts[5] = -1, 1
    weights = torch.rand(TOKENS, K)
    weights[::4] = 0
    x = torch.randn(TOKENS, width).to(dtype)
    w_gate_up = torch.randn(EXPERTS, 2 * expert_width, width).div(width**0.5).to(dtype)
    w_down = torch.randn(EXPERTS, width, expert_width).div(expert_width**0.5).to(dtype)
    return [x, weights, w_gate_up, w_down], experts, torch.randn(TOKENS, width).to(dtype)


def results(tensors, experts, dy, **options) -> list[Tensor]:
    """(y and all gradients) of ops.moe_mlp."""
    x, weights, w_gate_up, w_down = leaves = [t.detach().requires_grad_() for t in tensors]
    y = ops.moe_mlp(x, experts, weights, w_gate_up, w_down, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def expected(tensors, experts, dy) -> list[Tensor]:
    x, weights, w_gate_up, w_down = leaves = [t.double().requires_grad_() for t in tensors]
    y = reference_moe.moe_mlp(x, experts, weights, w_gate_up, w_down)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]


def relative_error(actual: Tensor, reference: Tensor) -> float:
    return ((actual.double() - reference).norm() / reference.norm()).item()


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    pretend_small(monkeypatch)
    use_for_cpu(monkeypatch, Backend)
    with shuffled_programs(seed=1):
        yield


SIZES = [
    (torch.float32, 15, 31), (torch.float32, 24, 40), (torch.float32, 32, 16), (torch.bfloat16, 15, 31),
    (torch.bfloat16, 24, 40), (torch.float16, 24, 40),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "width", "expert_width"), SIZES, ids=str)
def test_output_and_gradients(dtype, width, expert_width):
    """Sizes of no tile, of 16-byte rows (descriptors read the up rows behind the gate's last tile), of whole tiles."""
    case = problem(width, expert_width, dtype)
    ours = results(*case)
    for name, mine, reference in zip(NAMES, ours, expected(*case), strict=True):
        assert mine.dtype == (torch.float32 if name == "dweights" else dtype), name
        assert relative_error(mine, reference) <= TOLERANCE[dtype], name
    experts = case[1]
    y, dx, dweights, dw_gate_up, dw_down = ours
    assert not y[4].any() and not dx[4].any() and not dweights[experts < 0].any()
    assert not dw_gate_up[2].any() and not dw_down[2].any()  # nobody chose expert 2
    assert dweights[0, experts[0] >= 0].abs().min() > 0  # its weights are 0


def test_the_routers_gradient_of_bfloat16(monkeypatch):
    """At F = 4096, against float64 from the start; with a pre-activation kept in bfloat16 it is 4e-3."""
    pretend_small(monkeypatch, config=GemmConfig(16, 1024, 32, 4, 2))
    (x, weights, w_gate_up, w_down), experts, dy = problem(32, 4096, torch.bfloat16)
    x, weights, experts, dy = x[:6], weights[:6], experts[:6], dy[:6]
    ours = weights.clone().requires_grad_()
    ops.moe_mlp(x, experts, ours, w_gate_up, w_down).backward(dy)
    wanted = expected([x, weights, w_gate_up, w_down], experts, dy)[2]
    assert ours.grad.dtype == torch.float32 and relative_error(ours.grad, wanted) <= 2e-3


@pytest.mark.parametrize("descriptors", [True, False], ids=["descriptors", "pointers"])
def test_the_same_bits_for_any_number_and_order_of_programs_and_any_walk(monkeypatch, descriptors):
    case = problem(16, 32, torch.bfloat16)
    runs = []
    for processors, seed in ((1, 2), (7, 3)):
        pretend_small(monkeypatch, processors=processors, descriptors=descriptors)
        monkeypatch.setattr("pyfast.kernels.triton.moe_mlp.rows_first", lambda w, x, first=processors == 1: first)
        with shuffled_programs(seed):
            runs.append(results(*case))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_wider_column_tiles_split_the_sums_of_dp_only(monkeypatch):
    case = problem(24, 40)
    narrow = results(*case)
    pretend_small(monkeypatch, config=WIDE)
    for name, a, b in zip(NAMES, narrow, results(*case), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_recomputing_the_pre_activation_changes_no_bit():
    case = problem(24, 40, torch.bfloat16)
    for a, b in zip(results(*case), results(*case, recompute=True), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("deferred", [False, True])
def test_weight_gradients_are_added_into_main_grads(deferred):
    tensors, experts, dy = problem(24, 40, torch.bfloat16)
    reference = expected(tensors, experts, dy)
    leaves = [t.detach().requires_grad_() for t in tensors]
    main_grads = torch.full(leaves[2].shape, 7.0), torch.full(leaves[3].shape, 7.0)
    later = []
    y = ops.moe_mlp(leaves[0], experts, *leaves[1:], main_grads=main_grads, defer=later.append if deferred else None)
    y.backward(dy)
    if deferred:
        assert (main_grads[0] == 7).all() and (main_grads[1] == 7).all()
        for work in later:
            work()
    assert leaves[2].grad is None and leaves[3].grad is None
    for main_grad, wanted in zip(main_grads, reference[3:], strict=True):
        assert (main_grad[2] == 7).all() and relative_error(main_grad - 7, wanted) <= TOLERANCE[torch.bfloat16]


def test_expanded_gradient_and_strided_operands():
    (x, weights, w_gate_up, w_down), experts, _ = problem(24, 40)
    strided = [x.t().contiguous().t(), weights, w_gate_up.transpose(1, 2).contiguous().transpose(1, 2), w_down]
    dy = torch.ones(1, 1).expand(TOKENS, 24)
    for name, ours, reference in zip(
        NAMES, results(strided, experts, dy), expected((x, weights, w_gate_up, w_down), experts, dy), strict=True
    ):
        assert relative_error(ours, reference) <= 2e-6, name


NOTHING = [(0, False, 16, 16), (3, True, 16, 16), (3, False, 0, 16), (3, False, 16, 0)]


@pytest.mark.parametrize(("tokens", "dropped", "width", "expert_width"), NOTHING)
def test_nothing_to_do(tokens, dropped, width, expert_width):
    """No tokens, all slots dropped, no model width, no expert width."""
    experts = torch.full((tokens, 2), -1 if dropped else 1)
    tensors = [
        torch.randn(tokens, width), torch.rand(tokens, 2), torch.randn(2, 2 * expert_width, width),
        torch.randn(2, width, expert_width),
    ]  # fmt: skip
    for result, like in zip(results(tensors, experts, torch.randn(tokens, width)), [tensors[0], *tensors], strict=True):
        assert result.shape == like.shape and not result.any()


def test_what_is_saved():
    """Kept for backward: x, weights, maps, both matrices and the pre-activation; no row of x, no activation."""
    (x, weights, w_gate_up, w_down), experts, _ = problem(24, 40)
    leaves = [t.requires_grad_() for t in (x, weights, w_gate_up, w_down)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.moe_mlp(leaves[0], experts, *leaves[1:])
    floats = [tuple(t.shape) for t in saved if t.is_floating_point()]
    given = [tuple(t.shape) for t in leaves]
    assert sorted(floats) == sorted([*given, (TOKENS * K, 80)])
