"""ZeRO for any module, without pyfast's trainer: buckets, reduction, clipping and update behind one object.

    optimizer = ZeroOptimizer(model, mesh, stage=1, optimizer="adamw", lr=3e-4)
    for batches in data:                                     # the micro-batches of one step, on this rank
        for index, batch in enumerate(batches):
            loss = compute_loss(model, batch) / global_count # summed over the ranks, not averaged
            optimizer.backward(loss, last=index == len(batches) - 1)
        optimizer.clip_grad_norm(1.0)
        optimizer.step()

The update rules are those of `pyfast.train.optimizer`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyfast.nn.layout import get_layout
from pyfast.parallel.buckets import clip_coefficient
from pyfast.parallel.checkpoint import CheckpointState
from pyfast.parallel.checkpoint import load as load_checkpoint
from pyfast.parallel.checkpoint import save as save_checkpoint
from pyfast.parallel.flat_part import FlatPart
from pyfast.parallel.mesh import ParallelMesh
from pyfast.parallel.replicas import check_replicas
from pyfast.parallel.zero import make_buckets
from pyfast.parallel.zero_checks import check_model, check_no_gradient_left, check_same_on_all_ranks, check_still_bound
from pyfast.train.config import OptimizerConfig
from pyfast.train.optimizer import make_optimizer, parameter_group


class ZeroOptimizer:
    """Trains `model` on the data-parallel ranks of `mesh`, sharing state out as `stage` of ZeRO says.

    A collective over the mesh, like every method but `start_micro_batch`, `backward` and `zero_grad`, which every rank
    calls alike all the same. Gradients are *summed* over the ranks: divide each rank's loss by the global number of
    samples or tokens. They are kept in float32 (float64) buffers; `p.grad` is None after backward. Parameters without
    gradient in a step count as zero gradients; frozen ones (requires_grad False here) are left alone.

    Args:
        model: any module, on this rank's device, equal on all data-parallel ranks (checked). Its parameters are moved
            into flat buffers: do not cast or move it afterwards, and write values with `copy_`.
        mesh: whose "dp" and "cp" ranks share the work; parameters may be cut over others, as their `Layout` says.
        stage: 0: every rank holds everything; 1: optimizer state and float32 masters are shared out; 2: gradients too;
            3: parameters too, which are there only while the modules they belong to compute, and within
            `whole_parameters`. All ranks then call the layers of the model alike.
        optimizer: "adamw", "sgd" or "muon" (for matrices that are no embedding or head; AdamW for the rest).
        lr: learning rate; set the attribute `lr` to change it.
        weight_decay: decoupled for adamw and muon, L2 for sgd; of matrices only, unless `decay_all`.
        betas, eps: of adamw. momentum: of sgd.
        bucket_mb: size of a bucket's gradients in MiB.
        fill, device: at stage 3 the model may be on the meta device; `fill(name, tensor)` then writes the values of
            each parameter (of its local shape), which will live on `device`, and no rank ever holds the whole model.
        compression: of gradients on their way between ranks: "none", "bf16", "fp16" or "one_bit".

    Raises:
        ValueError: for a stage, rule or number that is not allowed. RuntimeError: the ranks' parameters differ.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: ParallelMesh,
        *,
        stage: int,
        optimizer: str = "adamw",
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        decay_all: bool = False,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.0,
        bucket_mb: float = 16,
        fill: Callable[[str, Tensor], None] | None = None,
        device: torch.device | str = "cpu",
        compression: str = "none",
    ) -> None:
        self.model, self.mesh, self.lr = model, mesh, lr
        config = OptimizerConfig(
            name=optimizer,
            learning_rate=lr,
            weight_decay=weight_decay,
            decay_all=decay_all,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            momentum=momentum,
        )
        check_model(model)
        settings = {"stage": stage, "compression": compression, "bucket_mb": bucket_mb, **vars(config)}
        check_same_on_all_ranks(settings, model, mesh)
        check_replicas(((name, p) for name, p in model.named_parameters() if not p.is_meta), mesh)
        self.buckets = make_buckets(
            model,
            mesh,
            stage=stage,
            group_of=lambda name, p: parameter_group(name, p, config),
            bucket_bytes=int(bucket_mb * (1 << 20)),
            fill=fill,
            device=device,
            compression=compression,
        )
        self._rule = make_optimizer(self.buckets, config)
        self._summed = False
        self._grad_scale = 1.0

    @property
    def steps(self) -> int:
        """Steps taken."""
        return self._rule.steps

    def start_micro_batch(self, *, last: bool) -> None:
        """Call before the backward of each micro-batch, unless `backward` does it; `last`: of this step."""
        check_still_bound(self.buckets)
        self.buckets.start_micro_batch(last=last)
        self._summed = False

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Backward of one micro-batch. In the last one the gradients are reduced as they arrive."""
        self.start_micro_batch(last=last)
        loss.backward()
        self.buckets.end_micro_batch()

    def grad_norm(self) -> float:
        """Euclidean norm of the summed gradient of the whole model; every parameter counted once, alike on all ranks.

        After the last micro-batch.
        """
        self._finish()
        return self.buckets.grad_norm()

    def clip_grad_norm(self, max_norm: float) -> float:
        """Let the next step scale the gradient to a norm of at most `max_norm`; returns the norm before that."""
        norm = self.grad_norm()
        self._grad_scale = clip_coefficient(norm, max_norm)
        return norm

    def gradients(self) -> dict[str, Tensor]:
        """Parameter name -> a copy of its summed gradient, whole; after the last micro-batch, before `step`."""
        self._finish()
        return {name: self.buckets.gather(name, part).clone() for name, part in self.buckets.gradient_parts().items()}

    def step(self) -> None:
        """Update the parameters with learning rate `lr`. The other ranks' parts are on their way when it returns: the
        next call of the model, or `wait_for_parameters`, waits for them."""
        self._finish()
        self._rule.step(self.lr, self._grad_scale)
        self._summed, self._grad_scale = False, 1.0

    def zero_grad(self) -> None:
        """Forget the gradients of a step that will not be taken; there is nothing to zero between steps."""
        self.buckets.discard()
        self._summed, self._grad_scale = False, 1.0

    def wait_for_parameters(self) -> None:
        """Call before reading parameters outside the model's forward: to evaluate, copy or save them. At stage 3 read
        them within `whole_parameters`."""
        self.buckets.wait_for_parameters()

    @contextmanager
    def whole_parameters(self, *, write: bool = False) -> Iterator[None]:
        """Within it every parameter can be read on every rank, at stage 3 at the price of the whole model's memory.

        write: keep what is written to them, alike on all ranks (as by `model.load_state_dict`).
        """
        with self.buckets.whole_parameters(write=write):
            yield
        if write:
            self._rule.reset_masters()

    def close(self) -> None:
        """Take the hooks off the model, which stays as it is."""
        self.wait_for_parameters()
        self.buckets.close()

    def _finish(self) -> None:
        if not self._summed:
            check_no_gradient_left(self.model)
            self.buckets.finish()
            self._summed = True

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The state as one process would have it, the same on every rank and in any layout and stage.

        {"steps": int, "state": {kind: {parameter name: tensor on the CPU}}}. It holds the state of the whole model:
        `save` writes a large one without bringing it together.
        """
        layouts = {name: get_layout(p) for name, p in self.model.named_parameters()}
        state: dict[str, dict[str, Tensor]] = {}
        for kind, parts in self._rule.state_by_name().items():
            state[kind] = {}
            for name, part in parts.items():
                whole = layouts[name].unshard(self.buckets.gather(name, part), self.mesh)
                state[kind][name] = whole.cpu().clone()
        return {"steps": self.steps, "state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of `state_dict()` of any layout and stage. The parameters are the model's own matter: load
        them with `model.load_state_dict` on every rank, before or after."""
        parts, given = self._rule.state_by_name(), state_dict["state"]
        wanted = {(kind, name) for kind, names in parts.items() for name in names}
        found = {(kind, name) for kind, names in given.items() for name in names}
        if wanted != found:
            raise ValueError(
                f"state_dict: lacks {sorted(wanted - found)[:5]}, and has {sorted(found - wanted)[:5]} that this "
                "optimizer has not; it must come from the same rule, dtype and model"
            )
        layouts = {name: get_layout(p) for name, p in self.model.named_parameters()}
        for kind, name in sorted(wanted):
            local, part = layouts[name].shard(given[kind][name], self.mesh), parts[kind][name]
            if isinstance(part, FlatPart):
                part.tensor.copy_(part.of(local))
            else:
                part.copy_(local)
        self._rule.steps = state_dict["steps"]

    def save(
        self,
        directory: str | os.PathLike[str],
        step: int,
        *,
        scalars: Mapping[str, Any] | None = None,
        keep_last: int | None = None,
    ) -> Path:
        """Write model and optimizer as a checkpoint (`pyfast.parallel.save`), each rank the part that it holds."""
        self.wait_for_parameters()
        state = self._checkpoint_state({**(scalars or {}), "optimizer_steps": self.steps})
        return save_checkpoint(directory, step, state, self.mesh, keep_last=keep_last)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Fill model and optimizer from a checkpoint of any layout and stage; returns the scalars it was saved with."""
        self.wait_for_parameters()
        state = self._checkpoint_state({})
        load_checkpoint(path, state, self.mesh)
        self._rule.update_parameters()
        self._rule.steps = state.scalars.pop("optimizer_steps", 0)
        return state.scalars

    def _checkpoint_state(self, scalars: dict[str, Any]) -> CheckpointState:
        parameters = {**dict(self.model.named_parameters()), **self.buckets.parameter_parts()}
        return CheckpointState(parameters, self._rule.state_by_name() | self.buckets.residuals(), scalars)
