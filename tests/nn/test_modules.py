"""The modules on one rank against torch's own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyfast.comm import Group, record
from pyfast.nn import Attention, ColumnParallelLinear, FeedForward, RMSNorm, RowParallelLinear, VocabParallelEmbedding
from pyfast.nn.layout import Layout, Shard, get_layout, has_layout

DOUBLE = {"dtype": torch.float64}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)


def assert_same_gradients(got: torch.Tensor, want: torch.Tensor, inputs: tuple, want_inputs: tuple) -> None:
    torch.testing.assert_close(got, want)
    upstream = randn(*got.shape, seed=9).detach()
    ours, theirs = torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(want, want_inputs, upstream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group", [None, Group.single()], ids=["none", "single"])
def test_linears_equal_torch(kind, bias, group):
    ours, theirs = kind(7, 5, bias=bias, group=group, **DOUBLE), nn.Linear(7, 5, bias=bias, **DOUBLE)
    theirs.load_state_dict(ours.state_dict())
    x = randn(2, 3, 7)
    with record() as events:
        parameters = (x, *ours.parameters()), (x, *theirs.parameters())
        assert_same_gradients(ours(x), theirs(x), *parameters)
    assert list(events) == []


def test_linears_start_like_torch():
    torch.manual_seed(0)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind(100, 400, bias=True)
        assert layer.weight.abs().max() <= 0.1 and abs(layer.weight.std().item() / (0.1 / 3**0.5) - 1) < 0.02
        assert (layer.bias == 0).all()


def test_embedding_equals_torch():
    ours = VocabParallelEmbedding(11, 4, **DOUBLE)
    theirs = nn.Embedding(11, 4, **DOUBLE)
    theirs.load_state_dict(ours.state_dict())
    ids = torch.tensor([[0, 10, 3], [3, 3, 7]])
    assert_same_gradients(ours(ids), theirs(ids), (ours.weight,), (theirs.weight,))
    for wrong in (-1, 11):
        with pytest.raises(ValueError, match=str(wrong)):
            ours(torch.tensor([wrong]))


def test_rms_norm_equals_torch():
    ours, theirs = RMSNorm(9, eps=1e-3, **DOUBLE), nn.RMSNorm(9, eps=1e-3, **DOUBLE)
    with torch.no_grad():
        ours.weight.copy_(randn(9))
    theirs.load_state_dict(ours.state_dict())
    x = randn(2, 3, 9, seed=1)
    assert_same_gradients(ours(x), theirs(x), (x, ours.weight), (x, theirs.weight))


def test_rms_norm_of_a_wider_input_stays_wide():
    norm, x = RMSNorm(8, dtype=torch.bfloat16), torch.randn(3, 8)
    out = norm(x)
    torch.testing.assert_close(out, F.rms_norm(x, (8,), eps=1e-6))
    out.sum().backward()
    assert out.dtype == torch.float32 and norm.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("bias", [False, True])
def test_feed_forward_equals_torch(bias):
    layer, x = FeedForward(6, 10, bias=bias, **DOUBLE), randn(2, 3, 6)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1)
    gate, up = F.linear(x, layer.gate_up.weight, layer.gate_up.bias).chunk(2, -1)
    want = F.linear(F.silu(gate) * up, layer.down.weight, layer.down.bias)
    inputs = (x, *layer.parameters())
    assert_same_gradients(layer(x), want, inputs, inputs)


def dense_attention(layer: Attention, x: torch.Tensor, cos, sin, window: int | None) -> torch.Tensor:
    """The same maths with torch's modules, [B, S, H]."""
    batch, length, _ = x.shape
    q, k, v = F.linear(x, layer.qkv.weight, layer.qkv.bias).split([n * layer.head_size for n in layer.split], -1)
    q, k, v = (y.view(batch, length, -1, layer.head_size).transpose(1, 2) for y in (q, k, v))
    if layer.q_norm is not None:
        q = F.rms_norm(q, (layer.head_size,), layer.q_norm.weight, 1e-6)
        k = F.rms_norm(k, (layer.head_size,), layer.k_norm.weight, 1e-6)

    def turn(y):
        half = layer.head_size // 2
        turned = torch.complex(y[..., :half], y[..., half:]) * torch.complex(cos, sin)[:length]
        return torch.cat([turned.real, turned.imag], -1)

    row, column = torch.arange(length).unsqueeze(1), torch.arange(length)
    mask = (column <= row) if window is None else (column <= row) & (column > row - window)
    out = F.scaled_dot_product_attention(turn(q), turn(k), v, attn_mask=mask, enable_gqa=True)
    return F.linear(out.transpose(1, 2).flatten(2), layer.output.weight, layer.output.bias)


@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    "qk_norm,window,bias", [(False, None, False), (True, None, True), (False, 3, False), (True, 50, True)]
)
def test_attention_equals_torch(heads, kv_heads, qk_norm, window, bias):
    layer = Attention(8, heads, kv_heads, 10, qk_norm=qk_norm, window=window, bias=bias, output_bias=bias, **DOUBLE)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.add_(randn(*parameter.shape, seed=seed) * 0.3)
    angle = randn(16, 5, seed=3).detach()
    cos, sin = angle.cos().float(), angle.sin().float()
    x = randn(2, 7, 8)
    inputs = (x, *layer.parameters())
    assert_same_gradients(
        layer(x, cos, sin), dense_attention(layer, x, cos.double(), sin.double(), window), inputs, inputs
    )


def test_attention_without_tables_has_no_positions():
    layer, x = Attention(8, 4, 2, 6, **DOUBLE), randn(1, 5, 8)
    ones, zeros = torch.ones(5, 3), torch.zeros(5, 3)
    torch.testing.assert_close(layer(x), layer(x, ones, zeros))


def test_packed_attention_keeps_documents_apart():
    layer, x = Attention(8, 4, 2, 6, **DOUBLE), randn(9, 8)
    out = layer(x, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32))
    torch.testing.assert_close(out, torch.cat([layer(x[None, :4])[0], layer(x[None, 4:])[0]]))


def test_every_parameter_has_a_layout():
    layer = Attention(8, 4, 2, 6, qk_norm=True, bias=True, output_bias=True)
    assert all(has_layout(parameter) for parameter in layer.parameters())
    assert get_layout(layer.qkv.weight) == Layout((48, 8), (Shard("tp", 0, (24, 12, 12)),))
    assert get_layout(layer.qkv.bias) == Layout((48,), (Shard("tp", 0, (24, 12, 12)),))
    assert get_layout(layer.output.weight) == Layout((8, 24), (Shard("tp", 1, (24,)),))
    assert get_layout(layer.output.bias) == Layout((8,))
    assert get_layout(layer.q_norm.weight) == Layout((6,), partial=("tp",))
    layer = FeedForward(8, 5, mesh_dim="etp")
    assert get_layout(layer.gate_up.weight) == Layout((10, 8), (Shard("etp", 0, (5, 5)),))
    assert get_layout(layer.down.weight) == Layout((8, 5), (Shard("etp", 1, (5,)),))
    assert get_layout(VocabParallelEmbedding(9, 4).weight) == Layout((9, 4), (Shard("tp", 0, (9,)),))
    assert get_layout(RMSNorm(4).weight) == Layout((4,))


@pytest.mark.parametrize(
    "make,named",
    [
        (lambda: ColumnParallelLinear(4, 6, parts=(2, 3)), "parts.*5.*out_features=6"),
        (lambda: RowParallelLinear(6, 4, parts=(2, 3)), "parts.*5.*in_features=6"),
        (lambda: Attention(8, 4, 3, 6), "kv_heads=3 must divide heads=4"),
        (lambda: Attention(8, 4, 2, 6, window=0), "window=0"),
    ],
)
def test_wrong_sizes_are_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()


@pytest.mark.parametrize(
    "replace",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: copy.deepcopy(model).to("meta").to_empty(device="cpu"),
        lambda model: _assigned(copy.deepcopy(model).to("meta"), model),
        lambda model: copy.deepcopy(model).bfloat16(),
    ],
    ids=["deepcopy", "pickle", "to_empty", "assign", "bfloat16"],
)
def test_new_parameters_keep_their_layout(replace):
    model = torch.nn.Sequential(
        VocabParallelEmbedding(9, 8), RMSNorm(8, partial=("tp",)), Attention(8, 2, 1, 4, qk_norm=True, bias=True)
    )
    expected = {name: get_layout(parameter) for name, parameter in model.named_parameters()}
    replaced = dict(replace(model).named_parameters())
    assert all(has_layout(parameter) for parameter in replaced.values())
    assert {name: get_layout(parameter) for name, parameter in replaced.items()} == expected


def _assigned(model, source):
    model.load_state_dict({name: tensor.clone() for name, tensor in source.state_dict().items()}, assign=True)
    return model
