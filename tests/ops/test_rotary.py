"""ops.rotary against transformers' apply_rotary_pos_emb and multiplication by e^{i angle} in complex128."""

from __future__ import annotations

import pytest
import torch

from pyfast import ops
from pyfast.kernels import plain

TOLERANCE = {torch.float32: 2e-7, torch.float64: 1e-15, torch.bfloat16: 3e-3, torch.float16: 4e-4}


def tables(rows: int, half: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def complex_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The same rotation as a complex product, float64: x [B, S, N, D], positions [B, S]."""
    half = cos.shape[1]
    turned = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    turned = turned * torch.complex(cos.double(), sin.double())[positions][:, :, None, :]
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :].double()], -1)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "width", "half"), [(1, 2, 1), (3, 40, 20), (4, 64, 32), (2, 80, 16), (2, 21, 5)])
def test_equals_a_complex_product(heads, width, half, dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 7, heads, width, dtype=dtype, requires_grad=True)
    cos, sin = tables(11, half, torch.float64 if dtype == torch.float64 else torch.float32)
    positions = torch.randint(0, 11, (2, 7))
    dy = torch.randn_like(x)
    y = ops.rotary(x, cos, sin, positions=positions)
    y.backward(dy)
    assert y.dtype == x.grad.dtype == dtype and y.is_contiguous()
    assert relative_error(y, complex_rotation(x.detach(), cos, sin, positions)) < TOLERANCE[dtype]
    assert relative_error(x.grad, complex_rotation(dy, cos, -sin, positions)) < TOLERANCE[dtype]


def test_equals_transformers():
    x = torch.randn(2, 9, 4, 32)
    cos, sin = tables(9, 16)
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="transformers is the oracle")
    q, _ = llama.apply_rotary_pos_emb(
        x.transpose(1, 2), x.transpose(1, 2), torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]
    )
    torch.testing.assert_close(ops.rotary(x, cos, sin), q.transpose(1, 2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float64], ids=str)
def test_gradcheck_runs_the_real_kernel(table_dtype):
    x = torch.randn(2, 5, 3, 44, dtype=torch.float64, requires_grad=True)
    cos, sin = tables(5, 19, table_dtype)
    torch.autograd.gradcheck(lambda x: ops.rotary(x, cos, sin), (x,))


def test_packed_tokens_and_int32_positions():
    x = torch.randn(8, 2, 16)
    cos, sin = tables(6, 8)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 5])  # documents of 3 and 5 tokens, one position skipped
    expected = complex_rotation(x[None], cos, sin, positions[None])[0].float()
    torch.testing.assert_close(ops.rotary(x, cos, sin, positions=positions), expected)
    torch.testing.assert_close(ops.rotary(x, cos, sin, positions=positions.int()), expected)


def test_a_slice_of_a_fused_qkv_is_read_in_place(monkeypatch):
    qkv = torch.randn(2, 6, 4 * 16 + 2 * 2 * 16)
    q = qkv[..., 3:67].unflatten(-1, (4, 16))  # not even aligned
    cos, sin = tables(6, 8)
    expected = ops.rotary(q.contiguous(), cos, sin)
    monkeypatch.setattr(
        torch.Tensor, "contiguous", lambda self, *_: self if self.is_contiguous() else pytest.fail("copy")
    )
    assert torch.equal(ops.rotary(q, cos, sin), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # [B, N, S, D] underneath
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),  # last dimension strided
        lambda x: x.repeat(1, 2, 1, 1)[:, ::2],
        lambda x: x.unsqueeze(1),  # five dimensions
        lambda x: x[:1].expand(3, -1, -1, -1),
    ],
)
def test_strides(make):
    x = make(torch.randn(2, 6, 3, 10))
    cos, sin = tables(6, 5)
    leaf = x.detach().requires_grad_()
    y = ops.rotary(leaf, cos, sin)
    y.sum().backward()  # an expanded gradient
    copy = x.contiguous().requires_grad_()
    expected = ops.rotary(copy, cos, sin)
    expected.sum().backward()
    assert torch.equal(y, expected) and torch.equal(leaf.grad, copy.grad)


def test_same_bits_for_any_number_of_threads():
    x, (cos, sin) = torch.randn(3, 333, 2, 64), tables(333, 32)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(ops.rotary(x, cos, sin))
    torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_empty():
    cos, sin = tables(4, 4)
    for shape in ((0, 2, 8), (2, 0, 2, 8), (3, 0, 8)):
        x = torch.randn(shape, requires_grad=True)
        ops.rotary(x, cos, sin).sum().backward()
        assert x.grad.shape == shape


def test_opcheck_and_fullgraph_compile():
    x, (cos, sin) = torch.randn(2, 5, 2, 12, requires_grad=True), tables(7, 4)
    positions = torch.randint(0, 7, (2, 5))
    for arguments in ((x, cos, sin, None, False), (x, cos, sin, positions, True)):
        torch.library.opcheck(torch.ops.pyfast.rotary.default, arguments)
    compiled = torch.compile(
        lambda x: ops.rotary(x, cos, sin, positions=positions).square().sum(), fullgraph=True, backend="aot_eager"
    )
    (grad,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(grad, 2 * x.detach())  # a rotation keeps lengths


def test_plain_backend_agrees():
    x, (cos, sin) = torch.randn(2, 5, 2, 12), tables(7, 4)
    positions = torch.randint(0, 7, (2, 5))
    for inverse in (False, True):
        ours = torch.ops.pyfast.rotary(x, cos, sin, positions, inverse)
        torch.testing.assert_close(plain.rotary(x, cos, sin, positions, inverse), ours)
    with pytest.raises(ValueError, match="positions holds 7"):
        plain.rotary(x, cos, sin, positions.fill_(7), False)


COS = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"x": torch.randn(5, 2, 8)}, ValueError, "x has 5 tokens, cos and sin only 4 rows"),
        ({"x": torch.randn(4, 8)}, ValueError, "x has shape"),
        ({"x": torch.randn(4, 2, 7)}, ValueError, "turn 8 channels; x has only 7"),
        ({"x": torch.ones(4, 2, 8, dtype=torch.int64)}, TypeError, "x has dtype"),
        ({"cos": COS.double()}, TypeError, "cos has dtype"),
        ({"x": torch.randn(4, 2, 8).bfloat16(), "cos": COS.bfloat16(), "sin": COS.bfloat16()}, TypeError, "cos has"),
        ({"sin": torch.ones(4, 3)}, ValueError, "sin"),
        ({"cos": COS.clone().requires_grad_()}, ValueError, "require a gradient"),
        ({"positions": torch.tensor([0, 1, 2, 4])}, ValueError, "positions holds 4; .* 4 rows"),
        ({"positions": torch.tensor([0, -1, 2, 3])}, ValueError, "positions holds -1"),
        ({"positions": torch.tensor([0, 1, 2])}, ValueError, "positions has shape"),
        ({"positions": torch.tensor([0.0, 1, 2, 3])}, TypeError, "positions is torch.float32"),
        ({"positions": [0, 1, 2, 3]}, TypeError, "positions is list"),
    ],
)
def test_bad_arguments_are_named(arguments, error, words):
    arguments = {"x": torch.randn(4, 2, 8), "cos": COS, "sin": COS, **arguments}
    with pytest.raises(error, match=words):
        ops.rotary(**arguments)
