"""What a model promises by itself: documents stay apart, ignored labels cost nothing, dtypes, configs, generation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from pyfast.models import Transformer, TransformerConfig, generate
from pyfast.models.rope import inverse_frequencies

CONFIG = TransformerConfig(
    layers=2, width=24, heads=4, kv_heads=2, head_size=10, ffn_width=20, vocab=53, max_positions=64
)


def model_of(config: TransformerConfig = CONFIG, dtype: torch.dtype = torch.float64, seed: int = 1) -> Transformer:
    return Transformer(replace(config, initial_std=0.3), dtype=dtype, seed=seed)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_close_by_name(got: dict, want: dict, **tolerance) -> None:
    assert set(got) == set(want)
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


@pytest.mark.parametrize("changes", [{}, {"window": 3}, {"qk_norm": True, "tied_embeddings": True}], ids=str)
@pytest.mark.parametrize("lengths", [[9, 7, 8, 1, 12], [3, 0, 9, 20], [37]], ids=str)
def test_packed_documents_equal_separate_documents(lengths, changes):
    model = model_of(replace(CONFIG, **changes))
    ids, labels = tokens(sum(lengths)), tokens(sum(lengths), seed=1)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    packed = model(ids, cu_seqlens=cu_seqlens)
    alone = [model(part.unsqueeze(0))[0] for part in ids.split(lengths) if len(part)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-10, atol=1e-10)

    loss = model.loss(ids, labels, cu_seqlens=cu_seqlens)
    loss.backward()
    got = gradients(model)
    model.zero_grad()
    parts = zip(ids.split(lengths), labels.split(lengths), strict=True)
    separate = sum(model.loss(i.unsqueeze(0), t.unsqueeze(0)) for i, t in parts if len(i))
    separate.backward()
    torch.testing.assert_close(loss, separate, rtol=1e-10, atol=1e-10)
    assert_close_by_name(got, gradients(model), rtol=1e-10, atol=1e-10)


def test_loss_is_the_cross_entropy_of_the_logits_over_labels_that_count():
    model = model_of()
    ids, labels = tokens(2, 11), tokens(2, 11, seed=1)
    labels[0, 4:] = -100
    expected = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    expected.backward()
    want = gradients(model)
    model.zero_grad()
    loss = model.loss(ids, labels)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert_close_by_name(gradients(model), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tied", [False, True])
def test_ignored_labels_only_give_loss_zero_and_zero_gradients(tied):
    model = model_of(replace(CONFIG, tied_embeddings=tied))
    loss = model.loss(tokens(9), torch.full((9,), -100), cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32))
    loss.backward()
    assert loss.item() == 0
    for name, grad in gradients(model).items():
        assert (grad == 0).all(), name


def test_loss_falls_and_tied_weights_stay_one_parameter():
    model = model_of(replace(CONFIG, tied_embeddings=True, initial_std=0.05))
    assert "head.weight" not in dict(model.named_parameters()) and model.head_weight is model.embedding.weight
    ids, labels = tokens(16), tokens(16, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model.loss(ids, labels) / 16
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_one_document_may_come_without_cu_seqlens_and_with_positions():
    model = model_of()
    ids = tokens(13)
    batched = model(ids.unsqueeze(0))[0]
    positions = torch.arange(13)
    for got in (model(ids), model(ids, positions=positions), model(ids.unsqueeze(0), positions=positions)[0]):
        torch.testing.assert_close(got, batched, rtol=1e-12, atol=1e-12)
    # rotary positions are relative: a shift of all changes nothing; the tables are float32
    torch.testing.assert_close(model(ids, positions=positions + 7), batched, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model(ids, positions=positions * 2), batched, rtol=1e-3)


def test_initial_values_depend_on_the_seed_and_the_name_only():
    one, same, other = (Transformer(CONFIG, seed=seed) for seed in (3, 3, 4))
    parameters = dict(one.named_parameters())
    for name, parameter in same.named_parameters():
        assert torch.equal(parameter, parameters[name])
    assert not torch.equal(one.embedding.weight, other.embedding.weight)
    assert not torch.equal(one.layers[0].ffn.down.weight, one.layers[1].ffn.down.weight)
    deeper = dict(Transformer(replace(CONFIG, layers=3), seed=3).named_parameters())
    assert torch.equal(deeper["layers.1.attention.qkv.weight"], parameters["layers.1.attention.qkv.weight"])
    double = dict(Transformer(CONFIG, seed=3, dtype=torch.float64).named_parameters())
    assert all(torch.equal(double[name], parameter.double()) for name, parameter in parameters.items())


def test_initial_spread_and_the_first_loss():
    config = TransformerConfig(layers=8, width=128, heads=4, ffn_width=256, vocab=512, attention_bias=True)
    model = Transformer(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
            continue
        wanted = 0.02 / 4 if name.endswith(("output.weight", "down.weight")) else 0.02
        assert abs(parameter.std().item() / wanted - 1) < 0.05, name
    ids = torch.randint(0, 512, (64,), generator=torch.Generator().manual_seed(0))
    assert abs(model.loss(ids, ids.roll(-1)).item() / 64 - math.log(512)) < 0.1


def test_the_residual_stream_may_stay_in_float32():
    config = replace(CONFIG, layers=64, initial_std=0.1)  # deep: the stream is rounded 128 times
    ids = tokens(2, 16)
    reference = Transformer(config, dtype=torch.float64).bfloat16().double()(ids)  # the rounded weights, exactly
    errors = {}
    for residual in (None, "float32"):
        model = Transformer(replace(config, residual_dtype=residual), dtype=torch.bfloat16)
        logits = model(ids)
        assert logits.dtype == torch.bfloat16
        model.loss(ids, ids).backward()
        assert all(parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())
        errors[residual] = (logits - reference).square().mean().sqrt().item()
    assert errors["float32"] < 0.5 * errors[None], errors


def test_rotary_tables_keep_float32_whatever_the_model_is_converted_to():
    model = Transformer(CONFIG)
    cos = model.rotary.cos.clone()
    model.bfloat16().double()
    assert model.rotary.cos.dtype == torch.float32 and torch.equal(model.rotary.cos, cos)
    frequency, _ = inverse_frequencies(CONFIG.head_size, CONFIG.rope_theta)
    assert frequency.dtype == torch.float64
    exact = torch.cos(torch.arange(64, dtype=torch.float64).unsqueeze(1) * frequency)
    assert torch.equal(cos, exact.float())
    assert "rotary" not in " ".join(model.state_dict())


def test_state_dict_holds_the_documented_names():
    names = set(Transformer(replace(CONFIG, layers=1, qk_norm=True)).state_dict())
    layer = {"attention_norm", "attention.qkv", "attention.q_norm", "attention.k_norm", "attention.output"}
    layer |= {"ffn_norm", "ffn.gate_up", "ffn.down"}
    wanted = {f"layers.0.{name}.weight" for name in layer} | {"embedding.weight", "norm.weight", "head.weight"}
    assert names == wanted


# ---------------------------------------------------------------------------------------------------------------------
# Generation
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"window": 4}, {"qk_norm": True}], ids=str)
def test_greedy_generation_takes_the_likeliest_token_of_the_whole_sequence(changes):
    model = model_of(replace(CONFIG, **changes))
    prompt = tokens(2, 5)
    out = generate(model, prompt, 9, temperature=0)
    sequence = prompt
    for _ in range(9):  # without a cache
        sequence = torch.cat([sequence, model(sequence)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(out, sequence)
    assert torch.equal(generate(model, prompt[0], 9, temperature=0), sequence[0])
    assert torch.equal(generate(model, prompt, 0), prompt)


def test_sampling_depends_on_the_seed_alone_and_follows_the_softmax():
    model = model_of(replace(CONFIG, initial_std=0.1))
    prompt = tokens(4)
    torch.manual_seed(0)
    first = generate(model, prompt, 20, temperature=1.0, seed=5)
    torch.manual_seed(1)
    assert torch.equal(generate(model, prompt, 20, temperature=1.0, seed=5), first)
    assert not torch.equal(generate(model, prompt, 20, temperature=1.0, seed=6), first)

    draws = 4000
    probabilities = torch.softmax(model(prompt)[-1].detach() / 0.7, -1)
    sampled = generate(model, prompt.expand(draws, -1), 1, temperature=0.7)[:, -1]
    frequency = torch.bincount(sampled, minlength=CONFIG.vocab) / draws
    assert ((frequency - probabilities).abs() < 5 * (probabilities / draws).sqrt() + 1e-3).all()


@pytest.mark.parametrize(
    "arguments,named",
    [
        ((torch.zeros(0, dtype=torch.int64), 1), "at least one token"),
        ((torch.zeros(1, 1, 1, dtype=torch.int64), 1), "ids"),
        ((torch.zeros(3, dtype=torch.int64), -1), "steps"),
        ((torch.zeros(3, dtype=torch.int64), 1, -0.5), "temperature"),
        ((torch.zeros(3, dtype=torch.int64), 62), "max_positions"),
    ],
)
def test_generation_refuses_what_it_cannot_do(arguments, named):
    with pytest.raises(ValueError, match=named):
        generate(model_of(), *arguments)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change,named",
    [
        ({"layers": 0}, "layers"),
        ({"layers": True}, "layers"),
        ({"width": 24.0}, "width"),
        ({"heads": 0}, "heads"),
        ({"kv_heads": 3}, "kv_heads is 3.*1, 2, 4"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"head_size": 5}, "head_size"),
        ({"head_size": None, "width": 30}, "width"),
        ({"vocab": -1}, "vocab"),
        ({"ffn_width": 0}, "ffn_width"),
        ({"window": 0}, "window"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rope_theta": math.nan}, "rope_theta"),
        ({"norm_eps": "1e-5"}, "norm_eps"),
        ({"tied_embeddings": 1}, "tied_embeddings"),
        ({"residual_dtype": "bfloat16"}, "residual_dtype"),
        ({"rope_scaling": {"kind": "ntk", "factor": 2.0}}, "rope_scaling.kind"),
        ({"rope_scaling": {"kind": "linear", "factor": 0.0}}, "rope_scaling.factor"),
        ({"rope_scaling": {"kind": "yarn", "factor": 2.0}}, "rope_scaling.original_max_positions"),
        ({"rope_scaling": {"kind": "linear", "factors": 2.0}}, "rope_scaling"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"experts": 8}, "experts is 8.*not supported yet"),
        ({"capacity_factor": 1.0}, "not supported yet"),
        ({"z_loss_weight": 0.1}, "not supported yet"),
    ],
    ids=str,
)
def test_wrong_config_values_are_named(change, named):
    with pytest.raises(ValueError, match=named):
        replace(CONFIG, **change)


def test_config_fills_in_what_is_left_out():
    config = TransformerConfig(width=256, heads=8)
    assert (config.kv_heads, config.head_size, config.ffn_width) == (8, 32, 704)
    scaled = replace(CONFIG, rope_scaling={"kind": "linear", "factor": 2})
    assert scaled.rope_scaling.factor == 2


@pytest.mark.parametrize(
    "call,named",
    [
        (lambda m: m(tokens(1, 2, 3)), "ids"),
        (lambda m: m(tokens(2, 3), cu_seqlens=torch.tensor([0, 3], dtype=torch.int32)), "packed"),
        (lambda m: m(tokens(65)), "max_positions"),
        (lambda m: m(tokens(70), cu_seqlens=torch.tensor([0, 66, 70], dtype=torch.int32)), "max_positions"),
        (lambda m: m(tokens(3), positions=torch.tensor([0, 1, 64])), "max_positions"),
        (lambda m: m(tokens(3), positions=torch.tensor([-1, 0, 1])), "positions"),
        (lambda m: m(tokens(2, 3), positions=torch.arange(2)), "positions"),
        (lambda m: m(torch.tensor([0, 53])), "vocabulary"),
        (lambda m: m(torch.tensor([0, -1])), "vocabulary"),
        (lambda m: m.loss(tokens(4), tokens(5)), "labels"),
    ],
)
def test_wrong_inputs_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call(model_of())


def test_documents_of_a_packed_run_longer_than_max_positions_work():
    model = model_of(replace(CONFIG, max_positions=8))
    ids = tokens(12)
    packed = model(ids, cu_seqlens=torch.tensor([0, 8, 12], dtype=torch.int32))
    torch.testing.assert_close(packed[8:], model(ids[8:]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("ids", "options", "error", "words"),
    [
        ([1, 2], {}, TypeError, "ids are list"),
        (torch.zeros(4), {}, TypeError, "ids are torch.float32"),
        (torch.zeros(4).long(), {"cu_seqlens": [0, 4]}, TypeError, "cu_seqlens is list"),
        (torch.zeros(4).long(), {"cu_seqlens": torch.tensor([0, 4])}, TypeError, "cu_seqlens is torch.int64"),
        (torch.zeros(4).long(), {"cu_seqlens": torch.zeros(0).int()}, ValueError, "cu_seqlens has shape"),
        (torch.zeros(4).long(), {"cu_seqlens": torch.zeros(1, 2).int()}, ValueError, "cu_seqlens has shape"),
    ],
)
def test_inputs_of_other_kinds_are_named(ids, options, error, words):
    model = Transformer(TransformerConfig(layers=1, width=16, heads=2, vocab=11, max_positions=3))
    with pytest.raises(error, match=words):
        model(ids, **options)


def test_a_tiny_temperature_is_the_likeliest_token():
    model = Transformer(TransformerConfig(layers=1, width=16, heads=2, vocab=11, max_positions=8))
    ids = torch.tensor([1, 2, 3])
    assert torch.equal(generate(model, ids, 4, temperature=1e-320), generate(model, ids, 4, temperature=0))
