"""ops.adamw_ against torch.optim.AdamW."""

from __future__ import annotations

import pytest
import torch

from pyfast import ops
from pyfast.kernels import plain, stochastic

SETTINGS = {"learning_rate": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def gradients(size: int, steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(steps)]


def torch_adamw(param: torch.Tensor, grads: list[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    param = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW([param], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    for grad in grads:
        param.grad = grad.to(param.dtype) * scale
        optimizer.step()
    return param.detach()


def our_adamw(param, grads, *, master=None, scale=1.0, first_step=1, state=None):
    wide = torch.float64 if param.dtype == torch.float64 else torch.float32
    exp_avg, exp_avg_sq = state or (torch.zeros(param.shape, dtype=wide), torch.zeros(param.shape, dtype=wide))
    for step, grad in enumerate(grads, first_step):
        ops.adamw_(param, grad, exp_avg, exp_avg_sq, step=step, master=master, grad_scale=scale, **SETTINGS)
    return exp_avg, exp_avg_sq


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 5e-7)], ids=str)
@pytest.mark.parametrize("size", [1, 5, 37, 1000])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_equals_torch_adamw(size, dtype, tolerance, scale):
    torch.manual_seed(0)
    start, grads = torch.randn(size, dtype=dtype), gradients(size, 6, dtype)
    param = start.clone()
    our_adamw(param, grads, scale=scale)
    exact = torch_adamw(start.double(), grads, scale)
    torch.testing.assert_close(param, torch_adamw(start, grads, scale), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(param.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grad_dtype", ["float32", "param"])
def test_half_param_with_a_master_is_the_float32_run_rounded(dtype, grad_dtype):
    start = torch.randn(1003)
    grads = gradients(1003, 5, torch.float32 if grad_dtype == "float32" else dtype)
    param, master = start.to(dtype), start.clone()
    state = our_adamw(param, grads, master=master)
    param32 = start.clone()
    state32 = our_adamw(param32, [grad.float() for grad in grads])
    assert torch.equal(master, param32) and torch.equal(param, param32.to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(state, state32, strict=True))


def test_half_param_without_a_master_is_rounded_every_step():
    start, grads = torch.randn(301).bfloat16(), gradients(301, 3, torch.float32)
    param, emulated = start.clone(), start.clone()
    our_adamw(param, grads)
    state = None
    for step, grad in enumerate(grads, 1):
        wide = emulated.float()
        state = our_adamw(wide, [grad], first_step=step, state=state)
        emulated = wide.bfloat16()
    assert torch.equal(param, emulated)


def test_float64_param_takes_float32_gradients():
    start, grads = torch.randn(77, dtype=torch.float64), gradients(77, 3, torch.float32)
    param = start.clone()
    our_adamw(param, grads)
    torch.testing.assert_close(param, torch_adamw(start, grads), rtol=1e-14, atol=1e-14)


def test_neither_threads_nor_cuts_change_a_bit():
    size = 100_003
    start, grads = torch.randn(size), gradients(size, 2, torch.float32)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        param = start.clone()
        results.append((param, *our_adamw(param, grads)))
    torch.set_num_threads(threads)
    cut = start.clone()
    state = torch.zeros(size), torch.zeros(size)
    for begin, end in ((0, 1), (1, 18), (18, 18), (18, 5019), (5019, size)):
        piece = slice(begin, end)
        our_adamw(cut[piece], [grad[piece] for grad in grads], state=tuple(s[piece] for s in state))
    for result in (*results[1:], (cut, *state)):
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_zero_learning_rate_moves_no_weight():
    param = torch.randn(50)
    before = param.clone()
    ops.adamw_(param, torch.randn(50), torch.zeros(50), torch.zeros(50), step=1, learning_rate=0.0, weight_decay=0.5)
    assert torch.equal(param, before)


def test_a_zero_gradient_is_no_division_by_zero():
    param, exp_avg, exp_avg_sq = torch.ones(20), torch.zeros(20), torch.zeros(20)
    ops.adamw_(param, torch.zeros(20), exp_avg, exp_avg_sq, step=1, learning_rate=0.1)
    assert torch.equal(param, torch.ones(20)) and not exp_avg.any() and not exp_avg_sq.any()


def test_late_steps_have_the_right_bias_correction():
    """float32 powers of beta drift; ours are float64."""
    start, (grad,) = torch.randn(64, dtype=torch.float64), gradients(64, 1, torch.float64)
    for step in (1, 10, 1000, 100_000):
        exp_avg, exp_avg_sq = torch.randn(64).double(), torch.rand(64).double()
        parameter = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([parameter], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step - 1)), "exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone()
        }  # fmt: skip
        parameter.grad = grad
        optimizer.step()
        param32 = start.float()
        moments = exp_avg.float(), exp_avg_sq.float()
        ops.adamw_(param32, grad.float(), *moments, step=step, **SETTINGS)
        torch.testing.assert_close(param32.double(), parameter.detach(), rtol=3e-7, atol=3e-7)


def test_empty():
    ops.adamw_(*(torch.zeros(0) for _ in range(4)), step=1, learning_rate=0.1)


def test_a_leaf_that_requires_grad_is_updated_and_its_graph_notices():
    param = torch.randn(10, requires_grad=True)
    loss = param.square().sum()
    ops.adamw_(param, torch.ones(10), torch.zeros(10), torch.zeros(10), step=1, learning_rate=0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_opcheck_and_fullgraph_compile():
    def arguments(dtype):
        master = None if dtype == torch.float32 else torch.zeros(40)
        numbers = (2, 0.1, 0.9, 0.95, 1e-8, 0.1, 1.0)
        return torch.ones(40, dtype=dtype), torch.randn(40), torch.randn(40), torch.rand(40), master, *numbers

    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(torch.ops.pyfast.adamw_.default, arguments(dtype))

    def step(param, grad, exp_avg, exp_avg_sq):
        ops.adamw_(param, grad, exp_avg, exp_avg_sq, step=3, **SETTINGS)
        return param.sum()

    tensors = torch.randn(40), torch.randn(40), torch.randn(40), torch.rand(40)
    expected = [t.clone() for t in tensors]
    step(*expected)
    torch.compile(step, fullgraph=True, backend="aot_eager")(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def test_plain_backend_agrees():
    ours = torch.randn(40).bfloat16(), torch.randn(40), torch.randn(40), torch.rand(40), torch.randn(40)
    theirs = [t.clone() for t in ours]
    numbers = (2, 0.1, 0.9, 0.95, 1e-8, 0.1, 0.5)
    torch.ops.pyfast.adamw_(*ours, *numbers)
    plain.adamw_(*theirs, *numbers)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"param": torch.ones(4, dtype=torch.int64)}, TypeError, "param has dtype"),
        ({"param": torch.ones(4, 2).t(), "grad": torch.ones(2, 4)}, ValueError, "contiguous|shape"),
        ({"param": torch.ones(8)[::2]}, ValueError, "param has strides"),
        ({"grad": torch.ones(5)}, ValueError, "grad has shape"),
        ({"grad": torch.ones(8)[::2]}, ValueError, "grad has strides"),
        ({"grad": torch.ones(4).bfloat16()}, TypeError, "grad has dtype"),
        ({"exp_avg": torch.ones(4).double()}, TypeError, "exp_avg has dtype"),
        ({"exp_avg_sq": torch.ones(2, 2)}, ValueError, "exp_avg_sq has shape"),
        ({"master": torch.ones(4)}, ValueError, "master is given"),
        ({"param": torch.ones(4).half(), "master": torch.ones(4).half()}, TypeError, "master has dtype"),
        ({"step": 0}, ValueError, "step is 0"),
        ({"step": 1.5}, TypeError, "step is 1.5"),
        ({"learning_rate": -1.0}, ValueError, "learning_rate is -1"),
        ({"learning_rate": float("nan")}, ValueError, "learning_rate is nan"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas is"),
        ({"eps": -1e-8}, ValueError, "eps is"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay is"),
        ({"grad_scale": float("inf")}, ValueError, "grad_scale is inf"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(changes, error, words):
    arguments = {name: torch.ones(4) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    arguments |= {"step": 1, "learning_rate": 0.1, **changes}
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(error, match=words):
        ops.adamw_(**arguments)
    assert all(torch.equal(arguments[name], value) for name, value in before.items())


def moments(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size, dtype=torch.bfloat16)


@pytest.mark.parametrize("first_index", [0, 2**32 - 700, 2**40 + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_moments_are_the_references_roundings(dtype, first_index):
    """From zero moments (1 - beta) g and (1 - beta) g^2 are exact enough to be the same in both: so are the bits."""
    param = torch.randn(1003).to(dtype)
    master = param.float() if dtype != torch.float32 else None
    grad = torch.randn(1003)
    ours = [None if x is None else x.clone() for x in (param, grad, *moments(1003), master)]
    theirs = [None if x is None else x.clone() for x in (param, grad, *moments(1003), master)]
    numbers = (1, 0.1, 0.9, 0.95, 1e-8, 0.1, 1.0, 77, first_index)
    torch.ops.pyfast.adamw_(*ours, *numbers)
    plain.adamw_(*theirs, *numbers)
    for a, b in zip(ours[2:4], theirs[2:4], strict=True):
        assert (a != b).sum() <= 2  # where the last float32 bit decides
        torch.testing.assert_close(a, b, rtol=2**-7, atol=0)
    torch.testing.assert_close(ours[0], theirs[0])
    nearest = ((grad * (1.0 - 0.9)).bfloat16() != ours[2]).float().mean()
    assert 0.2 < nearest < 0.3  # between two neighbours, uniformly: a quarter goes to the farther one


def test_stochastic_rounding_keeps_the_mean_and_what_is_exact():
    size = 1 << 16
    exact = torch.tensor([1.0, -0.5, 0.0, 2.0**-126, float("inf"), float("-inf")]).repeat(50)
    bits = stochastic.random_bits(1, 1, torch.arange(exact.numel()))
    assert torch.equal(stochastic.round_randomly(exact, bits).float(), exact)
    assert stochastic.round_randomly(torch.full((9,), float("nan")), bits[:9]).isnan().all()
    for value in (1.0 + 2.0**-9, -3.0001, 1e-30):
        rounded = stochastic.round_randomly(
            torch.full((size,), value), stochastic.random_bits(3, 7, torch.arange(5, 5 + size))
        ).double()
        assert 1 < rounded.unique().numel() <= 2
        step = (rounded.max() - rounded.min()).item()
        assert abs(rounded.mean().item() - value) < 4 * step / 2 / size**0.5


def test_random_bits_are_even_and_independent():
    size = 1 << 16
    index = torch.arange(size)
    draws = [stochastic.random_bits(seed, step, index) for seed, step in ((0, 1), (0, 2), (1, 1))]
    draws.append(stochastic.random_bits(0, 1, index + 2**32))
    for bits in draws:
        ones = torch.stack([(bits >> place & 1).double().mean() for place in range(32)])
        assert (ones - 0.5).abs().max() < 5 * 0.5 / size**0.5
    signs = torch.stack([(bits >> place & 1).double() * 2 - 1 for bits in draws for place in (0, 7, 15, 16, 31)])
    correlation = signs @ signs.T / size
    assert (correlation - torch.eye(20, dtype=torch.float64)).abs().max() < 5 / size**0.5
    neighbours = (signs[:, 1:] * signs[:, :-1]).mean(1)
    assert neighbours.abs().max() < 5 / size**0.5


def test_bfloat16_moments_do_not_depend_on_threads_or_cuts():
    size = 40_003
    start, grads = torch.randn(size), gradients(size, 3, torch.float32)

    def run(cuts, threads):
        torch.set_num_threads(threads)
        param, (m, v) = start.clone(), moments(size)
        for step, grad in enumerate(grads, 1):
            for a, b in zip(cuts, cuts[1:], strict=False):
                ops.adamw_(
                    param[a:b], grad[a:b], m[a:b], v[a:b], step=step, learning_rate=0.1, seed=3, first_index=a
                )  # fmt: skip
        return param, m, v

    threads = torch.get_num_threads()
    try:
        whole = run([0, size], 1)
        for other in (run([0, size], 2), run([0, 17, 9_999, 20_001, size], 1)):
            assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))
    finally:
        torch.set_num_threads(threads)
    again = moments(size)
    ops.adamw_(start.clone(), grads[0], *again, step=1, learning_rate=0.1, seed=4)
    other = moments(size)
    ops.adamw_(start.clone(), grads[0], *other, step=1, learning_rate=0.1, seed=3)
    assert not torch.equal(again[0], other[0])


def test_places_number_the_values():
    """Runs of a few values and of many, in a stretch that begins and ends within one, are the reference's bits."""
    runs = torch.tensor([[0, 7], [3, 2**40], [20, 2**32 - 5], [21, 5000], [900, 2**61], [1003, 0], [4000, 1]])
    size, first = 1100, 11
    grad = torch.randn(size)
    ours, theirs = (torch.zeros(size), *moments(size)), (torch.zeros(size), *moments(size))
    ops.adamw_(ours[0], grad, *ours[1:], step=1, learning_rate=0.1, seed=3, first_index=first, places=runs)
    plain.adamw_(theirs[0], grad, *theirs[1:], None, 1, 0.1, 0.9, 0.95, 1e-8, 0.0, 1.0, 3, first, runs)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert (a != b).sum() <= 2  # where the last float32 bit decides
    position = torch.arange(first, first + size)
    by_hand = [runs[runs[:, 0] <= p][-1] for p in position.tolist()]
    expected = torch.stack([p - start + index for p, (start, index) in zip(position, by_hand, strict=True)])
    assert torch.equal(stochastic.indices(first, size, runs), expected)
    cut = (torch.zeros(size), *moments(size))
    for a, b in ((0, 5), (5, 700), (700, size)):
        part = [x[a:b] for x in (cut[0], grad, *cut[1:])]
        ops.adamw_(*part, step=1, learning_rate=0.1, seed=3, first_index=first + a, places=runs)
    assert all(torch.equal(a, b) for a, b in zip(ours, cut, strict=True))


@pytest.mark.parametrize(
    ("places", "error", "text"),
    [
        (torch.zeros(1, 2), TypeError, "places is torch.float32"),
        (torch.zeros(2, dtype=torch.int64), ValueError, r"places has shape \(2,\)"),
        (torch.zeros(0, 2, dtype=torch.int64), ValueError, "places must start at 0"),
        (torch.tensor([[1, 0]]), ValueError, "places must start at 0"),
        (torch.tensor([[0, 0], [0, 5]]), ValueError, "places must start at 0"),
        (torch.tensor([[0, -1]]), ValueError, "places must start at 0"),
    ],
)
def test_wrong_places_are_refused(places, error, text):
    with pytest.raises(error, match=text):
        ops.adamw_(torch.ones(4), torch.ones(4), *moments(4), step=1, learning_rate=0.1, places=places)


def test_bfloat16_moments_follow_the_float32_ones_where_rounding_to_nearest_stands_still():
    """With beta2 = 0.999 a step changes v by less than half a bfloat16 step: rounded to nearest it would never move."""
    size, steps = 4096, 400
    param, (m, v) = torch.zeros(size), moments(size)
    generator = torch.Generator().manual_seed(0)
    exact_v, nearest_v = torch.zeros(size), torch.zeros(size, dtype=torch.bfloat16)
    for step in range(1, steps + 1):
        grad = torch.randn(size, generator=generator) * (1 if step < 50 else 3)
        ops.adamw_(param, grad, m, v, step=step, learning_rate=0.0, betas=(0.9, 0.999))
        exact_v = exact_v * 0.999 + 0.001 * grad.square()
        nearest_v = (nearest_v.float() * 0.999 + 0.001 * grad.square()).bfloat16()
    bias = v.double().mean() / exact_v.double().mean() - 1
    assert abs(bias) < 2e-3
    assert abs(nearest_v.double().mean() / exact_v.double().mean() - 1) > 5 * abs(bias)


def test_bfloat16_moments_are_checked():
    arguments = {"step": 1, "learning_rate": 0.1}
    with pytest.raises(TypeError, match="exp_avg has dtype torch.bfloat16"):
        ops.adamw_(torch.ones(4).double(), torch.ones(4).double(), *moments(4), **arguments)
    with pytest.raises(TypeError, match="exp_avg_sq has dtype torch.float32"):
        ops.adamw_(torch.ones(4), torch.ones(4), moments(4)[0], torch.ones(4), **arguments)
    with pytest.raises(ValueError, match="first_index is -1"):
        ops.adamw_(torch.ones(4), torch.ones(4), *moments(4), first_index=-1, **arguments)
    torch.library.opcheck(
        torch.ops.pyfast.adamw_.default,
        (
            torch.ones(40),
            torch.randn(40),
            *moments(40),
            None,
            2,
            0.1,
            0.9,
            0.95,
            1e-8,
            0.1,
            1.0,
            5,
            6,
            torch.tensor([[0, 9]]),
        ),
    )
