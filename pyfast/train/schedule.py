"""The learning rate of each step: pure functions of the step, so that resuming needs no state.

Steps count from 1. During the warmup the rate rises linearly and reaches the peak at `warmup_steps`; then `cosine` and
`linear` fall to `final_fraction` of the peak at the last step, `wsd` (warmup, stable, decay; Hu et al. 2024,
arXiv:2404.06395) stays at the peak and falls linearly over the last `decay_steps`, `constant` stays.
"""

from __future__ import annotations

import math

from pyfast.train.config import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig, *, global_batch: int = 1) -> float:
    """Learning rate of `step` (1 ... steps) of a run of `steps`; beyond the last step it stays where it ended."""
    peak = peak_learning_rate(config, global_batch)
    warmup = config.warmup_steps
    if step < warmup:
        return peak * step / warmup
    return peak * _SCHEDULES[config.schedule](step, steps, config)


def peak_learning_rate(config: OptimizerConfig, global_batch: int) -> float:
    """The peak: `learning_rate`, scaled by the global batch over the one it was chosen for if asked to.

    linear: Goyal et al. 2017 (arXiv:1706.02677), for SGD; sqrt: Malladi et al. 2022 (arXiv:2205.10287), for Adam.
    """
    if config.lr_scaling == "none":
        return config.learning_rate
    ratio = global_batch / config.reference_batch
    return config.learning_rate * (ratio if config.lr_scaling == "linear" else math.sqrt(ratio))


def _constant(step: int, steps: int, config: OptimizerConfig) -> float:
    return 1.0


def _cosine(step: int, steps: int, config: OptimizerConfig) -> float:
    rest = 0.5 * (1.0 + math.cos(math.pi * _progress(step, config.warmup_steps, steps)))
    return config.final_fraction + (1.0 - config.final_fraction) * rest


def _linear(step: int, steps: int, config: OptimizerConfig) -> float:
    return 1.0 + (config.final_fraction - 1.0) * _progress(step, config.warmup_steps, steps)


def _wsd(step: int, steps: int, config: OptimizerConfig) -> float:
    decay = max(steps // 5, 1) if config.decay_steps is None else config.decay_steps
    return 1.0 + (config.final_fraction - 1.0) * _progress(step, steps - decay, steps)


def _progress(step: int, start: int, end: int) -> float:
    """How far `step` is from `start` (0) to `end` (1), held at the ends."""
    if step <= start:
        return 0.0
    return min((step - start) / (end - start), 1.0) if end > start else 1.0


_SCHEDULES = {"constant": _constant, "cosine": _cosine, "linear": _linear, "wsd": _wsd}
