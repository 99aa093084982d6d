"""Every public op on fixed inputs, forward and gradients, on one instruction set: run by test_dispatch.py.

python isa_results.py ISA FILE      writes {"op dtype number": tensor} as safetensors
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from safetensors.torch import save_file

from pyfast import _C, ops
from pyfast.comm import Group
from pyfast.kernels import cpu
from pyfast.kernels.panels import Flags

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def with_gradients(function: Callable, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The first result of function(*inputs) and its gradients under a fixed upstream gradient."""
    inputs = tuple(x.requires_grad_() for x in inputs)
    result = function(*inputs)
    result = result[0] if isinstance(result, tuple) else result
    upstream = torch.linspace(-1, 1, result.numel()).view(result.shape).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, inputs, upstream)]


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def rms_norm(dtype):
    return with_gradients(ops.rms_norm, normal(37, 75, dtype=dtype), normal(75, dtype=dtype))


def rotary(dtype):
    angle = torch.arange(9)[:, None] * torch.linspace(1, 0.1, 19)
    return with_gradients(lambda x: ops.rotary(x, angle.cos(), angle.sin()), normal(2, 9, 3, 40, dtype=dtype))


def swiglu(dtype):
    return with_gradients(ops.swiglu, normal(37, 2 * 75, dtype=dtype) * 4)


def adamw_(dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    param, grad, exp_avg = normal(1003, dtype=dtype), normal(1003, dtype=dtype), normal(1003, dtype=wide)
    exp_avg_sq = normal(1003, dtype=wide).square()
    ops.adamw_(param, grad, exp_avg, exp_avg_sq, step=3, learning_rate=0.1, weight_decay=0.1)
    return [param, exp_avg, exp_avg_sq]


def adamw_bf16_moments(dtype):
    """From zero, where the moments before rounding are the same bits with and without an fma."""
    if dtype == torch.float64:
        return adamw_(dtype)
    param, grad = normal(1003, dtype=dtype), normal(1003, dtype=dtype)
    moments = torch.zeros(1003, dtype=torch.bfloat16), torch.zeros(1003, dtype=torch.bfloat16)
    ops.adamw_(param, grad, *moments, step=1, learning_rate=0.1, seed=5, first_index=2**32 - 500)
    return [param, *moments]


def attention(dtype):
    q, k, v = normal(2, 37, 4, 40, dtype=dtype), normal(2, 37, 2, 40, dtype=dtype), normal(2, 37, 2, 40, dtype=dtype)
    return with_gradients(lambda *qkv: ops.attention(*qkv, causal=True), q, k, v)


def scaled_dot_product_attention(dtype):
    q, k, v = normal(2, 4, 19, 40, dtype=dtype), normal(2, 4, 37, 40, dtype=dtype), normal(2, 4, 37, 24, dtype=dtype)
    seen = torch.arange(37)[None] < 30
    return with_gradients(lambda *qkv: ops.scaled_dot_product_attention(*qkv, seen), q, k, v)


def merge_attention(dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    outs = normal(2, 9, 3, 40, dtype=dtype), normal(2, 9, 3, 40, dtype=dtype)
    lses = normal(2, 3, 9, dtype=wide), normal(2, 3, 9, dtype=wide)
    return with_gradients(lambda a, b: ops.merge_attention(a, lses[0], b, lses[1]), *outs)


def linear_cross_entropy(dtype):
    h, w, target = normal(37, 75, dtype=dtype), normal(133, 75, dtype=dtype), torch.randint(0, 133, (37,))
    return with_gradients(lambda h, w: ops.linear_cross_entropy(h, w, target), h, w)


def linear(dtype):
    return with_gradients(ops.linear, normal(37, 75, dtype=dtype), normal(53, 75, dtype=dtype))


def experts(tokens=37, k=3, num_experts=5):
    return torch.randint(-1, num_experts, (tokens, k)), num_experts


def row_map(dtype):
    return [t.to(dtype) for t in ops.row_map(*experts())[:4]]  # small numbers: exact in every dtype


def permute(dtype):
    return with_gradients(lambda x: ops.permute(x, *experts())[0], normal(37, 75, dtype=dtype))


def unpermute(dtype):
    wide, mapped = torch.float64 if dtype == torch.float64 else torch.float32, ops.row_map(*experts())
    rows, weights = normal(37 * 3, 75, dtype=dtype), normal(37, 3, dtype=wide)
    return with_gradients(lambda rows, weights: ops.unpermute(rows, mapped, weights), rows, weights)


def grouped_gemm(dtype):
    offsets = torch.tensor([1, 20, 20, 36])
    x, w, bias = normal(37, 75, dtype=dtype), normal(3, 53, 75, dtype=dtype), normal(3, 53, dtype=dtype)
    return with_gradients(lambda x, w, b: ops.grouped_gemm(x, w, offsets, bias=b), x, w, bias)


def moe_mlp(dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    experts = torch.randint(-1, 3, (37, 2))
    arguments = (
        normal(37, 75, dtype=dtype), normal(37, 2, dtype=wide), normal(4, 2 * 53, 75, dtype=dtype) / 4,
        normal(4, 75, 53, dtype=dtype) / 4,
    )  # fmt: skip
    return with_gradients(lambda x, *rest: ops.moe_mlp(x, experts, *rest), *arguments)


def route(dtype):
    def weights_and_losses(logits):
        routing = ops.route(
            logits, 3, score="sigmoid", balance="micro_batch", z_loss=True, bias=torch.linspace(0, 1, 40)
        )
        return torch.cat([routing.weights.flatten(), routing.balance_loss.view(1), routing.z_loss.view(1)])

    return with_gradients(weights_and_losses, normal(37, 40, dtype=dtype))


def balance_loss(dtype):
    def loss(logits):
        return ops.balance_loss(ops.route(logits, 3, balance="micro_batch").balance_terms, 3)

    return with_gradients(loss, normal(37, 40, dtype=dtype))


def update_bias(dtype):
    counts = ops.route(normal(37, 40, dtype=dtype), 3).load
    return [ops.update_bias(torch.zeros(40), counts, 0.1)]


def all_gather_matmul(dtype):
    """Also the product over shards that lie apart, which needs no second rank."""
    shards, w = [normal(rows, 75, dtype=dtype) for rows in (37, 0, 20)], normal(75, 53, dtype=dtype)
    panels = torch.tensor([(2, 0, 37, 20), (0, 5, 5, 32), (0, 0, 0, 5)])
    out = torch.empty(57, 53, dtype=dtype)
    flags = Flags(1, torch.zeros(3, 2, dtype=torch.int64), 1.0, [0] * 3, [0] * 3)
    assert cpu.panel_gemm(panels, shards, w, out, flags) == -1
    return [out, *_on_one_rank(ops.all_gather_matmul, dtype)]


def matmul_reduce_scatter(dtype):
    return _on_one_rank(ops.matmul_reduce_scatter, dtype)


def matmul_all_reduce(dtype):
    return _on_one_rank(ops.matmul_all_reduce, dtype)


def _on_one_rank(op, dtype):
    x, w = normal(37, 75, dtype=dtype), normal(53, 75, dtype=dtype)
    return with_gradients(lambda x, w: op(x, w, Group.single()), x, w)


CASES = (
    rms_norm,
    rotary,
    swiglu,
    adamw_,
    adamw_bf16_moments,
    attention,
    scaled_dot_product_attention,
    merge_attention,
    linear_cross_entropy,
    linear,
    row_map,
    permute,
    unpermute,
    grouped_gemm,
    moe_mlp,
    route,
    balance_loss,
    update_bias,
    all_gather_matmul,
    matmul_reduce_scatter,
    matmul_all_reduce,
)


def results() -> Iterator[tuple[str, torch.Tensor]]:
    for case in CASES:
        if not hasattr(ops, case.__name__):
            continue
        for name, dtype in DTYPES.items():
            torch.manual_seed(0)
            for number, tensor in enumerate(case(dtype)):
                yield f"{case.__name__} {name} {number}", tensor.contiguous()


if __name__ == "__main__":
    torch.set_num_threads(1)
    cpu.use_isa(sys.argv[1])
    assert _C.isa() == sys.argv[1]
    save_file(dict(results()), sys.argv[2])
