"""Root mean square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast import ops
from pyfast.nn.layout import Layout
from pyfast.nn.parameter import LayoutModule, new_parameter


class RMSNorm(LayoutModule):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019): [..., width], like x.

    The weight is replicated. `partial` names mesh dimensions over which each rank sees only a part of the rows, so that
    its gradient is a partial sum there (the norm of the local heads of a tensor-parallel attention).
    """

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-6,
        partial: tuple[str, ...] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter(Layout((width,), partial=partial), None, "tp", fill=1.0, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        # A float32 residual stream over bfloat16 parameters: the row is normalised in float32.
        weight = self.weight if self.weight.dtype == x.dtype else self.weight.to(x.dtype)
        return ops.rms_norm(x, weight, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
