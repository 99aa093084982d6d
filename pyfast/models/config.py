"""The shape of a decoder-only transformer, validated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real


def _fail(key: str, value: object, allowed: str) -> None:
    raise ValueError(f"model.{key} is {value!r}; allowed: {allowed}")


def _check_int(config: object, key: str, least: int = 1, prefix: str = "") -> None:
    value = getattr(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        _fail(prefix + key, value, f"a whole number of at least {least}")


def _check_float(config: object, key: str, *, above: float = 0.0, prefix: str = "") -> None:
    value = getattr(config, key)
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value <= above:
        _fail(prefix + key, value, f"a finite number above {above:g}")


def _check_bool(config: object, key: str) -> None:
    if not isinstance(getattr(config, key), bool):
        _fail(key, getattr(config, key), "true or false")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those of pretraining.

    kind "linear": every frequency divided by `factor`. "llama3": only wavelengths long against
    `original_max_positions`, with a smooth passage between original/high and original/low (Llama 3.1). "yarn": a ramp
    between beta_fast and beta_slow turns, and tables multiplied by `attention_factor` (Peng et al., 2023; default
    0.1 ln(factor) + 1). Raises ValueError naming the key.
    """

    kind: str
    factor: float
    original_max_positions: int | None = None
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        prefix = "rope_scaling."
        if self.kind not in ("linear", "llama3", "yarn"):
            _fail(prefix + "kind", self.kind, "linear, llama3 or yarn")
        for key in ("factor", "low_frequency_factor", "high_frequency_factor", "beta_fast", "beta_slow"):
            _check_float(self, key, prefix=prefix)
        if self.kind != "linear":
            _check_int(self, "original_max_positions", prefix=prefix)
        if self.attention_factor is not None:
            _check_float(self, "attention_factor", prefix=prefix)
        if self.kind == "llama3" and self.high_frequency_factor <= self.low_frequency_factor:
            _fail(prefix + "high_frequency_factor", self.high_frequency_factor, "more than low_frequency_factor")


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder in the manner of Llama, Qwen and Mistral. Every wrong value is a ValueError naming key and value.

    layers, width (H), heads (Nq), vocab (V): sizes.
    kv_heads (Nk): must divide heads; default heads. head_size (D): default width / heads, else independent of width.
    ffn_width (F): default 8/3 width, rounded up to a multiple of 64.
    tied_embeddings: the embedding is also the head. qk_norm: RMSNorm on queries and keys (Qwen3).
    rope_theta, rope_scaling: base of the rotary frequencies, and their stretching (a RopeScaling or a mapping).
    max_positions: rows of the rotary tables; no position may reach it.
    window: keys a query sees, its own among them (Hugging Face's sliding_window); None: all earlier ones.
    norm_eps: of every RMSNorm. attention_bias: of q, k and v. attention_output_bias, ffn_bias: of the others.
    residual_dtype: "float32" keeps the residual stream in float32 over half-precision parameters; None: their dtype.
    initial_std: standard deviation of initial weights; those that write to the residual stream: / sqrt(2 layers).
    experts ... capacity_factor: mixture of experts, not supported yet.
    """

    layers: int = 4
    width: int = 256
    heads: int = 4
    kv_heads: int | None = None
    head_size: int | None = None
    ffn_width: int | None = None
    vocab: int = 512
    tied_embeddings: bool = False
    qk_norm: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_positions: int = 32768
    window: int | None = None
    norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_output_bias: bool = False
    ffn_bias: bool = False
    residual_dtype: str | None = None
    initial_std: float = 0.02
    experts: int = 0
    experts_per_token: int | None = None
    expert_width: int | None = None
    shared_experts: int = 0
    moe_every: int | None = None
    aux_loss_weight: float = 0.0
    z_loss_weight: float = 0.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        self._refuse_later_features()
        for key in ("layers", "width", "heads", "vocab", "max_positions"):
            _check_int(self, key)
        self._fill_defaults()
        for key in ("kv_heads", "head_size", "ffn_width"):
            _check_int(self, key)
        if self.heads % self.kv_heads:
            divisors = ", ".join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)
            _fail("kv_heads", self.kv_heads, f"a divisor of model.heads={self.heads}: {divisors}")
        if self.head_size % 2:
            _fail("head_size", self.head_size, "an even number (rotary positions turn pairs)")
        if self.window is not None:
            _check_int(self, "window")
        for key in ("rope_theta", "norm_eps", "initial_std"):
            _check_float(self, key)
        for key in ("tied_embeddings", "qk_norm", "attention_bias", "attention_output_bias", "ffn_bias"):
            _check_bool(self, key)
        if self.residual_dtype not in (None, "float32"):
            _fail("residual_dtype", self.residual_dtype, "float32, or null for the parameters' dtype")

    def _refuse_later_features(self) -> None:
        defaults = TransformerConfig.__dataclass_fields__
        for key in (
            "experts",
            "experts_per_token",
            "expert_width",
            "shared_experts",
            "moe_every",
            "aux_loss_weight",
            "z_loss_weight",
            "capacity_factor",
        ):
            if getattr(self, key) != defaults[key].default:
                raise ValueError(
                    f"model.{key} is {getattr(self, key)!r}: mixture of experts is not supported yet; "
                    f"leave it at {defaults[key].default!r}"
                )

    def _fill_defaults(self) -> None:
        def put(key: str, value: object) -> None:
            object.__setattr__(self, key, value)

        if self.kv_heads is None:
            put("kv_heads", self.heads)
        if self.head_size is None:
            if self.width % self.heads:
                _fail("width", self.width, f"a multiple of model.heads={self.heads}, or give model.head_size")
            put("head_size", self.width // self.heads)
        if self.ffn_width is None:
            put("ffn_width", -(-8 * self.width // (3 * 64)) * 64)
        if isinstance(self.rope_scaling, dict):
            unknown = set(self.rope_scaling) - set(RopeScaling.__dataclass_fields__)
            missing = {"kind", "factor"} - set(self.rope_scaling)
            optional = [name for name in RopeScaling.__dataclass_fields__ if name not in ("kind", "factor")]
            if unknown or missing:
                _fail("rope_scaling", self.rope_scaling, f"kind, factor (both needed), {', '.join(optional)}")
            put("rope_scaling", RopeScaling(**self.rope_scaling))
        elif not isinstance(self.rope_scaling, RopeScaling | None):
            _fail("rope_scaling", self.rope_scaling, "null, a RopeScaling or a mapping of its keys")
