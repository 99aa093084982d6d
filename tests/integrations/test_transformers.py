"""attn_implementation="pyfast" against transformers' own eager attention: random tiny models, nothing downloaded."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="4.56", reason="transformers is not installed")

from pyfast.integrations.transformers import register  # noqa: E402

VOCABULARY, LENGTH, WINDOW = 61, 19, 5
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
# Both kinds of layers where a model mixes them.
MIXED = ["sliding_attention", "full_attention"]
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=WINDOW, layer_types=MIXED, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, sliding_window=WINDOW, layer_types=MIXED, query_pre_attn_scalar=8
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, sliding_window=WINDOW, layer_types=MIXED, num_local_experts=4, num_experts_per_tok=2
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _registered():
    register()


def models(family: str, **changes):
    """The same weights under eager and under pyfast attention."""
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.normal_(0, 0.3)
    ours = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="pyfast").float()
    ours.load_state_dict(eager.state_dict())
    assert ours.config._attn_implementation == "pyfast"
    return eager, ours


def tokens(batch: int = 3, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(side: str, length: int = LENGTH) -> torch.Tensor | None:
    """[3, length]: one full row, one short, one of a single token."""
    if side == "none":
        return None
    mask = torch.ones(3, length, dtype=torch.int64)
    for row, gap in ((1, length // 2), (2, length - 1)):
        mask[row, :gap] = 0 if side == "left" else mask[row, :gap]
        mask[row, length - gap :] = 0 if side == "right" else mask[row, length - gap :]
    return mask


def logits_and_gradients(model, ids, mask, **inputs):
    """Logits of the tokens, and the gradient of every parameter of a loss over the tokens."""
    model.zero_grad()
    logits = model(ids, attention_mask=mask, use_cache=False, **inputs).logits
    if mask is not None:
        logits = logits[mask.bool()]
    (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
    return {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_equal(actual: dict, expected: dict, tolerance: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    largest = max(x.norm() for name, x in expected.items() if name != "logits")
    for name, x in expected.items():
        # A gradient far below the others (a weight that attention hardly feels) is compared with the largest.
        scale = x.norm() if name == "logits" else x.norm().clamp_min(1e-3 * largest)
        assert (actual[name] - x).norm() <= tolerance * scale, name


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_eager(family, side):
    eager, ours = models(family)
    ids, mask = tokens(), padding(side)
    expected, actual = logits_and_gradients(eager, ids, mask), logits_and_gradients(ours, ids, mask)
    check_equal(actual, expected)
    if family == "gpt_oss":
        assert all(actual[f"model.layers.{i}.self_attn.sinks"].abs().max() > 0 for i in range(2))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens_equal_eager(family, side, cache):
    """Past the window, so that sliding caches drop keys; the scores say more than the tokens chosen by them."""
    eager, ours = models(family)
    mask = padding(side, 4)
    options = dict(
        attention_mask=torch.ones(3, 4, dtype=torch.int64) if mask is None else mask, max_new_tokens=9,
        do_sample=False, cache_implementation=cache, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    ids = tokens(length=4)
    expected, actual = eager.generate(ids, **options), ours.generate(ids, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    for a, b in zip(actual.scores, expected.scores, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
