"""The forward whose warps are specialized: its results in the interpreter, and that the compiler does specialize it."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from pyfast.kernels import reference  # noqa: E402
from pyfast.kernels.triton.attention_config import SPECIALIZED, Tiles  # noqa: E402
from pyfast.kernels.triton.attention_specialized import attention_forward_specialized, unsuitable  # noqa: E402

TILES = Tiles(32, 32, 32, 4, 2)


def inputs(dtype=torch.bfloat16, *, batch=2, Sq=64, Sk=64, N=2, Nk=1, D=64):
    return tuple(torch.randn(batch, s, n, D).to(dtype) for s, n in ((Sq, N), (Sk, Nk), (Sk, Nk)))


def close(actual, expected, tolerance):
    error = (actual.double() - expected).norm() / expected.norm()
    assert error <= tolerance, f"{error:.2e}"


@pytest.mark.triton_interpreter
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "shape, softcap, sinks",
    [
        ({}, 0.0, False),
        ({"Sq": 50, "N": 3}, 0.0, True),  # a last tile that is short, and next to another sequence
        ({"Sq": 1, "Sk": 96, "N": 1}, 0.0, False),
        ({"Sq": 40, "Sk": 96, "N": 4, "Nk": 2, "D": 128}, 3.0, True),
    ],
)
def test_results(shape, softcap, sinks, causal):
    q, k, v = inputs(**shape)
    sink = torch.randn(q.shape[2]) if sinks else None
    out, lse = attention_forward_specialized(q, k, v, sink, causal, 0.2, softcap, tiles=TILES)
    want, want_lse = reference.attention(
        q.double(), k.double(), v.double(), causal=causal, scale=0.2, softcap=softcap,
        sinks=None if sink is None else sink.double(),
    )  # fmt: skip
    close(out, want, 4e-3)
    close(lse, want_lse, 1e-6)


@pytest.mark.triton_interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_another_sequence_never_leaks():
    q, k, v = inputs(torch.float16, Sq=50)
    clean = attention_forward_specialized(q, k, v, None, True, 0.2, 0.0, tiles=TILES)
    for x in (q, k, v):
        x[1] = math.nan
    dirty = attention_forward_specialized(q, k, v, None, True, 0.2, 0.0, tiles=TILES)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(clean, dirty, strict=True))


@pytest.mark.triton_interpreter
@pytest.mark.parametrize(
    "shape, causal, words",
    [
        ({"dtype": torch.float32}, True, "q is torch.float32"),
        ({"D": 96}, True, "head sizes are 96 and 96"),
        ({"Sk": 200}, False, "a multiple of 128"),
        ({"Sk": 0}, False, "neither may be empty"),
        ({"Sq": 129, "Sk": 128}, True, "some queries see nothing"),
    ],
)
def test_what_it_does_not_take_is_refused(shape, causal, words):
    with pytest.raises(ValueError, match=words):
        attention_forward_specialized(*inputs(**shape), None, causal, 0.2, 0.0)


@pytest.mark.triton_compile
@pytest.mark.parametrize("D", sorted(SPECIALIZED))
@pytest.mark.parametrize("causal, softcap, sinks", [(True, 0.0, False), (False, 0.0, False), (True, 9.0, True)])
def test_the_compiler_specializes_its_warps(D, causal, softcap, sinks):
    from support.triton_compile import compile_launches

    q, k, v = inputs(Sq=256, Sk=256, N=4, Nk=2, D=D)
    sink = torch.empty(4) if sinks else None
    (result,) = compile_launches(
        90, lambda: attention_forward_specialized(q, k, v, sink, causal, 0.1, softcap)
    )  # fmt: skip
    result.check(tma=True, warp_specialized=True)


@pytest.mark.triton_compile
def test_sizes_of_one_are_specialized_too():
    from support.triton_compile import compile_launches

    q, k, v = inputs(batch=1, Sq=1, Sk=128, N=1)
    (result,) = compile_launches(90, lambda: attention_forward_specialized(q, k, v, None, True, 0.1, 0.0))
    result.check(tma=True, warp_specialized=True)


@pytest.mark.triton_compile
def test_it_is_for_hopper():
    from support.triton_compile import absent_gpu

    with absent_gpu(100):
        assert "is for sm_90" in unsuitable(*inputs(Sq=128, Sk=128), True)
