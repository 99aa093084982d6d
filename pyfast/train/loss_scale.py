"""Dynamic loss scaling for float16, whose smallest gradients would otherwise round to zero.

The loss of a step is multiplied by `scale` before backward, and its gradients by 1 / `scale` inside the optimizer step.
When a gradient overflows on any rank the step is left out on all and the scale halves; after `interval` steps in a row
that went well it doubles (Micikevicius et al. 2018, arXiv:1710.03740). The scale is a power of two, so scaling and
unscaling round nothing. All ranks decide from the same global gradient norm: their scales never part.
"""

from __future__ import annotations

import math
from typing import Any

INITIAL_SCALE, INTERVAL = 2.0**16, 2000
SMALLEST_SCALE, LARGEST_SCALE = 1.0, 2.0**32


class LossScale:
    """The factor of the loss in float16 training, and when it changes.

    Args:
        scale: at the start, a power of two of at least 1; None: 65536.
        interval: steps without overflow after which it doubles; None: 2000.
    """

    def __init__(self, scale: float | None = None, interval: int | None = None) -> None:
        self.scale = INITIAL_SCALE if scale is None else float(scale)
        self.interval = INTERVAL if interval is None else interval
        if self.scale < SMALLEST_SCALE or math.frexp(self.scale)[0] != 0.5:
            raise ValueError(f"scale is {scale}; a power of two of at least {SMALLEST_SCALE:g} is needed")
        if self.interval < 1:
            raise ValueError(f"interval is {interval}; a number of steps of at least 1 is needed")
        self.good_steps = 0  # since the scale last changed

    @property
    def exhausted(self) -> bool:
        """Whether the scale cannot fall any more: an overflow now is not the scale's fault."""
        return self.scale <= SMALLEST_SCALE

    def update(self, overflow: bool) -> None:
        """Take in how a step went: call once a step, after the last use of its `scale`."""
        if overflow:
            self.scale, self.good_steps = max(self.scale / 2, SMALLEST_SCALE), 0
            return
        self.good_steps += 1
        if self.good_steps >= self.interval:
            self.scale, self.good_steps = min(self.scale * 2, LARGEST_SCALE), 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"loss_scale": self.scale, "loss_scale_good_steps": self.good_steps}

    def load(self, scalars: dict[str, Any]) -> None:
        """Go on from a checkpoint's values; one of another number format has none, and the scale starts anew."""
        self.scale = scalars.get("loss_scale", self.scale)
        self.good_steps = scalars.get("loss_scale_good_steps", 0)
