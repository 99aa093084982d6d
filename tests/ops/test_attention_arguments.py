"""What ops.attention refuses: every argument of the wrong kind raises, naming itself, before anything is computed."""

from __future__ import annotations

import fractions
import math

import numpy as np
import pytest
import torch

from pyfast import kernels, ops

Q, K = torch.randn(1, 4, 4, 8), torch.randn(1, 6, 2, 8)
PACKED = (Q[0], K[0], K[0])
CU = torch.tensor([0, 4], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _no_kernel(monkeypatch):
    """The kernels fail when they are called: an error must come before."""

    def compute(*arguments):
        raise AssertionError("computed before the arguments were checked")

    monkeypatch.setattr(kernels.for_device(Q.device), "attention_forward", compute)


def refuse(error: type[Exception], words: str, *tensors, **options) -> None:
    with pytest.raises(error, match=words):
        ops.attention(*(tensors or (Q, K, K)), **options)


@pytest.mark.parametrize("value", ["no", "", 0, 1, None, 1.0, [True], torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("option", ["causal", "return_lse"])
def test_switches_are_true_or_false(option, value):
    refuse(TypeError, f"{option} is .*; True or False is needed", **{option: value})


@pytest.mark.parametrize("value", ["0.5", "", True, [0.5], 1j, torch.tensor(0.5), np.array([0.5]), object()], ids=repr)
@pytest.mark.parametrize("option", ["scale", "softcap"])
def test_factors_are_numbers(option, value):
    refuse(TypeError, f"{option} is .*; a number is needed", **{option: value})


def test_a_scale_with_a_gradient_is_refused_not_detached():
    refuse(TypeError, "scale is a Tensor; a number", scale=torch.tensor(0.5, requires_grad=True))
    refuse(TypeError, "scale is a Parameter; a number", scale=torch.nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), 10**400, -(10**400)], ids=str)
@pytest.mark.parametrize("option", ["scale", "softcap"])
def test_factors_are_finite(option, value):
    refuse(ValueError, f"{option} is .*; a finite number", **{option: value})


@pytest.mark.parametrize("value", [-1.0, -1e-300, np.float64(-2)], ids=str)
def test_softcap_is_not_negative(value):
    refuse(ValueError, "softcap is .*at least 0", softcap=value)


WINDOWS = [
    3, None, "11", "-1", (1,), (1, 2, 3), (), {2, 0}, {2: 0, 1: 0}, (True, 0), (1.0, 0), (1, None), ("1", "0"), (-2, 0),
    (0, -3), (math.inf, 0), (np.float64(1), 0), (np.True_, 0), torch.tensor([2, 0]), np.array([2, 0]),
    (torch.tensor(2), 0), ((1, 2), (3, 4)),
]  # fmt: skip


@pytest.mark.parametrize("value", WINDOWS, ids=repr)
def test_windows_are_two_integers(value):
    refuse(ValueError, "window is", window=value)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (CU.long(), TypeError, "torch.int64; an int32"),
        (CU.float(), TypeError, "torch.float32; an int32"),
        (CU.bool(), TypeError, "torch.bool; an int32"),
        (CU.float().requires_grad_(), TypeError, "torch.float32; an int32"),
        ([0, 4], TypeError, "list; an int32"),
        (np.array([0, 4], dtype=np.int32), TypeError, "ndarray; an int32"),
        (CU[None], ValueError, r"shape \(1, 2\)"),
        (CU[0], ValueError, r"shape \(\)"),
        (CU[:0], ValueError, r"shape \(0,\)"),
        (CU.to("meta"), ValueError, "on meta"),
        (CU.to_sparse(), TypeError, "layout"),
        (torch.tensor([-1, 4], dtype=torch.int32), ValueError, "ascend"),
        (torch.tensor([0, 9], dtype=torch.int32), ValueError, "ascend"),
        (torch.tensor([4, 0], dtype=torch.int32), ValueError, "ascend"),
    ],
    ids=str,
)
def test_starts_of_documents(value, error, words):
    refuse(error, f"cu_seqlens_q is .*{words}|cu_seqlens_q has .*{words}", *PACKED, cu_seqlens_q=value)
    refuse(error, f"cu_seqlens_k is .*{words}|cu_seqlens_k has .*{words}", *PACKED, cu_seqlens_q=CU, cu_seqlens_k=value)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (torch.zeros(3), ValueError, "shape"),
        (torch.zeros(4, 1), ValueError, "shape"),
        (torch.zeros(4, dtype=torch.int64), TypeError, "dtype"),
        (torch.zeros(4, device="meta"), ValueError, "is on meta"),
        ([0.0] * 4, TypeError, "a list; a torch.Tensor"),
        (0.0, TypeError, "a float; a torch.Tensor"),
        (True, TypeError, "a bool; a torch.Tensor"),
    ],
    ids=str,
)
def test_sinks(value, error, words):
    refuse(error, f"sinks (is|has) .*{words}|sinks {words}", sinks=value)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda x: x.numpy(), TypeError),
        (lambda x: x.tolist(), TypeError),
        (lambda x: None, TypeError),
        (lambda x: x.int(), TypeError),
        (lambda x: x.to(torch.complex64), TypeError),
        (lambda x: x.to(torch.float8_e4m3fn), TypeError),
        (lambda x: x.to_sparse(), TypeError),
        (lambda x: x.to("meta"), ValueError),
        (lambda x: x[0], ValueError),
        (lambda x: x[None], ValueError),
        (lambda x: x[..., :0], ValueError),
        (lambda x: torch.cat([x, x]), ValueError),
    ],
    ids=["numpy", "list", "None", "int", "complex", "float8", "sparse", "device", "3d", "5d", "no head size", "batch"],
)
def test_each_tensor(name, change, error):
    tensors = {"q": Q, "k": K, "v": K}
    tensors[name] = change(tensors[name])
    with pytest.raises(error, match=r"\b[qkv] (is|has)"):
        ops.attention(**tensors)


@pytest.mark.parametrize(
    "option", ["dropout_p", "alibi_slopes", "attn_mask", "mask", "key_padding_mask", "is_causal", "enable_gqa", "bias"]
)
def test_options_there_are_not(option):
    refuse(TypeError, option, **{option: None})


def test_options_are_given_by_name():
    refuse(TypeError, "positional", Q, K, K, True)


@pytest.mark.parametrize("packed", [False, True])
def test_numpy_scalars_are_numbers(monkeypatch, packed):
    monkeypatch.undo()
    tensors, documents = (PACKED, {"cu_seqlens_q": CU, "cu_seqlens_k": CU + 2}) if packed else ((Q, K, K), {})
    plain = ops.attention(*tensors, causal=True, scale=0.5, window=(3, 0), softcap=2.0, **documents)
    for scale in (np.float64(0.5), np.float32(0.5), fractions.Fraction(1, 2)):
        given = ops.attention(
            *tensors, causal=np.True_, scale=scale, window=[np.int64(3), np.int8(0)], softcap=np.int32(2), **documents
        )
        assert torch.equal(given, plain)
