"""Translate between TransformerConfig and the config.json of transformers. Whatever has no equal is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyfast.models.config import RopeScaling, TransformerConfig


@dataclass(frozen=True)
class Family:
    """What sets one architecture of transformers apart from the others."""

    architecture: str
    qk_norm: bool = False
    always_qkv_bias: bool = False
    reads: frozenset[str] = frozenset()  # keys with a meaning in this family only


_WINDOWED = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
FAMILIES = {
    "llama": Family("LlamaForCausalLM", reads=frozenset({"attention_bias", "mlp_bias", "pretraining_tp"})),
    "mistral": Family("MistralForCausalLM", reads=frozenset({"sliding_window"})),
    "qwen2": Family("Qwen2ForCausalLM", always_qkv_bias=True, reads=_WINDOWED),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, reads=_WINDOWED | {"attention_bias"}),
}
_READ = frozenset(
    "model_type architectures hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "intermediate_size vocab_size hidden_act max_position_embeddings rms_norm_eps rope_theta rope_scaling "
    "rope_parameters partial_rotary_factor tie_word_embeddings attention_dropout".split()
)
_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
# Keys that change no logit: bookkeeping, generation, initialisation.
_NEUTRAL = frozenset(
    "_name_or_path _attn_implementation attn_implementation bos_token_id eos_token_id pad_token_id dtype torch_dtype "
    "id2label label2id chunk_size_feed_forward initializer_range is_encoder_decoder is_decoder output_attentions "
    "output_hidden_states return_dict transformers_version use_cache problem_type tokenizer_class "
    "default_theta ignore_keys_at_rope_validation base_model_tp_plan base_model_pp_plan".split()
)
_ROPE_KEYS = {
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_max_positions",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
}


def config_from_hugging_face(source: Mapping[str, Any]) -> TransformerConfig:
    """The TransformerConfig of a config.json (or `config.to_dict()`); ValueError names what is not supported."""
    family = family_of(source)
    _refuse_unknown(source, family)
    missing = [key for key in _REQUIRED if source.get(key) is None]
    if missing:
        raise ValueError(f"config keys {', '.join(missing)} are missing")
    for key in (*_REQUIRED, "num_key_value_heads", "head_dim"):
        _check_positive(key, source.get(key))
    heads, width = source["num_attention_heads"], source["hidden_size"]
    theta, scaling = _rope(source)
    bias = family.always_qkv_bias or bool(source.get("attention_bias") or False)
    return TransformerConfig(
        layers=source["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=source.get("num_key_value_heads") or heads,
        head_size=source.get("head_dim") or _default_head_size(width, heads),
        ffn_width=source["intermediate_size"],
        vocab=source["vocab_size"],
        tied_embeddings=bool(source.get("tie_word_embeddings", False)),
        qk_norm=family.qk_norm,
        rope_theta=float(theta),
        rope_scaling=scaling,
        max_positions=source["max_position_embeddings"],
        window=_window(source, family),
        norm_eps=float(source["rms_norm_eps"]),
        attention_bias=bias,
        attention_output_bias=bias and not family.always_qkv_bias,
        ffn_bias=bool(source.get("mlp_bias") or False),
    )


def config_to_hugging_face(config: TransformerConfig) -> dict[str, Any]:
    """A config.json for the first family that can hold `config`. Raises ValueError when none can, naming why."""
    model_type = _family_for(config)
    out: dict[str, Any] = {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn_width,
        "vocab_size": config.vocab,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_to_hugging_face(config.rope_scaling),
        "tie_word_embeddings": config.tied_embeddings,
        "attention_dropout": 0.0,
    }
    reads = FAMILIES[model_type].reads
    if "attention_bias" in reads:
        out["attention_bias"] = config.attention_bias
    if "mlp_bias" in reads:
        out["mlp_bias"] = config.ffn_bias
    if "sliding_window" in reads:
        out["sliding_window"] = config.window
    if "use_sliding_window" in reads:
        out["use_sliding_window"] = config.window is not None
        out["max_window_layers"] = config.layers if config.window is None else 0
    return out


def family_of(source: Mapping[str, Any]) -> Family:
    """The family a config.json names. Raises ValueError for an unknown one."""
    model_type = source.get("model_type")
    known = ", ".join(f"{name} ({family.architecture})" for name, family in FAMILIES.items())
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; supported are {known}")
    architectures = source.get("architectures")
    if architectures and architectures != [FAMILIES[model_type].architecture]:
        raise ValueError(f"architectures {architectures} of model_type {model_type!r} is not supported; {known} are")
    return FAMILIES[model_type]


def _refuse_unknown(source: Mapping[str, Any], family: Family) -> None:
    for key, value in source.items():
        if key in _READ or key in _NEUTRAL or key in family.reads or value is None or value is False:
            continue
        raise ValueError(
            f"config key {key}={value!r} is not supported for {family.architecture}; "
            "if it changes nothing in the model, remove it from config.json"
        )
    required = {"hidden_act": "silu", "attention_dropout": 0, "pretraining_tp": 1, "partial_rotary_factor": 1}
    for key, only in required.items():
        value = source.get(key)
        if value is not None and value != only:
            raise ValueError(f"config key {key}={value!r} is not supported; only {only!r} is")


def _default_head_size(width: int, heads: int) -> int:
    if width % heads:
        raise ValueError(
            f"hidden_size={width} is not a multiple of num_attention_heads={heads} and head_dim is not set"
        )
    return width // heads


def _check_positive(key: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
        raise ValueError(f"config key {key}={value!r} must be a positive number")


def _window(source: Mapping[str, Any], family: Family) -> int | None:
    """Keys a query sees, when it is the same for every layer."""
    # Left out is not null: transformers then takes 4096.
    window = source.get("sliding_window", 4096)
    if "sliding_window" not in family.reads or window is None:
        return None
    if "use_sliding_window" not in family.reads:
        return window
    if not source.get("use_sliding_window", False):
        return None
    layers = source["num_hidden_layers"]
    first = source.get("max_window_layers", 28)
    kinds = source.get("layer_types") or ["full_attention"] * min(first, layers) + ["sliding_attention"] * (
        layers - first
    )
    if len(kinds) != layers:
        raise ValueError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}")
    if len(set(kinds)) > 1 or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"layer_types (or max_window_layers={first}) gives the layers different attention, {sorted(set(kinds))}: "
            "not supported yet; all layers must have the same window"
        )
    return window if kinds[0] == "sliding_attention" else None


def _rope(source: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from rope_parameters (transformers 5) or rope_theta and rope_scaling (4)."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(source.get(key), Mapping | None):
            raise ValueError(f"config key {key}={source[key]!r} must be a mapping, or null")
    _check_positive("rope_theta", source.get("rope_theta"))
    if source.get("rope_parameters") and source.get("rope_scaling"):
        if source["rope_parameters"] != source["rope_scaling"]:
            raise ValueError("config keys rope_parameters and rope_scaling contradict each other; remove one of them")
    rope = dict(source.get("rope_parameters") or source.get("rope_scaling") or {})
    for key, value in rope.items():
        if key not in ("rope_type", "type", "truncate"):
            _check_positive(f"{key} of rope_parameters", value)
    theta = rope.pop("rope_theta", None) or source.get("rope_theta") or 10000.0
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if (rope.pop("partial_rotary_factor", None) or 1) != 1:
        raise ValueError("config key partial_rotary_factor is not supported; all of head_dim must be rotated")
    if kind == "default":
        if rope:
            raise ValueError(
                f"config keys {sorted(rope)} of rope_parameters are not supported with rope_type 'default'"
            )
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"rope_type {kind!r} is not supported; default, linear, llama3 and yarn are")
    if kind == "yarn":
        rope.setdefault("original_max_position_embeddings", source["max_position_embeddings"])
    rope = {key: value for key, value in rope.items() if value is not None}
    unknown = sorted(set(rope) - set(_ROPE_KEYS) - {"factor"})
    if unknown or "factor" not in rope:
        raise ValueError(f"rope_type {kind!r} needs factor and does not support the keys {unknown}")
    renamed = {_ROPE_KEYS[key]: value for key, value in rope.items() if key != "factor"}
    return theta, RopeScaling(kind=kind, factor=float(rope["factor"]), **renamed)


def _rope_to_hugging_face(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    used = {
        "linear": (),
        "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    }[scaling.kind]
    values = {key: getattr(scaling, _ROPE_KEYS[key]) for key in used}
    values = {key: value for key, value in values.items() if value is not None}
    return {"rope_type": scaling.kind, "factor": scaling.factor, **values}


def _family_for(config: TransformerConfig) -> str:
    """The family whose config.json can say everything `config` says."""
    every_bias = config.attention_bias and config.attention_output_bias
    no_bias = not config.attention_bias and not config.attention_output_bias
    if config.qk_norm and not config.ffn_bias and (every_bias or no_bias):
        return "qwen3"
    if not config.qk_norm and not config.ffn_bias and config.attention_bias and not config.attention_output_bias:
        return "qwen2"
    # transformers' Llama wants a width that its heads divide and knows no window; Mistral has no biases
    if not config.qk_norm and config.window is None and config.width % config.heads == 0 and (every_bias or no_bias):
        return "llama"
    if not config.qk_norm and no_bias and not config.ffn_bias:
        return "mistral"
    keys = ("qk_norm", "window", "attention_bias", "attention_output_bias", "ffn_bias", "width", "heads")
    values = ", ".join(f"model.{key}={getattr(config, key)}" for key in keys)
    raise ValueError(f"no family of transformers ({', '.join(FAMILIES)}) can hold {values} together")
