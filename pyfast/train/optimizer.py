"""AdamW and SGD over flat buckets: one call updates every parameter of a bucket.

Parameters live in flat buffers (`pyfast.parallel.FlatBuckets`), their gradients in flat float32 ones (float64 for
float64 parameters), and so does the state here. bfloat16 parameters have a float32 master copy that is updated and
rounded into them. The clip coefficient is a factor of the step (`grad_scale`), so
no pass over the gradients is spent on clipping. Where ranks share the buckets out (ZeRO), each has the state of its
own stretch and updates that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast import ops
from pyfast.parallel import Bucket, FlatBuckets
from pyfast.parallel.flat_part import FlatPart
from pyfast.parallel.places import bucket_places
from pyfast.train.config import OptimizerConfig
from pyfast.train.parameter_groups import describe_groups, parameter_group


class FlatOptimizer:
    """What AdamW and SGD share: state in flat tensors beside each bucket, visible by parameter name.

    buckets: a FlatBuckets grouped by `parameter_group`.
    """

    kinds: tuple[str, ...] = ()  # state tensors of the rule

    def __init__(self, buckets: FlatBuckets, config: OptimizerConfig):
        self.buckets = buckets.buckets
        self.update_parameters = buckets.update_parameters
        self.parameter_parts = buckets.parameter_parts
        self.residuals = buckets.residuals
        self.config = config
        self.steps = 0
        self._state: list[dict[str, Tensor]] = [self._new_state(bucket) for bucket in self.buckets]

    def kinds_of(self, bucket: Bucket) -> tuple[str, ...]:
        """State tensors that the rule of a bucket needs."""
        return self.kinds

    def _new_state(self, bucket: Bucket) -> dict[str, Tensor]:
        state = {kind: torch.zeros_like(bucket.grad_shard) for kind in self.kinds_of(bucket)}
        if bucket.data.dtype != bucket.grad_shard.dtype:
            state["master"] = bucket.data_shard.to(bucket.grad_shard.dtype)
        return state

    @torch.no_grad()
    def step(self, learning_rate: float, grad_scale: float = 1.0) -> None:
        """Update every parameter from its gradient times `grad_scale`."""
        self.steps += 1
        for bucket, state in zip(self.buckets, self._state, strict=True):
            group = bucket.key
            decay = self.config.weight_decay if group.weight_decay is None else group.weight_decay
            self._update(bucket, state, learning_rate * group.rate, grad_scale, decay)
        self.update_parameters()

    def _update(self, bucket: Bucket, state: dict[str, Tensor], rate: float, grad_scale: float, decay: float) -> None:
        raise NotImplementedError

    def state_by_name(self) -> dict[str, dict[str, Tensor | FlatPart]]:
        """kind -> parameter name -> view of this rank's state, of the parameter's local shape; its part where ranks
        share the state out."""
        result: dict[str, dict[str, Tensor | FlatPart]] = {}
        for bucket, state in zip(self.buckets, self._state, strict=True):
            for kind, flat in state.items():
                result.setdefault(kind, {}).update(bucket.views(flat))
        return result

    def reset_masters(self) -> None:
        """Take the parameters as they are into the master copies, after they were set from outside."""
        for bucket, state in zip(self.buckets, self._state, strict=True):
            if "master" in state:
                state["master"].copy_(bucket.data_shard)


class AdamW(FlatOptimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), as torch.optim.AdamW computes it."""

    kinds = ("exp_avg", "exp_avg_sq")

    def __init__(self, buckets: FlatBuckets, config: OptimizerConfig):
        super().__init__(buckets, config)
        self._places = {
            bucket: bucket_places(bucket, buckets.mesh)
            for bucket, state in zip(self.buckets, self._state, strict=True)
            if "exp_avg" in state and state["exp_avg"].dtype == torch.bfloat16
        }

    def _new_state(self, bucket: Bucket) -> dict[str, Tensor]:
        state = super()._new_state(bucket)
        if self.config.moments_dtype == "bfloat16" and "exp_avg" in state:
            state.update({kind: state[kind].bfloat16() for kind in AdamW.kinds})
        return state

    def _update(self, bucket: Bucket, state: dict[str, Tensor], rate: float, grad_scale: float, decay: float) -> None:
        config = self.config
        ops.adamw_(
            bucket.data_shard,
            bucket.grad_shard,
            state["exp_avg"],
            state["exp_avg_sq"],
            step=self.steps,
            learning_rate=rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=decay,
            master=state.get("master"),
            grad_scale=grad_scale,
            first_index=bucket.shard.start,
            places=self._places.get(bucket),
        )


class SGD(FlatOptimizer):
    """Stochastic gradient descent with momentum and an L2 term, as torch.optim.SGD computes it."""

    def __init__(self, buckets: FlatBuckets, config: OptimizerConfig):
        self.kinds = ("momentum",) if config.momentum else ()
        super().__init__(buckets, config)

    def _update(self, bucket: Bucket, state: dict[str, Tensor], rate: float, grad_scale: float, decay: float) -> None:
        weights = state.get("master", bucket.data_shard)
        step = bucket.grad_shard.mul_(grad_scale) if grad_scale != 1.0 else bucket.grad_shard
        if decay:
            step.add_(weights, alpha=decay)
        if self.config.momentum:
            step = state["momentum"].mul_(self.config.momentum).add_(step)
        weights.add_(step, alpha=-rate)
        if weights is not bucket.data_shard:
            bucket.data_shard.copy_(weights)


def make_optimizer(buckets: FlatBuckets, config: OptimizerConfig) -> FlatOptimizer:
    """The optimizer that `config.name` names."""
    from pyfast.train.muon import Muon  # which is built on this file

    return {"adamw": AdamW, "sgd": SGD, "muon": Muon}[config.name](buckets, config)


__all__ = ["AdamW", "FlatOptimizer", "SGD", "describe_groups", "make_optimizer", "parameter_group"]
