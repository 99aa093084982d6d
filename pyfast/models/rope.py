"""Rotary position tables: computed in float64, kept in float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pyfast.models.config import RopeScaling, TransformerConfig


def inverse_frequencies(head_size: int, theta: float, scaling: RopeScaling | None = None) -> tuple[Tensor, float]:
    """(radians per position of each pair, float64 [D/2]; the factor the tables are multiplied with)."""
    frequency = theta ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    if scaling is None:
        return frequency, 1.0
    if scaling.kind == "linear":
        return frequency / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequency, scaling), 1.0
    return _yarn(frequency, head_size, theta, scaling)


def _llama3(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    turns = scaling.original_max_positions * frequency / (2 * math.pi)  # full turns within the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: many turns, left alone; 0: few turns, stretched
    return frequency * (keep + (1 - keep) / scaling.factor)


def _yarn(frequency: Tensor, head_size: int, theta: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    def pair_with(turns: float) -> float:  # the (fractional) pair that makes so many turns in the original context
        return head_size * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    pairs = torch.arange(head_size // 2, dtype=torch.float64)
    stretch = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
    return frequency * (1 - stretch + stretch / scaling.factor), factor


class RotaryTables(nn.Module):
    """cos and sin [max_positions, D/2]: float32 whatever dtype the model is converted to; they follow its device."""

    def __init__(self, config: TransformerConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._config = config
        self.cos, self.sin = self._tables(device)

    def _tables(self, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        config = self._config
        frequency, factor = inverse_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
        positions = torch.arange(config.max_positions, dtype=torch.float64)
        angle = torch.outer(positions, frequency)
        return tuple((table * factor).to(device=device, dtype=torch.float32) for table in (angle.cos(), angle.sin()))

    def _apply(self, fn, recurse: bool = True):
        # model.bfloat16() must not round the tables, so they are no buffers: only the device of a conversion is taken.
        device = fn(self.cos[:0]).device
        if self.cos.is_meta and device.type != "meta":
            self.cos, self.sin = self._tables(device)
        else:
            self.cos, self.sin = self.cos.to(device), self.sin.to(device)
        return super()._apply(fn, recurse)
