"""Recomputation of activations: the same bits as without, less memory, and no kernel run twice that need not be."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pyfast.kernels import cpu
from pyfast.models import Transformer, TransformerConfig
from pyfast.nn import recompute
from pyfast.nn.recompute import KINDS, layer_kinds

CONFIG = dict(layers=3, width=64, heads=4, kv_heads=2, ffn_width=160, vocab=97, max_positions=64)
BATCH, LENGTH = 2, 40


def model_of(kind, dtype=torch.float32, mesh=None, every=1, **config) -> Transformer:
    config = TransformerConfig(**{**CONFIG, **config})
    return Transformer(config, dtype=dtype, mesh=mesh, recompute=kind, recompute_every=every)


def batch():
    ids = torch.randint(0, 97, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def results(model: Transformer, packed: bool = False) -> dict[str, torch.Tensor]:
    """The loss and every gradient, of two micro-batches."""
    ids, labels = batch()
    for rows in (slice(0, 1), slice(1, 2)):
        if packed:
            cu_seqlens = torch.tensor([0, 13, 40], dtype=torch.int32)
            loss = model.loss(ids[rows].flatten(), labels[rows].flatten(), cu_seqlens=cu_seqlens)
        else:
            loss = model.loss(ids[rows], labels[rows])
        loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_same_bits(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "ffn_bias": True}, {"tied_embeddings": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
def test_the_same_bits_as_without(kind, dtype, options):
    packed = "qk_norm" in options
    assert_same_bits(
        results(model_of(kind, dtype, **options), packed), results(model_of("none", dtype, **options), packed)
    )


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_float32_residual_stream(kind):
    expected = results(model_of("none", torch.bfloat16, residual_dtype="float32"))
    assert_same_bits(results(model_of(kind, torch.bfloat16, residual_dtype="float32")), expected)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_autocast_in_forward_holds_in_the_second_forward(kind):
    def run(kind):
        model, (ids, labels) = model_of(kind), batch()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model.loss(ids, labels)
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    assert_same_bits(run(kind), run("none"))


def kept_bytes(kind, **options) -> int:
    """Bytes that a forward leaves allocated: what is kept for backward."""
    model, (ids, labels) = model_of(kind, **options), batch()
    model.loss(ids, labels)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = model.loss(ids, labels)
    del loss
    events = profiler.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def test_what_is_kept_is_what_the_table_says():
    tokens, layers, width, ffn = BATCH * LENGTH, CONFIG["layers"], CONFIG["width"], CONFIG["ffn_width"]
    q, k = width, width // 2
    saved = {"selective": 2 * width + (q + k) + ffn}  # the normed copies, rotated q and k, the product
    saved["attention"] = width + (q + 2 * k) + (q + k) + q  # a normed copy, qkv, rotated q and k, the result
    saved["ffn"] = width + 3 * ffn  # a normed copy, gate and up, the product
    saved["full"] = saved["attention"] + saved["ffn"] + width  # and the residual between the halves
    none = kept_bytes("none")
    for kind, values in saved.items():
        assert (none - kept_bytes(kind)) / (4 * tokens * layers) == pytest.approx(values, rel=0.03), kind


def test_every_second_layer_keeps_in_the_others():
    cases = (("none", 1), ("full", 1), ("full", 2))
    none, full, some = (kept_bytes(kind, every=every, layers=4) for kind, every in cases)
    assert none - some == pytest.approx((none - full) / 2, rel=0.01)


@pytest.fixture
def counted(monkeypatch) -> Counter:
    """How often each kernel ran."""
    calls = Counter()

    def count(owner, name):
        original = getattr(owner, name)

        def counting(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for name in ("attention_forward", "attention_backward", "gemm", "rotary", "swiglu_forward", "rms_norm_forward"):
        count(cpu, name)
    count(torch.nn.functional, "linear")
    return calls


def runs_of(counted: Counter, kind) -> Counter:
    counted.clear()
    model, (ids, labels) = model_of(kind), batch()
    model.loss(ids, labels).backward()
    return Counter(counted)


def test_no_kernel_runs_again_whose_result_was_kept(counted):
    layers = CONFIG["layers"]
    none, selective, full = (runs_of(counted, kind) for kind in ("none", "selective", "full"))
    assert none["attention_forward"] == selective["attention_forward"] == layers
    assert full["attention_forward"] == 2 * layers
    products = ("gemm", "linear")
    assert [selective[name] for name in products] == [none[name] for name in products]
    assert selective["swiglu_forward"] == none["swiglu_forward"] + layers
    assert selective["rms_norm_forward"] == none["rms_norm_forward"] + 2 * layers
    halves = runs_of(counted, "ffn")
    assert halves["attention_forward"] == layers and halves["swiglu_forward"] == 2 * layers
    halves = runs_of(counted, "attention")
    assert halves["attention_forward"] == 2 * layers and halves["swiglu_forward"] == layers


def test_nothing_is_kept_or_run_again_without_gradients(counted):
    model, (ids, labels) = model_of("full"), batch()
    with torch.no_grad():
        model.loss(ids, labels)
    assert counted["attention_forward"] == CONFIG["layers"]


def on_tensor_parallel_ranks(rank: int, world_size: int, kind: str):
    from pyfast.parallel import ParallelConfig, ParallelMesh

    mesh = ParallelMesh.create(ParallelConfig(tensor=world_size), rank=rank, world_size=world_size)
    return [results(model_of(word, mesh=mesh)) for word in (kind, "none")]


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_tensor_parallel_ranks_recompute_to_the_same_bits(ranks, kind):
    for found, expected in ranks.run(on_tensor_parallel_ranks, 2, kind):
        assert_same_bits(found, expected)


def test_a_function_whose_result_is_seen_through_a_view():
    x = torch.randn(4, 6, requires_grad=True)
    with recompute.Rerun() as light:
        y = light(lambda x: (x * 2).exp(), x)[1:, ::2].reshape(9)
        z = y * y
    z.sum().backward()
    expected = torch.autograd.grad((x * 2).exp()[1:, ::2].square().sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


def test_layers_by_number_and_by_list():
    assert layer_kinds("full", 5, 2) == ["full", "none", "full", "none", "full"]
    assert layer_kinds(["none", "ffn"], 2) == ["none", "ffn"]
    for arguments, match in [
        (("some", 2), "recompute: 'some' is unknown"),
        ((["full"], 2), "recompute: names 1 layers, the model has 2"),
        (("full", 2, 0), "recompute_every: is 0"),
        ((["full", "none"], 2, 2), "recompute_every: is 2 beside a list"),
    ]:
        with pytest.raises(ValueError, match=match):
            layer_kinds(*arguments)


def test_offload_is_refused_on_a_cpu():
    with pytest.raises(ValueError, match="offload: .*host memory already"):
        Transformer(TransformerConfig(**CONFIG), offload=True)
