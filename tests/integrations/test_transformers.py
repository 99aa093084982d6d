"""attn_implementation="pyfast" against transformers' own eager attention: random tiny models, nothing downloaded."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="4.56", reason="transformers is not installed")

from pyfast.integrations.transformers import register  # noqa: E402

VOCABULARY, LENGTH, WINDOW = 61, 19, 5
VERSION_5 = int(transformers.__version__.partition(".")[0]) >= 5
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
# Both kinds of layers where a model mixes them.
MIXED = ["sliding_attention", "full_attention"]
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED
    ),
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


# ---- float64 --------------------------------------------------------------------------------------------------------


def dense_attention(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **_):
    """The textbook in the dtype of its inputs (transformers' own takes its softmax in float32); mask [B, 1, Sq, Sk]."""
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).mT * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    nothing = ~attention_mask.any(-1, keepdim=True)
    scores = scores.masked_fill(~attention_mask, -torch.inf).masked_fill(nothing, 0.0)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].masked_fill(nothing, 0.0)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2), None


def in_float64(model):
    """The model in float64 throughout: transformers' norms go through float32, and would hide what attention does."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"  # transformers' grouped products know no float64
        if "RMSNorm" in type(module).__name__:
            module.forward = lambda x, weight=module.weight: weight * torch.nn.functional.rms_norm(x, x.shape[-1:])
    return model.double()


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_equals_dense_maths(family, side):
    from transformers.masking_utils import sdpa_mask

    def dense_mask(*args, **options):
        return sdpa_mask(*args, **options | {"allow_is_causal_skip": False})

    transformers.AttentionInterface.register("dense", dense_attention)
    transformers.masking_utils.AttentionMaskInterface.register("dense", dense_mask)
    eager, ours = (in_float64(model) for model in models(family))
    eager.config._attn_implementation = "dense"
    ids, mask = tokens(), padding(side)
    check_equal(logits_and_gradients(ours, ids, mask), logits_and_gradients(eager, ids, mask), tolerance=1e-10)


# ---- packed sequences -----------------------------------------------------------------------------------------------

LENGTHS = (7, 1, 11)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]


@pytest.mark.parametrize(
    "told_by", ["position_ids", "position_ids with a cache", "position_ids and a mask", "cu_seq_lens"]
)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_packed_sequences_equal_each_alone(family, told_by):
    eager, ours = models(family)
    ids = tokens(1)
    alone = torch.cat([eager(piece).logits for piece in ids.split(LENGTHS, 1)], 1)
    inputs = {"position_ids": POSITIONS, "use_cache": told_by == "position_ids with a cache"}
    if told_by == "cu_seq_lens":
        starts = torch.tensor([0, 7, 8, 19], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 11, "max_length_k": 11}
    if told_by == "position_ids and a mask":
        inputs["attention_mask"] = torch.ones_like(ids)
    packed = ours(ids, **inputs).logits
    assert (packed - alone).norm() <= 1e-5 * alone.norm()


def test_packed_sequences_in_several_rows_have_eagers_gradients():
    eager, ours = models("mistral")
    positions = torch.stack([POSITIONS[0], torch.arange(LENGTH), torch.arange(LENGTH) % 6])
    expected = logits_and_gradients(eager, tokens(), None, position_ids=positions)
    check_equal(logits_and_gradients(ours, tokens(), None, position_ids=positions), expected)


def test_packings_that_disagree_are_refused():
    _, ours = models("llama")
    starts = torch.tensor([0, 5, 19], dtype=torch.int32)
    with pytest.raises(ValueError, match="does not agree"):
        ours(tokens(1), position_ids=POSITIONS, use_cache=False, cu_seq_lens_q=starts, cu_seq_lens_k=starts)
    with pytest.raises(ValueError, match="must run from 0 to 19"):
        ours(tokens(1), cu_seq_lens_q=starts[:2], cu_seq_lens_k=starts[:2])


# ---- caches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_a_prompt_in_pieces_equals_eager(family, side, cache):
    """Several queries on an earlier cache: bottom-right alignment, whatever the cache holds behind or drops before."""
    if cache == "static" and family != "llama" and not VERSION_5:
        pytest.skip("transformers 4 fails here with eager attention too")
    mask = torch.ones(3, LENGTH, dtype=torch.int64) if side == "none" else padding(side)

    def run(model):
        config = model.config
        past = transformers.DynamicCache(config=config) if cache == "dynamic" else transformers.StaticCache(config, 32)
        pieces, first = [], 0
        for length in (6, 1, 5, 7):
            last = first + length
            pieces.append(model(tokens()[:, first:last], past_key_values=past, attention_mask=mask[:, :last]).logits)
            first = last
        return torch.cat(pieces, 1)[mask.bool()]

    eager, ours = models(family)
    expected = run(eager)
    assert (run(ours) - expected).norm() <= 1e-5 * expected.norm()


def test_a_token_behind_padding_sees_the_tokens_before_it():
    """Padding between tokens: without a window only the order of the tokens counts."""
    mask = torch.cat([padding("right", 6), torch.ones(3, 1, dtype=torch.int64)], 1)

    def run(model):
        past = transformers.DynamicCache(config=model.config)
        model(tokens(length=6), past_key_values=past, attention_mask=mask[:, :6])
        return model(tokens(length=7)[:, 6:], past_key_values=past, attention_mask=mask).logits

    eager, ours = models("llama")
    expected = run(eager)
    assert (run(ours) - expected).norm() <= 1e-5 * expected.norm()
    _, windowed = models("mistral")
    with pytest.raises(ValueError, match="padding between the tokens"):
        run(windowed)


def test_rows_of_padding_attend_to_nothing():
    _, ours = models("llama")
    mask, seen = padding("left"), []
    ours.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    ours(tokens(), attention_mask=mask)
    assert torch.equal(seen[0].any(-1), mask.bool())


# ---- bidirectional, other routes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("window", [None, 2])
def test_encoders_equal_eager(side, window):
    if not VERSION_5:
        pytest.skip("ModernBERT of transformers 4 does not ask the registry for its attention")
    config = transformers.ModernBertConfig(
        **{**SIZES, "head_dim": None}, global_attn_every_n_layers=2, local_attention=4 if window else 100,
        attention_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    eager = transformers.ModernBertModel._from_config(config, attn_implementation="eager").eval()
    ours = transformers.ModernBertModel._from_config(copy.deepcopy(config), attn_implementation="pyfast").eval()
    ours.load_state_dict(eager.state_dict())
    mask = padding(side)
    seen = slice(None) if mask is None else mask.bool()
    expected = eager(tokens(), attention_mask=mask)[0][seen]
    assert (ours(tokens(), attention_mask=mask)[0][seen] - expected).norm() <= 1e-5 * expected.norm()


def test_activation_checkpointing_and_autocast():
    _, ours = models("mistral")
    ids, mask = tokens(), padding("left")
    expected = logits_and_gradients(ours, ids, mask)
    ours.gradient_checkpointing_enable()
    check_equal(logits_and_gradients(ours.train(), ids, mask), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = ours(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    assert 0 < (logits - expected["logits"]).norm() < 0.1 * expected["logits"].norm()


@pytest.mark.parametrize("side", ["none", "left"])
def test_compiled_equals_eager(side):
    _, ours = models("llama")
    compiled = torch.compile(ours, backend="aot_eager")
    options = dict(attention_mask=padding(side), use_cache=False)
    torch.testing.assert_close(compiled(tokens(), **options).logits, ours(tokens(), **options).logits)


def test_the_example_runs_and_agrees_with_eager():
    root = Path(__file__).parents[2]
    command = [sys.executable, root / "examples" / "transformers_attention.py", "--steps", "2", "--length", "48"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 1e-5


def test_registering_twice_and_by_another_name():
    register()
    register("pyfast_too")
    config = FAMILIES["llama"]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="pyfast_too")
    assert model(tokens()).logits.isfinite().all()


# ---- refused --------------------------------------------------------------------------------------------------------


def test_dropout_is_refused_in_training_only():
    _, ours = models("llama", attention_dropout=0.1)
    ours.eval()(tokens())
    with pytest.raises(ValueError, match="dropout=0.1: pyfast attention has no dropout"):
        ours.train()(tokens())


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_masks_of_any_form_are_refused(dtype):
    _, ours = models("llama")
    with pytest.raises(ValueError, match=r"attention_mask of shape \(3, 1, 19, 19\)"):
        ours(tokens(), attention_mask=torch.ones(3, 1, LENGTH, LENGTH, dtype=dtype))


@pytest.mark.parametrize(
    "inputs",
    [{"output_attentions": True}, {"head_mask": torch.ones(2, 4)}, {"position_bias": torch.ones(1)}, {"alibi": True}],
    ids=lambda x: next(iter(x)),
)
def test_what_attention_does_not_know_is_refused(inputs):
    _, ours = models("llama")
    with pytest.raises(ValueError, match=next(iter(inputs))):
        ours(tokens(), **inputs)


def test_patterns_that_cannot_be_expressed_are_refused():
    from transformers import masking_utils

    from pyfast.integrations.transformers_mask import create_mask

    causal = masking_utils.causal_mask_function
    chunked = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    prefix = masking_utils.or_masks(causal, lambda b, h, q, k: k < 3)
    unknown = masking_utils.and_masks(causal, lambda b, h, q, k: k != 2)
    for function, words in ((chunked, "chunked_overlay"), (prefix, "or_masks"), (unknown, "lambda")):
        with pytest.raises(ValueError, match=words):
            create_mask(1, 8, function, q_length=8)
    with pytest.raises(ValueError, match="last query to be the last key"):
        create_mask(1, 4, causal, q_length=8)
    with pytest.raises(ValueError, match=r"takes \[B, S\]"):
        create_mask(1, 8, causal, torch.ones(8), q_length=8)


def test_a_window_the_mask_does_not_have_is_refused():
    """A layer that asks for a window, under a mask without one: flash attention would apply it, eager would not."""
    _, ours = models("qwen3")
    ours.model.layers[1].self_attn.sliding_window = 3
    with pytest.raises(ValueError, match=r"sliding_window=3, but the model's mask has a window of 0"):
        ours(tokens())
