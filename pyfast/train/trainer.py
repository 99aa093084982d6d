"""The training loop.

One rule for scale: the loss of a step is the sum of its tokens' cross entropies over the number of valid tokens of the
whole global batch. That number is summed over all ranks before the first backward; every backward is divided by it, and
gradients are then only ever summed. So neither the micro-batch nor the layout can change a gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyfast.models import Transformer
from pyfast.parallel import ParallelMesh, check_replicas, clip_coefficient, make_buckets
from pyfast.parallel.flat_part import FlatPart
from pyfast.train.config import TrainConfig, resolve
from pyfast.train.data import load_dataset
from pyfast.train.errors import NonFiniteLoss, TrainingError, as_training_error
from pyfast.train.lock import RunLock
from pyfast.train.loss_scale import LossScale
from pyfast.train.metrics import MetricsWriter, Recent, StepMetrics, memory_bytes
from pyfast.train.model import transformer_config
from pyfast.train.optimizer import make_optimizer, parameter_group
from pyfast.train.parameter_groups import check_matches
from pyfast.train.resume import Start, checkpoint_errors, checkpoint_state, find_start, load_state, recorded_config
from pyfast.train.schedule import learning_rate
from pyfast.train.stop import Stop
from pyfast.train.tokenizer import load_tokenizer

FINISHED, STOPPED, NOTHING_TO_DO = "finished", "stopped", "nothing to do"


@dataclass(frozen=True)
class FitResult:
    """How `Trainer.fit` ended. `first`, `last`: metrics of its first and last step, None if it took none; `recent`: the
    means over its last steps.
    """

    status: str  # "finished", "stopped" (a signal) or "nothing to do" (the run was finished before)
    step: int  # steps done, those before a resume included
    checkpoint: Path | None
    first: StepMetrics | None = None
    last: StepMetrics | None = None
    seconds: float = 0.0
    recent: Recent = field(default_factory=Recent)


class Trainer:
    """Trains one model as a `TrainConfig` says; one object on every rank of the run.

    Args:
        config: see `TrainConfig`. Checked against the number of ranks here.
        rank, world_size: of this process; None: those of torch.distributed, (0, 1) when it is not initialized.
        stop: ends the run after the current step once it is requested on any rank.
        display: shows progress (rank 0); None: nothing is printed.

    Raises `ConfigError` for impossible values. `fit` raises `TrainingError` for data, models and checkpoints that do
    not fit together, and `NonFiniteLoss`.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        stop: Stop | None = None,
        display: Any = None,
    ):
        joined = dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if joined else 0
        self.world_size = world_size if world_size is not None else dist.get_world_size() if joined else 1
        self.config = resolve(config, self.world_size)
        self.stop = stop or Stop()
        self.display = display
        self.step = 0
        self.saved: Path | None = None
        self._lock = RunLock(self.config.written_directories)

    def fit(self) -> FitResult:
        """Train from where the run stands to `train.steps`, or until a stop is requested."""
        try:
            return self._fit()
        finally:
            self._lock.release()

    def _fit(self) -> FitResult:
        try:
            start = self._set_up()
        except (ValueError, OSError, ImportError) as error:
            raise as_training_error(error) from error
        if self.step >= self.config.train.steps:
            return FitResult(NOTHING_TO_DO, self.step, self.saved)
        writer = self._on_first_rank(self._open_metrics, "open metrics.jsonl")
        try:
            if self.display is not None:
                self.display.start(self, start, writer.moved_to)
            return self._loop(writer)
        finally:
            if writer is not None:
                writer.close()
            if self.display is not None:
                self.display.close()

    def _open_metrics(self) -> MetricsWriter:
        self._lock.take()
        return MetricsWriter(self.config.log.directory, last_step=self.step)

    # Setting up.

    def _set_up(self) -> Start:
        config = self.config
        self.mesh = ParallelMesh.create(config.parallel, rank=self.rank, world_size=self.world_size)
        self.tokenizer = load_tokenizer(config.data.tokenizer, end_token=config.data.end_token)
        self.model_config = transformer_config(config, self.tokenizer)
        start = self._find_start()
        self.step, self.saved = start.step, start.path
        if self.step >= config.train.steps:
            return start
        self.dataset = load_dataset(
            config.data.path_list(),
            self.tokenizer,
            sequence_length=config.train.sequence_length,
            micro_batch=config.train.micro_batch,
            global_batch=config.train.global_batch,
            seed=config.train.seed,
            vocab=self.model_config.vocab,
            mask_prompt=config.data.mask_prompt,
        )
        self.dtype = getattr(torch, config.train.dtype)
        on_demand = config.parallel.zero == 3  # no rank ever holds the whole model
        self.model = Transformer(
            self.model_config,
            mesh=self.mesh,
            dtype=self.dtype,
            device="meta" if on_demand else None,
            seed=None if on_demand else config.train.seed,
            recompute=config.train.recompute or "none",
            recompute_every=config.train.recompute_every,
        )
        check_matches(self.model.named_parameters(), config.optimizer)
        self.buckets = make_buckets(
            self.model,
            self.mesh,
            stage=config.parallel.zero,
            compression=config.parallel.compression,
            group_of=lambda name, p: parameter_group(name, p, config.optimizer),
            fill=self.model.initial_values(config.train.seed),
        )
        self.optimizer = make_optimizer(self.buckets, config.optimizer)
        self.loss_scale = None
        if config.train.dtype == "float16":
            self.loss_scale = LossScale(config.train.loss_scale, config.train.loss_scale_interval)
        if start.path is not None:
            scalars = load_state(start.path, self.model, self.optimizer, self.mesh)
            if self.loss_scale is not None:
                self.loss_scale.load(scalars)
        self._check_replicas("at the start")
        return start.with_data(self.dataset.fingerprint)

    def _find_start(self) -> Start:
        """Rank 0 looks at the files, all ranks take its answer or raise its error."""

        def look() -> Start:
            self._lock.take_existing()  # from here on no other run changes what is found
            return find_start(self.config, self.model_config, self.tokenizer)

        found = self._on_first_rank(look, "find checkpoint")
        return self.mesh.group("world").all_gather_object(found, name="checkpoint to start from")[0]

    def _on_first_rank(self, work: Callable[[], Any], name: str) -> Any:
        """Do `work` on rank 0 alone; returns its result there, None elsewhere, and raises its error on every rank."""
        result, error = None, None
        if self.rank == 0:
            try:
                result = work()
            except Exception as raised:
                error = raised
        error = self.mesh.group("world").all_gather_object(error, name=name)[0]
        if isinstance(error, OSError):
            raise as_training_error(error) from error
        if error is not None:
            raise error
        return result

    # The loop.

    def _loop(self, writer: MetricsWriter | None) -> FitResult:
        config, began = self.config, time.perf_counter()
        first, last, recent = None, None, Recent()
        while self.step < config.train.steps:
            metrics = self._train_step(self.step + 1)
            if metrics is None:
                break
            self.step += 1
            if config.train.check_replicas and self.step % config.train.check_replicas == 0:
                self._check_replicas(f"after step {self.step}")
            first, last = first or metrics, metrics
            recent.add(metrics)
            if writer is not None:
                writer.write(metrics)
            if self.display is not None:
                self.display.step(metrics)
                self._stop_unless_watched()
            if config.checkpoint.every and self.step % config.checkpoint.every == 0:
                self._save()
        self._save()
        self.buckets.wait_for_parameters()
        status = FINISHED if self.step == config.train.steps else STOPPED
        return FitResult(status, self.step, self.saved, first, last, time.perf_counter() - began, recent)

    def _train_step(self, step: int) -> StepMetrics | None:
        """One optimizer step; None when some rank was asked to stop before it began."""
        began = time.perf_counter()
        batches = self._batches(step)
        valid = self._agree(sum(batch.valid for batch in batches))
        if valid is None:
            return None
        scaling = self.loss_scale
        scale = 1.0 if scaling is None else scaling.scale  # of this backward, whatever the next one uses
        loss = self._forward_backward(batches, scale / max(valid, 1)) / max(valid, 1)
        norm = self.buckets.grad_norm() / scale
        overflow = not math.isfinite(norm)
        if not math.isfinite(loss) or (overflow and (scaling is None or scaling.exhausted)):
            self._fail(step, loss, norm)
        config = self.config
        rate = learning_rate(step, config.train.steps, config.optimizer, global_batch=config.train.global_batch)
        if not overflow:
            limit = config.optimizer.clip_norm
            self.optimizer.step(rate, (1.0 if limit is None else clip_coefficient(norm, limit)) / scale)
        seconds = time.perf_counter() - began
        tokens = config.train.global_batch * config.train.sequence_length
        metrics = StepMetrics(step, loss, norm, rate, tokens, tokens / seconds, seconds, memory_bytes())
        if scaling is None:
            return metrics
        scaling.update(overflow)
        return replace(metrics, loss_scale=scale, skipped=overflow)

    def _batches(self, step: int) -> list[Any]:
        rank, ranks = self.mesh.coordinate("dp"), self.mesh.size("dp")
        return [self.dataset.batch(step - 1, index, rank, ranks) for index in range(self.dataset.micro_batches(ranks))]

    def _agree(self, valid: int) -> int | None:
        """Valid tokens of the global batch; None when a rank was asked to stop. One small all-reduce for both.

        Signals reach the ranks at different steps: only what all of them know can end the run.
        """
        group = self.mesh.group("world")
        if group.size == 1:
            return None if self.stop.requested else valid
        # Ranks of one tensor-parallel group read the same tokens: one of them counts.
        counts = self.mesh.coordinate("tp") == 0
        numbers = torch.tensor([float(valid if counts else 0), float(self.stop.requested)], dtype=torch.float64)
        group.all_reduce(numbers, name="valid tokens")
        total, stops = numbers.tolist()
        return None if stops else int(total)

    def _forward_backward(self, batches: list[Any], factor: float) -> float:
        """Sum the gradients of the step's loss times `factor` into the buckets; returns the global sum of the loss."""
        scale = torch.tensor(factor, dtype=torch.float64)
        total = torch.zeros((), dtype=torch.float64)
        group, pending = self.mesh.group("dp-cp"), None
        for index, batch in enumerate(batches):
            loss = self.model.loss(batch.ids, batch.labels, cu_seqlens=batch.cu_seqlens, positions=batch.positions)
            total += loss.detach()
            last = index == len(batches) - 1
            if last:  # under way during the backward, like the gradients
                pending = group.all_reduce(total, name="loss", async_op=True)
            self.buckets.start_micro_batch(last=last)
            loss.backward(scale.to(loss.dtype))
            self.buckets.end_micro_batch()
        pending.wait()
        self.buckets.finish()
        return float(total)

    def _fail(self, step: int, loss: float, norm: float) -> None:
        """Raise `NonFiniteLoss`, the same on every rank, naming the first parameter whose gradient is not finite."""
        names = [
            name
            for name, part in self.buckets.gradient_parts().items()
            if not bool(torch.isfinite(part.tensor if isinstance(part, FlatPart) else part).all())
        ]
        order = {name: index for index, (name, _) in enumerate(self.model.named_parameters())}
        found = [name for part in self.mesh.group("world").all_gather_object(names, name="non-finite") for name in part]
        where = (
            f"the first parameter with a non-finite gradient is {min(found, key=order.get)}"
            if found
            else "every gradient is finite"
        )
        kept = (
            f"The checkpoint of step {self._saved_step()} is kept at {self.saved}"
            if self.saved
            else "There is no checkpoint yet"
        )
        raise NonFiniteLoss(
            f"Step {step}: the loss is {loss:g} and the gradient norm {norm:g}; {where}. The step was not applied. "
            f"{kept}. Try a lower optimizer.learning_rate, more optimizer.warmup_steps, or optimizer.clip_norm 1."
        )

    def _check_replicas(self, when: str) -> None:
        """Raise `TrainingError`, alike on all ranks, naming the tensors, groups and ranks whose copies differ."""
        try:
            check_replicas(self.buckets.named_whole(self.model.named_parameters()), self.mesh)
        except RuntimeError as error:
            raise TrainingError(f"{when}, {error}") from error

    def _stop_unless_watched(self) -> None:
        """Nobody sees a run whose screen is gone (`| head`, a closed terminal): it saves and ends like at Ctrl-C."""
        if getattr(self.display, "broken", None) is not None:
            self.stop.requested = True

    # Checkpoints.

    def _save(self) -> None:
        """Save the state after `self.step` steps, once."""
        directory = self.config.checkpoint_directory
        if directory is None or self.step == 0 or self._saved_step() == self.step:
            return
        scalars = {
            "optimizer_steps": self.optimizer.steps,
            "tokenizer": self.tokenizer.fingerprint,
            "data": self.dataset.fingerprint,
            **({} if self.loss_scale is None else self.loss_scale.state()),
        }
        from pyfast.parallel import save

        self.buckets.wait_for_parameters()
        with checkpoint_errors():  # such as a full disk; the checkpoints before are intact
            self.saved = save(
                directory,
                self.step,
                checkpoint_state(self.model, self.optimizer, scalars),
                self.mesh,
                keep_last=self.config.checkpoint.keep_last,
                config=recorded_config(self.config, self.model_config),
            )

    def _saved_step(self) -> int:
        return int(self.saved.name.removeprefix("step-")) if self.saved else -1
