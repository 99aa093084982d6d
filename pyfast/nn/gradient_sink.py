"""Where a parameter's gradient is wanted: modules of this package write it there instead of returning a tensor of it.

`pyfast.parallel.FlatBuckets` sets a sink on its parameters: a linear layer's product for the weight gradient then goes
straight into the bucket, in float32, without a gradient of the parameter's dtype and a copy of it in between. The layer
returns `nothing()` to autograd in its place, so that autograd still says when the last gradient of the parameter has
come, and adds those that come from elsewhere (a weight used twice).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_ATTRIBUTE = "pyfast_gradient_sink"


class GradientSink(Protocol):
    """What takes the gradient of one parameter."""

    def target(self) -> tuple[Tensor, bool] | None:
        """(tensor to write, shaped like the parameter, in the sum dtype; whether to add to what it holds). The caller
        writes it at once. None where the gradient must be returned to autograd as usual."""

    def nothing(self) -> Tensor:
        """Zeros, shaped like the parameter, to return to autograd instead. Nobody may write to them."""


def set_sink(parameter: Tensor, sink: GradientSink | None) -> None:
    """Let gradients of `parameter` go to `sink`; None: no longer."""
    if sink is not None:
        setattr(parameter, _ATTRIBUTE, sink)
    elif hasattr(parameter, _ATTRIBUTE):
        delattr(parameter, _ATTRIBUTE)


def get_sink(parameter: Tensor) -> GradientSink | None:
    """The sink of `parameter`, if it has one and this is no compiled graph."""
    return None if torch.compiler.is_compiling() else getattr(parameter, _ATTRIBUTE, None)


__all__ = ["GradientSink", "get_sink", "set_sink"]
