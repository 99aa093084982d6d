"""transformers is the oracle: the same logits, gradients and bits for every family that can be imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from pyfast.models import Transformer, TransformerConfig, from_hugging_face, save_hugging_face, to_hugging_face
from pyfast.models.hugging_face import hugging_face_names
from pyfast.models.hugging_face_config import config_from_hugging_face, config_to_hugging_face

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, every bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one kv head of size 12": ("Llama", {"num_key_value_heads": 1, "head_dim": 12}),
    "llama, theta": ("Llama", {"rms_norm_eps": 1e-5, "rope_theta": 77.0}),
    "llama, linear": ("Llama", {"rope_theta": 77.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "llama, llama3": ("Llama", {"rope_theta": 500.0, "rope_scaling": LLAMA3}),
    "llama, yarn": ("Llama", {"rope_theta": 500.0, "rope_scaling": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, bias, tied": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3, window": (
        "Qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "mistral, window": ("Mistral", {"sliding_window": 4}),
    "mistral, 3 heads of size 6": (
        "Mistral",
        {"sliding_window": None, "head_dim": 6, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
}


def theirs_of(family: str, options: dict) -> torch.nn.Module:
    """A tiny transformers model with weights far from their initial values, so that every part shows in the logits."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    return model


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_equal_transformers(case):
    theirs = theirs_of(*CASES[case])
    ours = from_hugging_face(theirs)
    ids, labels = tokens(2, 19), tokens(2, 19, seed=1)
    labels[0, :3] = -100
    expected = theirs(input_ids=ids).logits
    torch.testing.assert_close(ours(ids), expected, rtol=1e-5, atol=1e-5)

    F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    loss = ours.loss(ids, labels)
    loss.backward()
    their_parameters = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        wanted = torch.cat([their_parameters[piece].grad for piece in hugging_face_names(name)])
        scale = wanted.abs().max()
        torch.testing.assert_close(
            parameter.grad / scale, wanted / scale, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_there_and_back_is_bitwise(case, dtype):
    theirs = theirs_of(*CASES[case]).to(dtype)
    ours = from_hugging_face(theirs)
    assert next(ours.parameters()).dtype == dtype
    back = to_hugging_face(ours)
    before = theirs.state_dict()
    assert set(back) == set(before)
    assert all(torch.equal(back[name], before[name]) for name in before)
    type(theirs)(theirs.config).to(dtype).load_state_dict(back, strict=True)


@pytest.mark.parametrize(
    "case", ["llama, tied", "llama, llama3", "llama, yarn", "qwen3, window", "mistral, window", "qwen2"]
)
def test_a_saved_directory_loads_on_both_sides(case, tmp_path):
    theirs = theirs_of(*CASES[case])
    save_hugging_face(from_hugging_face(theirs), tmp_path)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert type(reloaded) is type(theirs)
    before, after = theirs.state_dict(), reloaded.state_dict()
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    ids = tokens(1, 19)
    with torch.no_grad():
        torch.testing.assert_close(reloaded(input_ids=ids).logits, theirs(input_ids=ids).logits)
    ours = from_hugging_face(tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in to_hugging_face(ours).items())


@pytest.mark.parametrize("shard", ["100GB", "10KB"])
def test_a_directory_of_transformers_loads(shard, tmp_path):
    theirs = theirs_of("Llama", {"tie_word_embeddings": True})
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "10KB")
    back = to_hugging_face(from_hugging_face(tmp_path))
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.state_dict().items())


def test_loading_a_directory_does_not_import_transformers(tmp_path):
    save_hugging_face(Transformer(TransformerConfig(layers=1, width=8, heads=2, vocab=11)), tmp_path)
    code = (
        "import sys; from pyfast.models import from_hugging_face; from_hugging_face(sys.argv[1]);"
        "assert 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "change,named",
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"sliding_window": 5}, "sliding_window"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, named):
    source = transformers.LlamaConfig(**SIZES).to_dict()
    config_from_hugging_face(source)
    with pytest.raises(ValueError, match=named):
        config_from_hugging_face({**source, **change})


def test_a_config_json_of_the_years_before_reads_the_same():
    """Keys as transformers 4 wrote them: rope_theta at the top, the kind of scaling under "type"."""
    source = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": [1, 2],
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "linear", "factor": 8.0},
        "rope_theta": 500000.0,
        "transformers_version": "4.40.0",
        "use_cache": True,
        "vocab_size": 67,
    }
    wanted = transformers.LlamaConfig(**source).to_dict()
    config = config_from_hugging_face(source)
    assert config == config_from_hugging_face(wanted)
    assert (config.rope_theta, config.rope_scaling.kind, config.rope_scaling.factor) == (500000.0, "linear", 8.0)
    assert (config.kv_heads, config.head_size, config.tied_embeddings) == (4, 8, False)
    del source["hidden_size"]
    with pytest.raises(ValueError, match="hidden_size"):
        config_from_hugging_face(source)


def test_weights_of_several_dtypes_need_a_choice():
    theirs = theirs_of("Llama", {})
    theirs.model.norm.bfloat16()
    with pytest.raises(ValueError, match="model.norm.weight is torch.bfloat16"):
        from_hugging_face(theirs)
    assert next(from_hugging_face(theirs, dtype=torch.float64).parameters()).dtype == torch.float64


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        save_hugging_face(Transformer(TransformerConfig(layers=1, width=8, heads=2, vocab=11)), tmp_path / "file")


def test_layers_with_different_windows_are_refused():
    source = transformers.Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1).to_dict()
    with pytest.raises(ValueError, match="not supported yet"):
        config_from_hugging_face(source)


def test_a_config_that_no_family_can_hold_is_refused_before_anything_is_written(tmp_path):
    model = Transformer(TransformerConfig(layers=1, width=8, heads=2, vocab=11, qk_norm=True, ffn_bias=True))
    with pytest.raises(ValueError, match="qk_norm"):
        save_hugging_face(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", CASES)
def test_config_there_and_back(case):
    family, options = CASES[case]
    config = config_from_hugging_face(getattr(transformers, f"{family}Config")(**{**SIZES, **options}).to_dict())
    assert config.rope_theta == options.get("rope_theta", 10000.0)
    assert (config.rope_scaling is None) == ("rope_scaling" not in options)
    assert config_from_hugging_face(json.loads(json.dumps(config_to_hugging_face(config)))) == config


def broken_directory(tmp_path, edit):
    from safetensors.torch import load_file, save_file

    save_hugging_face(Transformer(TransformerConfig(layers=1, width=8, heads=2, vocab=11)), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    edit(state)
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    "edit,named",
    [
        (lambda state: state.pop("model.norm.weight"), "model.norm.weight"),
        (lambda state: state.pop("lm_head.weight"), "lm_head.weight"),
        (lambda state: state.update({"model.extra.weight": torch.zeros(1)}), "model.extra.weight"),
        (lambda state: state.update({"model.norm.weight": torch.zeros(9)}), "model.norm.weight"),
        (lambda state: state.update({"model.layers.0.self_attn.q_proj.weight": torch.zeros(1, 8)}), "q_proj"),
    ],
)
def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path, edit, named):
    with pytest.raises(ValueError, match=named):
        from_hugging_face(broken_directory(tmp_path, edit))


def test_a_directory_without_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match="config.json"):
        from_hugging_face(tmp_path)
    source = config_to_hugging_face(TransformerConfig(layers=1, width=8, heads=2, vocab=11))
    (tmp_path / "config.json").write_text(json.dumps(source))
    with pytest.raises(ValueError, match="safetensors"):
        from_hugging_face(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_is_named(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(config_to_hugging_face(TransformerConfig(2, 16, 2, 2, vocab=11))))
    (tmp_path / name).write_bytes(b"\0{")
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        from_hugging_face(tmp_path)
