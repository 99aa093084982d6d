"""ops.moe_mlp against one dense float64 SwiGLU a slot, by torch's own functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pyfast import ops
from pyfast.kernels import cpu, plain, reference_moe
from pyfast.ops.row_map import row_map

TOLERANCE = {torch.float32: 1.5e-6, torch.float64: 1e-14, torch.bfloat16: 4e-3, torch.float16: 6e-4}
NAMES = ("y", "dx", "dweights", "dw_gate_up", "dw_down")


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300)).item()


def random_problem(tokens, top_k, experts, width, ffn, dtype=torch.float32, dropped=0.2, seed=0):
    """(x, experts, weights, w_gate_up, w_down), dy. The last expert gets no token; some slots are dropped."""
    torch.manual_seed(seed)
    chosen = torch.randint(0, max(1, experts - 1), (tokens, top_k))
    chosen[torch.rand(tokens, top_k) < dropped] = -1
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weights = torch.rand(tokens, top_k, dtype=wide_dtype(dtype), requires_grad=True)
    w_gate_up = (torch.randn(experts, 2 * ffn, width, dtype=torch.float64) / max(1, width) ** 0.5).to(dtype)
    w_down = (torch.randn(experts, width, ffn, dtype=torch.float64) / max(1, ffn) ** 0.5).to(dtype)
    leaves = (x, chosen, weights, w_gate_up.requires_grad_(), w_down.requires_grad_())
    return leaves, torch.randn(tokens, width, dtype=dtype)


def expected(x, experts, weights, w_gate_up, w_down, dy) -> tuple[torch.Tensor, ...]:
    """(y, dx, dweights, dw_gate_up, dw_down), a loop over experts and slots in float64."""
    x, weights, w_gate_up, w_down = (t.detach().double().requires_grad_() for t in (x, weights, w_gate_up, w_down))
    y = torch.zeros_like(x)
    for e in range(w_gate_up.shape[0]):
        for k in range(experts.shape[1]):
            token = torch.nonzero(experts[:, k] == e).flatten()
            gate, up = F.linear(x[token], w_gate_up[e]).chunk(2, -1)
            y = y.index_add(0, token, F.linear(F.silu(gate) * up, w_down[e]) * weights[token, k].unsqueeze(1))
    leaves = (x, weights, w_gate_up, w_down)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.double(), materialize_grads=True)


def run(arguments, dy, **options) -> tuple[torch.Tensor, ...]:
    """What `expected` gives, by the op."""
    y = ops.moe_mlp(*arguments, **options)
    x, _, *rest = arguments
    return y.detach(), *torch.autograd.grad(y, (x, *rest), dy, retain_graph=True)


def assert_close(actual, wanted, tolerance) -> None:
    for name, got, want in zip(NAMES[: len(wanted)], actual, wanted, strict=True):
        assert got.shape == want.shape, name
        assert relative_error(got, want) < tolerance, f"{name}: {relative_error(got, want):.2e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize(
    "sizes", [(17, 2, 4, 15, 31), (1, 1, 1, 1, 1), (300, 3, 4, 140, 77), (70, 4, 3, 33, 420)], ids=str
)
def test_equals_dense_experts_in_float64(sizes, recompute, dtype):
    arguments, dy = random_problem(*sizes, dtype, dropped=0.0 if sizes[0] == 1 else 0.2)
    actual = run(arguments, dy, recompute=recompute)
    assert_close(actual, expected(*arguments, dy), TOLERANCE[dtype])
    assert [t.dtype for t in actual] == [dtype, dtype, wide_dtype(dtype), dtype, dtype]


def test_reference_agrees():
    arguments, dy = random_problem(17, 3, 4, 15, 31, torch.float64)
    y = reference_moe.moe_mlp(*arguments)
    x, _, *rest = arguments
    assert_close((y, *torch.autograd.grad(y, (x, *rest), dy)), expected(*arguments, dy), 1e-14)


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 19), top_k=st.integers(1, 3), experts=st.integers(1, 4), width=st.integers(1, 4),
    ffn=st.integers(1, 4), dropped=st.sampled_from([0.0, 0.3, 1.0]), recompute=st.booleans(),
    crowd=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_gradcheck_runs_the_real_kernel(tokens, top_k, experts, width, ffn, dropped, recompute, crowd, seed):
    (x, chosen, weights, *matrices), _ = random_problem(
        tokens, top_k, experts, width, ffn, torch.float64, dropped, seed
    )
    if crowd:  # nearly all rows with one expert, and twice in a token
        chosen[chosen >= 0] = experts - 1
    torch.autograd.gradcheck(
        lambda x, *rest: ops.moe_mlp(x, chosen, *rest, recompute=recompute), (x, weights, *matrices), fast_mode=True
    )


def test_dropped_slots_give_nothing_and_have_no_gradient():
    (x, chosen, *rest), dy = random_problem(40, 3, 4, 33, 21)
    with torch.no_grad():
        chosen[5] = -1
        x[5] = float("nan")  # nobody reads a token without experts
        dy[5] = float("nan")
    y, dx, dweights, *_ = run((x, chosen, *rest), dy)
    assert torch.equal(y[5], torch.zeros(33)) and torch.equal(dx[5], torch.zeros(33))
    assert torch.equal(dweights[chosen == -1], torch.zeros(int((chosen == -1).sum())))
    assert all(t.isfinite().all() for t in (y, dx, dweights))
    everything = run((x, torch.full_like(chosen, -1), *rest), dy)
    assert all(torch.equal(t, torch.zeros_like(t)) for t in everything)


def test_a_weight_of_exactly_zero_has_its_gradient():
    (x, chosen, weights, *rest), dy = random_problem(40, 3, 4, 33, 21)
    with torch.no_grad():
        weights[::2] = 0
    arguments = (x, chosen, weights, *rest)
    actual, wanted = run(arguments, dy), expected(*arguments, dy)
    assert_close(actual, wanted, 1.5e-6)
    assert relative_error(actual[2][::2], wanted[2][::2]) < 1.5e-6 and wanted[2][::2].norm() > 1


def test_an_expert_twice_in_a_token_counts_twice():
    (x, chosen, *rest), dy = random_problem(40, 3, 4, 33, 21, dropped=0.0)
    chosen[:, 2] = chosen[:, 0]
    assert_close(run((x, chosen, *rest), dy), expected(x, chosen, *rest, dy), 1.5e-6)


def test_an_expert_without_tokens_has_a_gradient_of_exactly_zero():
    arguments, dy = random_problem(40, 2, 5, 33, 21)
    for _ in range(2):
        *_, dw_gate_up, dw_down = run(arguments, dy)
        assert torch.equal(dw_gate_up[4], torch.zeros(42, 33)) and torch.equal(dw_down[4], torch.zeros(33, 21))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("later", [False, True], ids=["now", "deferred"])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_main_grads_are_added_to(recompute, later, dtype):
    arguments, dy = random_problem(90, 2, 5, 33, 21, dtype)
    x, _, weights, *matrices = arguments
    main_grads = tuple(torch.full(w.shape, 7.0, dtype=wide_dtype(dtype)) for w in matrices)
    closures, versions = [], [g._version for g in main_grads]
    y = ops.moe_mlp(*arguments, main_grads=main_grads, defer=closures.append if later else None, recompute=recompute)
    y.backward(dy)
    assert all(w.grad is None for w in matrices)
    if later:
        assert all(torch.equal(g, torch.full_like(g, 7.0)) for g in main_grads) and len(closures) == 1
        closures[0]()
    assert all(g._version > v for g, v in zip(main_grads, versions, strict=True))
    wanted = expected(*arguments, dy)
    tolerance = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 6e-4, torch.bfloat16: 3e-3}[dtype]
    assert_close((y, x.grad, weights.grad), wanted[:3], max(tolerance, TOLERANCE[dtype]))
    for main_grad, want in zip(main_grads, wanted[3:], strict=True):
        assert relative_error(main_grad.double() - 7, want) < tolerance
        assert torch.equal(main_grad[4], torch.full_like(main_grad[4], 7.0)) and not main_grad.requires_grad


def test_deferring_changes_no_bit():
    arguments, dy = random_problem(90, 2, 5, 33, 21)
    closures, sums = [], []
    for defer in (None, closures.append):
        main_grads = tuple(torch.ones(w.shape) for w in arguments[3:])
        for _ in range(2):
            ops.moe_mlp(*arguments, main_grads=main_grads, defer=defer).backward(dy)
        sums.append(main_grads)
    for closure in closures:
        closure()
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 2)], ids=str)
def test_only_the_gradients_that_are_wanted(wanted):
    (x, chosen, weights, *matrices), dy = random_problem(40, 2, 4, 33, 21)
    leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate((x, weights, *matrices))]
    main_grads = tuple(torch.full(w.shape, 7.0) for w in matrices)
    truth = expected(x, chosen, weights, *matrices, dy)[1:]
    for options in ({}, {"main_grads": main_grads}):
        ops.moe_mlp(leaves[0], chosen, *leaves[1:], **options).backward(dy)
        for index, leaf in enumerate(leaves):
            if index in wanted and not (options and index >= 2):
                assert relative_error(leaf.grad, truth[index]) < 1.5e-6
            else:
                assert leaf.grad is None
            leaf.grad = None
    for index, main_grad in enumerate(main_grads, start=2):
        if index in wanted:
            assert relative_error(main_grad - 7, truth[index]) < 3e-6
        else:
            assert torch.equal(main_grad, torch.full_like(main_grad, 7.0))


def torch_loop(x, experts, weights, w_gate_up, w_down):
    """Unbound experts, as the fastest plain torch does it."""
    y = torch.zeros_like(x)
    for e, (up, down) in enumerate(zip(w_gate_up.unbind(), w_down.unbind(), strict=True)):
        token, slot = torch.where(experts == e)
        gate, up = F.linear(x[token], up).chunk(2, -1)
        row = F.linear(F.silu(gate) * up, down) * weights[token, slot].unsqueeze(1).to(x.dtype)
        y = y.index_add(0, token, row)
    return y


def saved_tensors(function, arguments) -> list[torch.Tensor]:
    """What autograd keeps, each storage once, without the parameters."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function(*arguments)
    parameters = {w.untyped_storage().data_ptr() for w in arguments[3:]}
    by_storage = {t.untyped_storage().data_ptr(): t for t in kept}
    return [t for address, t in by_storage.items() if address not in parameters]


def size_of(tensors) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_kept_for_backward(dtype):
    tokens, top_k, experts, width, ffn = 512, 2, 8, 128, 256
    arguments, _ = random_problem(tokens, top_k, experts, width, ffn, dtype, dropped=0.0)
    rows, item = tokens * top_k, arguments[0].element_size()
    x_bytes, maps_bytes, weights_bytes = tokens * width * item, 4 * (3 * rows + experts + 1), 4 * rows
    pre_bytes = rows * 2 * ffn * item
    for main_grads in (None, tuple(torch.zeros(w.shape) for w in arguments[3:])):
        kept = size_of(saved_tensors(lambda *a, m=main_grads: ops.moe_mlp(*a, main_grads=m), arguments))
        assert kept == x_bytes + pre_bytes + maps_bytes + weights_bytes
        assert kept <= 0.45 * size_of(saved_tensors(torch_loop, arguments))
        recomputed = saved_tensors(lambda *a, m=main_grads: ops.moe_mlp(*a, main_grads=m, recompute=True), arguments)
        assert size_of(recomputed) == x_bytes + maps_bytes + weights_bytes


def test_strided_inputs_and_expanded_gradient():
    (x, chosen, weights, w_gate_up, w_down), _ = random_problem(40, 2, 4, 33, 21)

    def laid_out(tensor, *order):  # the same values, stored in another order of dimensions
        stored = tensor.detach().permute(order).contiguous()
        return stored.permute(torch.tensor(order).argsort().tolist())

    up, down, p = w_gate_up.detach(), w_down.detach(), weights.detach()
    variants = (
        (laid_out(x, 1, 0), chosen, p, laid_out(up, 0, 2, 1), down),
        (torch.randn(40, 50)[:, 9:42], laid_out(chosen.int(), 1, 0), laid_out(p, 1, 0), up, laid_out(down, 2, 1, 0)),
        (torch.randn(1, 33).expand(40, 33), chosen, p, torch.randn(4, 42, 66)[..., ::2], laid_out(down, 1, 0, 2)),
    )
    for variant in variants:
        variant = tuple(t.requires_grad_() if t.is_floating_point() else t for t in variant)
        for dy in (torch.ones(()).expand(40, 33), torch.randn(33, 40).t(), torch.randn(40, 1).expand(40, 33)):
            assert_close(run(variant, dy), expected(*variant, dy), 1.5e-6)
    x.grad = None
    ops.moe_mlp(x, chosen, weights, w_gate_up, w_down).sum().backward()
    assert relative_error(x.grad, expected(x, chosen, weights, w_gate_up, w_down, torch.ones(40, 33))[1]) < 1.5e-6


@pytest.mark.parametrize("later", [False, True], ids=["now", "deferred"])
def test_main_grads_of_strided_inputs_and_expanded_gradients(later):
    """What has to be copied for the kernels is still there when they read it."""
    (x, *rest), _ = random_problem(400, 2, 4, 33, 21)
    x = x.detach().t().contiguous().t().requires_grad_()
    buffers, closures = (torch.ones(4, 33, 42), torch.ones(4, 21, 33)), []
    main_grads = tuple(buffer.transpose(1, 2) for buffer in buffers)
    for dy in (torch.ones(()).expand(400, 33), torch.randn(33, 400).t()):
        for main_grad in main_grads:
            main_grad.fill_(1.0)
        y = ops.moe_mlp(x, *rest, main_grads=main_grads, defer=closures.append if later else None)
        y.backward(dy)
        while closures:
            closures.pop()()
        for main_grad, want in zip(main_grads, expected(x, *rest, dy)[3:], strict=True):
            assert relative_error(main_grad - 1, want) < 3e-6


def test_offsets_in_a_view_that_pass_two_to_the_31(tmp_path):
    """Tokens of x and dy, experts and main_grads lie more than 2^31 elements apart, in sparse files."""
    stride = 2**30 + 7

    def far(name: str, values: torch.Tensor) -> torch.Tensor:
        size = stride * (values.shape[0] - 1) + values[0].numel()
        memory = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=values.dtype)
        return memory.as_strided(values.shape, (stride, *values.stride()[1:])).copy_(values)

    (x, _, weights, *matrices), dy = random_problem(4, 2, 4, 40, 24, torch.bfloat16)
    chosen = torch.tensor([[0, 3], [2, 0], [3, 3], [-1, 2]])
    near = (x, chosen, weights, *matrices)
    x2, *matrices2 = (far(str(i), t.detach()).requires_grad_() for i, t in enumerate((x, *matrices)))
    dy2, main_grads = far("dy", dy), tuple(far(f"m{i}", torch.ones(w.shape)) for i, w in enumerate(matrices))
    y = ops.moe_mlp(x2, chosen, weights, *matrices2, main_grads=main_grads)
    dx, dweights = torch.autograd.grad(y, (x2, weights), dy2)
    wanted = run(near, dy)
    assert all(torch.equal(a, b) for a, b in zip((y, dx, dweights), wanted[:3], strict=True))
    for main_grad, want in zip(main_grads, wanted[3:], strict=True):
        torch.testing.assert_close(main_grad - 1, want.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_same_bits_for_any_number_of_threads_and_run(recompute, dtype):
    arguments, dy = random_problem(700, 3, 6, 75, 90, dtype)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3, 3):
        torch.set_num_threads(count)
        main_grads = tuple(torch.ones(w.shape) for w in arguments[3:])
        y = ops.moe_mlp(*arguments, main_grads=main_grads)
        torch.autograd.grad(y, (arguments[0], arguments[2]), dy)
        results.append((*run(arguments, dy, recompute=recompute), *main_grads))
    torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_extreme_pre_activations_stay_finite():
    for dtype in (torch.float32, torch.bfloat16):
        (x, *rest), dy = random_problem(40, 2, 4, 33, 21, dtype)
        for scale in (1e-6, 300.0, 1e4):
            scaled = (x.detach() * scale).requires_grad_()
            actual, wanted = run((scaled, *rest), dy), expected(scaled, *rest, dy)
            assert all(t.isfinite().all() for t in actual)
            assert_close(actual, wanted, 2e-5 if dtype == torch.float32 else 6e-3)


def test_router_gradient_of_bfloat16_is_float32():
    """A dot product over F: summed in float32, and from a pre-activation that keeps more than bfloat16's 8 bits."""
    arguments, dy = random_problem(64, 2, 3, 64, 4096, torch.bfloat16)
    wanted = expected(*arguments, dy)
    main_grads = tuple(torch.zeros(w.shape) for w in arguments[3:])
    x, _, weights, *_ = arguments
    ops.moe_mlp(*arguments, main_grads=main_grads).backward(dy)
    assert weights.grad.dtype == torch.float32
    for got, want in zip((weights.grad, *main_grads), wanted[2:], strict=True):
        assert relative_error(got, want) < 2e-3, relative_error(got, want)


def test_a_token_does_not_depend_on_the_tokens_beside_it():
    (x, chosen, weights, *matrices), dy = random_problem(200, 2, 3, 75, 90)
    whole = run((x, chosen, weights, *matrices), dy)
    for low, high in ((0, 1), (7, 60), (100, 200)):
        part = tuple(t[low:high].detach().requires_grad_(t.is_floating_point()) for t in (x, chosen, weights))
        for got, want in zip(run((*part, *matrices), dy[low:high])[:3], whole[:3], strict=True):
            assert torch.equal(got, want[low:high])


def test_nothing_to_do():
    for tokens, width, ffn in ((0, 5, 3), (4, 5, 0), (4, 0, 3)):
        arguments, dy = random_problem(tokens, 2, 3, width, ffn)
        assert all(torch.equal(t, torch.zeros_like(t)) for t in run(arguments, dy))


def test_plain_backend_agrees():
    (x, chosen, weights, *matrices), dy = random_problem(40, 2, 4, 33, 21)
    x, weights, *matrices = (t.detach() for t in (x, weights, *matrices))
    maps = tuple(row_map(chosen, 4)[:4])
    results = []
    for kernel in (plain, cpu):
        y, pre = kernel.moe_mlp_forward(x, maps, weights, *matrices, True)
        for kept_pre in (pre, None):
            dws = [torch.ones_like(w) for w in matrices]
            dx, dp, kept = kernel.moe_mlp_backward(
                dy, x, kept_pre, maps, weights, *matrices, *dws, True, True, True, True
            )
            kernel.moe_mlp_weight_gradients(dy, x, kept, maps, *dws, True)
            results.append((y, dx, dp, *dws))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_autocast_casts_the_products_and_not_the_router():
    arguments, _ = random_problem(40, 2, 4, 33, 21)
    main_grads = tuple(torch.zeros(w.shape) for w in arguments[3:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ops.moe_mlp(*arguments)
        z = ops.moe_mlp(*arguments, main_grads=main_grads)
    assert y.dtype == z.dtype == torch.bfloat16
    x, _, *rest = arguments
    assert {grad.dtype for grad in torch.autograd.grad(y.float().sum(), (x, *rest))} == {torch.float32}
    z.float().sum().backward()
    assert all(g.norm() > 0 for g in main_grads) and arguments[3].grad is None


def test_weights_of_the_inputs_dtype_are_widened():
    (x, chosen, weights, *matrices), dy = random_problem(40, 2, 4, 33, 21, torch.bfloat16)
    half = weights.detach().bfloat16().requires_grad_()
    y = ops.moe_mlp(x, chosen, half, *matrices)
    assert torch.equal(y, ops.moe_mlp(x, chosen, half.float(), *matrices))
    y.backward(dy)
    assert half.grad.dtype == torch.bfloat16


def test_opcheck_and_fullgraph_compile():
    x, chosen, *rest = random_problem(20, 2, 4, 15, 21)[0]
    maps = tuple(row_map(chosen, 4)[:4])
    for recompute in (False, True):
        torch.library.opcheck(torch.ops.pyfast.moe_mlp.default, (x, *maps, *rest, recompute))
        compiled = torch.compile(
            lambda x, *rest, r=recompute: ops.moe_mlp(x, chosen, *rest, recompute=r).square().sum(), fullgraph=True,
            backend="aot_eager",
        )  # fmt: skip
        grads = torch.autograd.grad(compiled(x, *rest), (x, *rest))
        again = torch.autograd.grad(ops.moe_mlp(x, chosen, *rest, recompute=recompute).square().sum(), (x, *rest))
        torch.testing.assert_close(grads, again)


def test_second_derivatives_are_refused():
    arguments, _ = random_problem(20, 2, 4, 15, 21)
    for main_grads in (None, tuple(torch.zeros(w.shape) for w in arguments[3:])):
        y = ops.moe_mlp(*arguments, main_grads=main_grads)
        with pytest.raises((NotImplementedError, RuntimeError)):
            (dx,) = torch.autograd.grad(y.square().sum(), arguments[0], create_graph=True)
            dx.sum().backward()


X, EXPERTS, WEIGHTS = torch.randn(5, 4), torch.zeros(5, 2, dtype=torch.int32), torch.rand(5, 2)
UP, DOWN = torch.randn(3, 12, 4), torch.randn(3, 4, 6)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": X.int()}, TypeError, "x has dtype"),
        ({"x": X.view(1, 5, 4)}, ValueError, "x has shape"),
        ({"w_gate_up": UP.double()}, TypeError, "w_gate_up has dtype"),
        ({"w_gate_up": torch.randn(3, 11, 4)}, ValueError, "w_gate_up has shape"),
        ({"w_gate_up": torch.randn(3, 12, 5)}, ValueError, "w_gate_up has shape"),
        ({"w_down": torch.randn(3, 6, 4)}, ValueError, "w_down has shape"),
        ({"w_down": DOWN.bfloat16()}, TypeError, "w_down has dtype"),
        ({"experts": EXPERTS.float()}, TypeError, "experts is torch.float32"),
        ({"experts": EXPERTS[:4]}, ValueError, "experts has shape"),
        ({"experts": EXPERTS + 3}, ValueError, "experts"),
        ({"experts": EXPERTS - 2}, ValueError, "experts"),
        ({"weights": WEIGHTS[:, :1]}, ValueError, "weights has shape"),
        ({"weights": WEIGHTS.long()}, TypeError, "weights has dtype"),
        ({"main_grads": torch.zeros(3)}, TypeError, "main_grads is"),
        ({"main_grads": (torch.zeros(3, 12, 4), torch.zeros(3, 6, 4))}, ValueError, r"main_grads\[1\] has shape"),
        ({"defer": print}, ValueError, "defer is given without main_grads"),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    arguments = {"x": X, "experts": EXPERTS, "weights": WEIGHTS, "w_gate_up": UP, "w_down": DOWN} | change
    with pytest.raises(error, match=words):
        ops.moe_mlp(**arguments)
