"""Muon: momentum whose matrices are orthogonalized before they are applied (Jordan et al. 2024).

    buf = momentum buf + (1 - momentum) g;  u = (1 - momentum) g + momentum buf      (Nesterov)
    w = (1 - lr weight_decay) w - lr scale orthogonal(u)

`orthogonal` is a Newton-Schulz iteration: it brings all singular values near 1. It needs the whole matrix, so what a
tensor-parallel rank holds of it is gathered first, and every rank computes the same product and takes its part: the
result does not depend on the layout. ZeRO ranks gather the updates of a bucket and compute the matrices of which they
hold a part. A fused matrix (query, key and value; gate and up) is one matrix here, as it is
one parameter; experts [E, out, in] are one matrix each.

scale is 0.2 sqrt(max(out, in)) (Liu et al. 2025, arXiv:2502.16982), which makes the update as large as AdamW's, so both
take one learning rate and weight decay; or sqrt(max(1, out / in)), Jordan's own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyfast.nn.layout import get_layout
from pyfast.parallel import Bucket, FlatBuckets
from pyfast.train.config import OptimizerConfig
from pyfast.train.optimizer import AdamW

# The quintic that lifts small singular values fastest while it keeps all within about 0.7 and 1.2 (Jordan).
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7


def orthogonal(matrices: Tensor, steps: int) -> Tensor:
    """The Newton-Schulz iteration on each matrix of [..., M, N]: the same singular vectors, singular values near 1.

    In the dtype of `matrices`; where bfloat16 products are faster, convert before.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPS)  # its largest singular value is now at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


def update_scale(kind: str, out_features: int, in_features: int) -> float:
    """The factor of an orthogonalized update, `optimizer.muon_scale`."""
    if kind == "original":
        return math.sqrt(max(1.0, out_features / in_features))
    return 0.2 * math.sqrt(max(out_features, in_features))


class Muon(AdamW):
    """Muon for the buckets whose group says so, AdamW for the others."""

    def __init__(self, buckets: FlatBuckets, config: OptimizerConfig):
        self.mesh = buckets.mesh
        super().__init__(buckets, config)

    def kinds_of(self, bucket: Bucket) -> tuple[str, ...]:
        return super().kinds_of(bucket) if bucket.key.rule == "adamw" else ("momentum",)

    def _update(self, bucket: Bucket, state: dict[str, Tensor], rate: float, grad_scale: float, decay: float) -> None:
        if bucket.key.rule == "adamw":
            return super()._update(bucket, state, rate, grad_scale, decay)
        momentum = self.config.muon_momentum
        gradient = bucket.grad_shard.mul_(grad_scale)
        update = gradient.lerp_(state["momentum"].lerp_(gradient, 1 - momentum), momentum)
        weights = state.get("master", bucket.data_shard)
        if decay:
            weights.mul_(1 - rate * decay)
        whole = bucket.gather_shards(update)
        for parameter, slot in zip(bucket.parameters, bucket.slots, strict=True):
            mine = bucket.mine(slot)
            if mine.stop > mine.start or self._is_cut(parameter):  # the other ranks of a cut matrix need this one
                part, scale = self._orthogonal(parameter, whole[slot.place].view(parameter.shape))
                inside = part.reshape(-1)[mine.start - slot.place.start : mine.stop - slot.place.start]
                weights[mine.start - bucket.shard.start : mine.stop - bucket.shard.start].add_(
                    inside, alpha=-rate * scale
                )
        if weights is not bucket.data_shard:
            bucket.data_shard.copy_(weights)
        return None

    def _is_cut(self, parameter: Tensor) -> bool:
        return any(self.mesh.size(shard.mesh_dim) > 1 for shard in get_layout(parameter).shards)

    def _orthogonal(self, parameter: Tensor, local: Tensor) -> tuple[Tensor, float]:
        """This rank's part of the orthogonalized update, and the factor of it."""
        layout = get_layout(parameter)
        cut = self._is_cut(parameter)
        whole = orthogonal(layout.unshard(local, self.mesh) if cut else local, self.config.muon_steps)
        scale = update_scale(self.config.muon_scale, *layout.shape[-2:])
        return (layout.shard(whole, self.mesh) if cut else whole), scale
