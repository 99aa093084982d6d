"""A model cut over 2 or 4 ranks is the model of one process: loss, every gradient, initial values, files, samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pyfast.comm import record
from pyfast.models import (
    Transformer,
    TransformerConfig,
    from_hugging_face,
    generate,
    save_hugging_face,
    to_hugging_face,
)
from pyfast.nn.layout import get_layout
from pyfast.parallel import ParallelConfig, ParallelMesh

CONFIG = TransformerConfig(
    layers=2, width=24, heads=8, kv_heads=4, head_size=6, ffn_width=22, vocab=53, max_positions=64, initial_std=0.3
)
VARIANTS = {
    "plain": {},
    "tied, qk norm, window": {"tied_embeddings": True, "qk_norm": True, "window": 4},
    "every bias": {"attention_bias": True, "attention_output_bias": True, "ffn_bias": True},
}


def mesh_of(rank: int, world_size: int) -> ParallelMesh:
    config = ParallelConfig(tensor=world_size)
    return ParallelMesh.create(config, rank=rank, world_size=world_size, checked=world_size > 1)


def build(config: TransformerConfig, mesh: ParallelMesh | None, dtype: torch.dtype = torch.float64) -> Transformer:
    """Biases start at 0 and norms at 1, where mistakes hide: shift both, by amounts that differ along the tensor."""
    model = Transformer(config, mesh=mesh, dtype=dtype, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            layout = get_layout(parameter)
            if len(layout.shape) == 1:
                shift = torch.linspace(-0.4, 0.4, layout.shape[0], dtype=dtype)
                parameter.add_(shift if mesh is None else layout.shard(shift, mesh))
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, CONFIG.vocab, (31,), generator=generator) for _ in range(2))
    labels[5:9] = -100
    return ids, labels, torch.tensor([0, 11, 12, 31], dtype=torch.int32)


def whole(parameter: torch.nn.Parameter, tensor: torch.Tensor, mesh: ParallelMesh | None) -> torch.Tensor:
    """The unsharded form of a parameter's gradient (or value), partial sums added up."""
    if mesh is None:
        return tensor
    layout = get_layout(parameter)
    for name in layout.partial:
        tensor = tensor.clone()
        mesh.group(name).all_reduce(tensor, name="partial gradient")
    return layout.unshard(tensor, mesh)


def train_step(rank: int, world_size: int, config: TransformerConfig) -> dict[str, torch.Tensor]:
    """Loss, logits, initial values and gradients in the names and shapes of one process."""
    mesh = mesh_of(rank, world_size) if world_size > 1 else None
    model = build(config, mesh)
    ids, labels, cu_seqlens = batch()
    loss = model.loss(ids, labels, cu_seqlens=cu_seqlens)
    loss.backward()
    out = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        out[f"gradient of {name}"] = whole(parameter, parameter.grad, mesh)
        out[f"value of {name}"] = get_layout(parameter).unshard(parameter.data, mesh) if mesh else parameter.data
    model.zero_grad()
    logits = model(ids, cu_seqlens=cu_seqlens)
    out["logits"] = logits.detach()
    # the same gradients through the gathered logits
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    for name, parameter in model.named_parameters():
        out[f"gradient through logits of {name}"] = whole(parameter, parameter.grad, mesh)
    return out


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_loss_logits_and_every_gradient_equal_one_process(ranks, world_size, variant):
    config = replace(CONFIG, **VARIANTS[variant])
    want = train_step(0, 1, config)
    for name, expected in want.items():
        if name.startswith("gradient through logits"):
            direct = want[name.replace(" through logits", "")]
            torch.testing.assert_close(expected, direct, rtol=1e-10, atol=1e-10)
    for got in ranks.run(train_step, world_size, config):
        assert set(got) == set(want)
        for name, expected in want.items():
            if name.startswith("value"):
                assert torch.equal(got[name], expected), name
            else:
                torch.testing.assert_close(
                    got[name], expected, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
                )


def replicas(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    model = build(CONFIG, mesh_of(rank, world_size), torch.float32)
    ids, labels, cu_seqlens = batch()
    model.loss(ids, labels, cu_seqlens=cu_seqlens).backward()
    return {n: p.grad for n, p in model.named_parameters() if not get_layout(p).shards and not get_layout(p).partial}


def test_gradients_of_replicated_parameters_are_bitwise_equal_on_all_ranks(ranks):
    first, *others = ranks.run(replicas, 4)
    assert {"norm.weight", "layers.0.attention_norm.weight", "layers.1.ffn_norm.weight"} == set(first) - {
        "layers.1.attention_norm.weight",
        "layers.0.ffn_norm.weight",
    }
    for other in others:
        assert all(torch.equal(other[name], first[name]) for name in first)


def collectives(rank: int, world_size: int, freeze: bool) -> tuple[list[str], list[str]]:
    model = build(CONFIG, mesh_of(rank, world_size), torch.float32)
    if freeze:
        model.embedding.requires_grad_(False)
    ids, labels, cu_seqlens = batch()
    with record() as forward:
        hidden = model.hidden(ids, cu_seqlens=cu_seqlens)
    with record() as backward:
        hidden.sum().backward()
    return [event.name for event in forward], [event.name for event in backward]


@pytest.mark.parametrize("freeze", [False, True])
def test_a_layer_costs_two_all_reduces_each_way(ranks, freeze):
    forward, backward = ranks.run(collectives, 2, freeze)[0]
    sums = [f"layer {layer} {name}" for layer in (0, 1) for name in ("attention.output", "ffn.down")]
    assert forward == ["embedding", *sums]
    back = [f"layer {layer} {name} input gradient" for layer in (1, 0) for name in ("ffn.gate_up", "attention.qkv")]
    assert backward == back  # also under a frozen embedding: the first norm needs its gradient


def bfloat16_loss(rank: int, world_size: int) -> float:
    mesh = mesh_of(rank, world_size) if world_size > 1 else None
    model = build(replace(CONFIG, residual_dtype="float32", initial_std=0.1), mesh, torch.bfloat16)
    ids, labels, cu_seqlens = batch()
    loss = model.loss(ids, labels, cu_seqlens=cu_seqlens)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    return loss.item()


def test_bfloat16_parameters_with_a_float32_residual_stream(ranks):
    want = bfloat16_loss(0, 1)
    got = ranks.run(bfloat16_loss, 2)
    assert got[0] == got[1] and abs(got[0] / want - 1) < 5e-3


def sampled(rank: int, world_size: int, temperature: float) -> torch.Tensor:
    mesh = mesh_of(rank, world_size) if world_size > 1 else None
    prompt = torch.tensor([[3, 1, 4], [1, 5, 9]])
    return generate(build(CONFIG, mesh), prompt, 12, temperature=temperature, seed=2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generation_gives_the_tokens_of_one_process_on_every_rank(ranks, temperature):
    want = sampled(0, 1, temperature)
    for got in ranks.run(sampled, 2, temperature):
        assert torch.equal(got, want)


def exported(rank: int, world_size: int, directory: str) -> dict[str, torch.Tensor]:
    mesh = mesh_of(rank, world_size)
    model = from_hugging_face(directory, mesh)
    save_hugging_face(model, f"{directory}/again")
    return to_hugging_face(model)


@pytest.mark.parametrize("variant", ["plain", "tied, qk norm, window"])
def test_hugging_face_there_and_back_over_two_ranks_is_bitwise(ranks, tmp_path, variant):
    model = build(replace(CONFIG, **VARIANTS[variant]), None)
    save_hugging_face(model, tmp_path)
    want = to_hugging_face(model)
    results = [*ranks.run(exported, 2, str(tmp_path)), to_hugging_face(from_hugging_face(tmp_path / "again"))]
    for got in results:
        assert set(got) == set(want) and all(torch.equal(got[name], want[name]) for name in want)


def refusals(rank: int, world_size: int) -> list[str]:
    mesh = mesh_of(rank, world_size)
    messages = []
    for changes in ({"heads": 6, "kv_heads": 6}, {"kv_heads": 1}, {"ffn_width": 3}, {"vocab": 3}):
        with pytest.raises(ValueError) as error:
            Transformer(replace(CONFIG, **changes), mesh=mesh)
        messages.append(str(error.value))
    return messages


def test_a_model_that_cannot_be_spread_is_refused_alike_on_every_rank(ranks):
    first, *others = ranks.run(refusals, 4)
    assert "heads=6 and kv_heads=6" in first[0] and "4" in first[0]
    assert "heads=8 and kv_heads=1" in first[1]
    assert "3" in first[2] and "ffn" in first[2]
    assert "num_embeddings=3" in first[3]
    assert all(other == first for other in others)


def out_of_vocabulary(rank: int, world_size: int) -> str:
    model = build(CONFIG, mesh_of(rank, world_size))
    with pytest.raises(ValueError) as error:
        model(torch.tensor([0, CONFIG.vocab]))
    return str(error.value)


def test_an_id_that_no_rank_holds_is_refused(ranks):
    assert all("vocabulary" in message for message in ranks.run(out_of_vocabulary, 2))
