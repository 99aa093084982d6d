"""The routes of a call (pyfast/ops/dispatch.py): whichever is taken, no gradient is lost and no mode is passed by."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from pyfast import ops


class Names(TorchDispatchMode):
    """Collects the names of the ops it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_op():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    with Names() as names:
        ops.rms_norm(x, weight).sum().backward()
    assert "pyfast.rms_norm.default" in names.seen and "pyfast.rms_norm_backward.default" in names.seen


@pytest.mark.parametrize("which", [0, 1])
def test_one_argument_that_needs_a_gradient_is_enough(which):
    arguments = [torch.randn(3, 8), torch.randn(8)]
    arguments[which].requires_grad_()
    assert ops.rms_norm(*arguments).requires_grad
    with torch.no_grad():
        assert not ops.rms_norm(*arguments).requires_grad
    with torch.inference_mode():
        ops.rms_norm(*arguments)


OPS = {
    "rms_norm": lambda x: ops.rms_norm(x, torch.ones(8)),
    "rotary": lambda x: ops.rotary(x.view(4, 2, 8), torch.ones(4, 3), torch.ones(4, 3)),
    "swiglu": ops.swiglu,
    "attention": lambda x: ops.attention(*[x.view(1, 4, 2, 8)] * 3),
    "linear_cross_entropy": lambda x: ops.linear_cross_entropy(x, torch.ones(9, 8), torch.arange(8)),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    "derivative",
    [
        lambda f, x: torch.func.grad(f)(x),
        lambda f, x: torch.func.jacrev(f)(x),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.func.linearize(f, x)[1](x),
        lambda f, x: torch.func.vmap(torch.func.grad(f))(x[None]),
        lambda f, x: torch.func.grad(lambda x: torch.func.vmap(f)(x[None]).sum())(x),
    ],
    ids=["grad", "jacrev", "jvp", "jacfwd", "linearize", "vmap of grad", "grad of vmap"],
)
@pytest.mark.filterwarnings("ignore")  # torch warns that it loops over the batch
def test_functional_derivatives_are_refused_not_zero(name, derivative):
    with pytest.raises(NotImplementedError, match=f"pyfast.{name}.*not supported yet"):
        derivative(lambda x: OPS[name](x).sum(), torch.randn(8, 8))


@pytest.mark.parametrize("name", OPS)
def test_lazy_negations_are_seen(name):
    """The imaginary part of a conjugate is a view with a sign of its own, which no address tells."""
    x = torch.randn(8, 8)
    lazy = torch._neg_view(x).requires_grad_()
    plain = (-x).requires_grad_()
    results = [OPS[name](leaf) for leaf in (lazy, plain)]
    assert torch.equal(*results)
    gradient = torch.randn(results[0].shape)
    lazy_gradient = torch.autograd.grad(results[0], lazy, torch._neg_view(gradient))
    assert torch.equal(*lazy_gradient, *torch.autograd.grad(results[1], plain, -gradient))


def test_a_lazy_negation_is_not_updated_with_the_wrong_sign():
    w, m, v = torch.ones(8), torch.zeros(8), torch.zeros(8)
    with pytest.raises(ValueError, match="resolve_neg"):
        ops.adamw_(torch._neg_view(w), torch.ones(8), m, v, step=1, learning_rate=0.1)
    ops.adamw_(w, torch._neg_view(torch.full((8,), -1.0)), m, v, step=1, learning_rate=0.1)
    torch.testing.assert_close(w, torch.full((8,), 0.9))


@pytest.mark.parametrize("name", OPS)
def test_meta_tensors_give_shapes(name):
    x = torch.randn(8, 8, requires_grad=True)
    expected = OPS[name](x)
    with torch.device("meta"):
        meta = torch.empty(8, 8, requires_grad=True)
        actual = OPS[name](meta)
    actual.sum().backward()
    assert actual.is_meta and (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert meta.grad.shape == meta.shape


@pytest.mark.parametrize("name", OPS | {"linear": None})
def test_export_keeps_a_dynamic_number_of_rows(name):
    functions = OPS | {
        "rotary": lambda x: ops.rotary(x.unsqueeze(1), torch.ones(60, 3), torch.ones(60, 3)),
        "attention": lambda x: ops.attention(*[x.view(1, -1, 2, 4)] * 3, causal=True),
        "linear": lambda x: ops.linear(x, torch.ones(5, 8)),
        "linear_cross_entropy": lambda x: ops.linear_cross_entropy(x, torch.ones(9, 8), 0 * x[:, 0].long()),
    }

    class Module(torch.nn.Module):
        def forward(self, x):
            return functions[name](x)

    shapes = ({0: torch.export.Dim("rows", min=2, max=50)},)
    exported = torch.export.export(Module(), (torch.randn(20, 8),), dynamic_shapes=shapes).module()
    x = torch.randn(7, 8)
    torch.testing.assert_close(exported(x), functions[name](x))


def test_meta_documents_give_shapes():
    q = torch.empty(9, 2, 8, device="meta", requires_grad=True)
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    out, lse = ops.attention(q, q, q, causal=True, cu_seqlens_q=starts, return_lse=True)
    out.sum().backward()
    assert out.shape == q.shape == q.grad.shape and lse.shape == (2, 9)


def test_forward_mode_is_refused_not_ignored():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(3, 8), torch.randn(3, 8))
        with pytest.raises((RuntimeError, NotImplementedError)):
            ops.rms_norm(x, torch.randn(8))


@pytest.mark.filterwarnings("ignore")  # torch warns that it loops over the batch
def test_vmap():
    x, weight = torch.randn(4, 3, 8), torch.randn(8)
    torch.testing.assert_close(torch.func.vmap(lambda x: ops.rms_norm(x, weight))(x), ops.rms_norm(x, weight))


def test_second_derivatives_are_refused_not_lost():
    x = torch.randn(3, 8, requires_grad=True)
    loss = ops.swiglu(x).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    penalised = loss + gradient.square().sum()
    with pytest.raises(NotImplementedError, match="second derivatives of swiglu .* leave create_graph=False"):
        penalised.backward()


def test_every_refusal_of_a_second_derivative_says_what_to_do():
    """Backward ops are those that no user calls: torch's words about formulas to register help nobody."""
    refusing = [name for name in dir(torch.ops.pyfast) if name.endswith("_backward")]
    assert {"attention_backward", "moe_mlp_backward", "grouped_gemm_backward", "rms_norm_backward"} <= set(refusing)
    for leaf, call in (
        (torch.randn(1, 4, 2, 8, requires_grad=True), lambda q: ops.attention(q, q.detach(), q.detach())),
        (torch.randn(4, 8, requires_grad=True), lambda x: ops.grouped_gemm(x, x.detach()[None], torch.tensor([0, 4]))),
    ):
        (gradient,) = torch.autograd.grad(call(leaf).square().sum(), leaf, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives of (attention|grouped_gemm) are not"):
            gradient.sum().backward()


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_second_derivatives_of_a_loss_with_gradients_in_its_forward_are_refused(reduction):
    h = torch.randn(4, 8, requires_grad=True)
    loss = ops.linear_cross_entropy(h, torch.randn(9, 8), torch.arange(4), reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="second derivatives of linear_cross_entropy.*not supported yet"):
        (gradient,) = torch.autograd.grad(loss, h, create_graph=True)
        (loss + gradient.square().sum()).backward()


def test_second_derivative_of_a_linear_op():
    """Rotary is its own gradient, so it has all derivatives: d/dy of <dx, u> is the rotation of u."""
    x, y_grad, u = (torch.randn(5, 2, 8, requires_grad=True) for _ in range(3))
    angle = torch.randn(5, 4)
    (gradient,) = torch.autograd.grad(ops.rotary(x, angle.cos(), angle.sin()), x, y_grad, create_graph=True)
    (second,) = torch.autograd.grad(gradient, y_grad, u)
    torch.testing.assert_close(second, ops.rotary(u, angle.cos(), angle.sin()))


def test_a_tensor_subclass_takes_the_dispatcher():
    class Tagged(torch.Tensor):
        pass

    x = torch.randn(3, 8)
    result = ops.rms_norm(x.as_subclass(Tagged), torch.ones(8))
    assert isinstance(result, Tagged)
    assert torch.equal(torch.Tensor(result), ops.rms_norm(x, torch.ones(8)))
