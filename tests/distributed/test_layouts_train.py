"""Any layout, same loss: the real Trainer on gloo ranks against the same Trainer in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

STEPS = 10
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
# tensor, data, micro_batch, zero
LAYOUTS = [(1, 2, 1, 0), (2, 1, 2, 0), (2, 2, 1, 0), (4, 1, 4, 0), (1, 4, 2, 0), (4, 2, 2, 0)]
LAYOUTS += [(1, 2, 1, 1), (1, 2, 1, 2), (2, 2, 2, 1), (2, 2, 1, 2), (1, 4, 1, 3), (2, 2, 2, 3)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Prompts without loss and answers of very different lengths: valid tokens differ between ranks, micro-batches."""
    path = tmp_path_factory.mktemp("layouts") / "pairs.jsonl"
    with path.open("w") as file:
        for index in range(60):
            long, short = "abcdefghij klmno"[index % 7 :] * 4, "xyz"[: index % 4]
            pair = (long, short) if index % 3 else (short + "?", long)
            file.write(json.dumps({"prompt": pair[0], "completion": pair[1]}) + "\n")
    return path


def train(
    rank: int,
    world_size: int,
    path: str,
    tensor: int,
    micro_batch: int,
    dtypes: list[str],
    directory: str,
    zero: int = 0,
) -> list:
    """Losses and gradient norms of each step for each dtype, as rank 0 wrote them; and whether all replicas agree."""
    from pyfast.parallel import check_replicas
    from pyfast.train.config import from_dict
    from pyfast.train.metrics import read
    from pyfast.train.trainer import Trainer

    results = []
    for dtype in dtypes:
        config = from_dict(
            {
                "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 4, "ffn_width": 48, "qk_norm": True},
                "data": {"paths": path, "mask_prompt": True},
                "parallel": {"tensor": tensor, "zero": zero},
                "train": {
                    "steps": STEPS,
                    "sequence_length": 24,
                    "micro_batch": micro_batch,
                    "global_batch": 8,
                    "dtype": dtype,
                },
                "optimizer": {
                    "name": "sgd",
                    "learning_rate": 0.5,
                    "weight_decay": 0.0,
                    "schedule": "constant",
                    "warmup_steps": 0,
                    "clip_norm": 1.0,
                },
                "checkpoint": {"directory": None},
                "log": {"directory": f"{directory}/{dtype}"},
            }
        )
        trainer = Trainer(config, rank=rank, world_size=world_size)
        trainer.fit()
        check_replicas(trainer.buckets.named_whole(trainer.model.named_parameters()), trainer.mesh)
        if rank == 0:
            lines = read(f"{directory}/{dtype}/metrics.jsonl")
            results.append([(line["loss"], line["grad_norm"]) for line in lines])
    return results


@pytest.fixture(scope="module")
def one_process(texts, tmp_path_factory):
    """The reference: one rank, the whole global batch in one micro-batch."""
    directory = str(tmp_path_factory.mktemp("reference"))
    return train(0, 1, str(texts), 1, 8, list(TOLERANCE), directory)


@pytest.mark.parametrize("tensor, data, micro_batch, zero", LAYOUTS)
def test_every_layout_and_micro_batch_gives_the_loss_and_norm_of_one_process(
    ranks, one_process, texts, tmp_path, tensor, data, micro_batch, zero
):
    answers = ranks.run(
        train, tensor * data, str(texts), tensor, micro_batch, list(TOLERANCE), str(tmp_path), zero, timeout=120
    )
    for (dtype, tolerance), ours, reference in zip(TOLERANCE.items(), answers[0], one_process, strict=True):
        assert len(ours) == STEPS
        for step, (a, b) in enumerate(zip(ours, reference, strict=True), start=1):
            assert a == pytest.approx(b, rel=tolerance), f"{dtype}, step {step}"


def test_the_reference_learns_and_is_clipped(one_process):
    """So that equality above is not the equality of runs that stand still."""
    for losses in one_process:
        assert losses[-1][0] < 0.8 * losses[0][0]
        assert max(norm for _, norm in losses) > 1.0


def resume(
    rank: int,
    world_size: int,
    path: str,
    tensor: int,
    directory: str,
    steps: int,
    zero: int = 0,
    dtype: str = "float32",
) -> int:
    from pyfast.train.config import from_dict
    from pyfast.train.trainer import Trainer

    config = from_dict(
        {
            "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 4, "ffn_width": 48},
            "data": {"paths": path},
            "parallel": {"tensor": tensor, "zero": zero},
            "train": {"steps": 6, "sequence_length": 24, "micro_batch": 2, "global_batch": 4, "dtype": dtype},
            "optimizer": {"warmup_steps": 2},
            "checkpoint": {"every": 3},
            "log": {"directory": directory},
        }
    )
    trainer = Trainer(config, rank=rank, world_size=world_size)
    trainer.stop = _StopAt(trainer, steps if rank == world_size - 1 else None)  # one rank is asked: all stop
    return trainer.fit().step


class _StopAt:
    """A stop that is requested once the trainer has done so many steps."""

    def __init__(self, trainer, step):
        self.trainer, self.step = trainer, step

    @property
    def requested(self) -> bool:
        return self.trainer.step == self.step


def test_a_stop_on_one_rank_stops_all_and_the_resumed_run_has_the_same_bits(ranks, texts, tmp_path):
    from pyfast.train.metrics import read

    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    assert ranks.run(resume, 2, str(texts), 2, whole, 99) == [6, 6]
    assert ranks.run(resume, 2, str(texts), 2, parts, 4) == [4, 4]
    assert ranks.run(resume, 2, str(texts), 2, parts, 99) == [6, 6]
    for a, b in zip(read(f"{whole}/metrics.jsonl"), read(f"{parts}/metrics.jsonl"), strict=True):
        assert [a[key] for key in ("step", "loss", "grad_norm", "learning_rate")] == [
            b[key] for key in ("step", "loss", "grad_norm", "learning_rate")
        ]


def test_a_run_goes_on_under_another_layout(ranks, texts, tmp_path):
    from pyfast.train.metrics import read

    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    assert resume(0, 1, str(texts), 1, whole, 99) == 6
    assert ranks.run(resume, 2, str(texts), 2, parts, 3) == [3, 3]  # tensor parallel 2
    assert ranks.run(resume, 2, str(texts), 1, parts, 5) == [5, 5]  # data parallel 2
    assert resume(0, 1, str(texts), 1, parts, 99) == 6
    for a, b in zip(read(f"{whole}/metrics.jsonl"), read(f"{parts}/metrics.jsonl"), strict=True):
        assert (a["loss"], a["grad_norm"]) == pytest.approx((b["loss"], b["grad_norm"]), rel=1e-5)


def test_a_run_goes_on_under_another_stage_of_zero(ranks, texts, tmp_path):
    """Tensor parallel x stage 1, stages 2 and 3 of data parallel alone, one process: as if nothing had changed."""
    from pyfast.train.metrics import read

    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    assert resume(0, 1, str(texts), 1, whole, 99, 0, "float64") == 6
    assert ranks.run(resume, 4, str(texts), 2, parts, 2, 1, "float64") == [2] * 4
    assert ranks.run(resume, 2, str(texts), 1, parts, 3, 2, "float64") == [3, 3]
    assert ranks.run(resume, 4, str(texts), 2, parts, 5, 3, "float64") == [5] * 4
    assert resume(0, 1, str(texts), 1, parts, 99, 0, "float64") == 6
    for a, b in zip(read(f"{whole}/metrics.jsonl"), read(f"{parts}/metrics.jsonl"), strict=True):
        assert (a["loss"], a["grad_norm"]) == pytest.approx((b["loss"], b["grad_norm"]), rel=1e-10)


def test_a_bfloat16_run_under_zero_resumes_with_the_same_bits(ranks, texts, tmp_path):
    """Only the shards of the float32 masters are stored and read, in another stage than they were written."""
    from pyfast.train.metrics import read

    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    assert ranks.run(resume, 2, str(texts), 1, whole, 99, 1, "bfloat16") == [6, 6]
    assert ranks.run(resume, 2, str(texts), 1, parts, 2, 2, "bfloat16") == [2, 2]
    assert ranks.run(resume, 2, str(texts), 1, parts, 4, 3, "bfloat16") == [4, 4]
    assert ranks.run(resume, 2, str(texts), 1, parts, 99, 1, "bfloat16") == [6, 6]
    for a, b in zip(read(f"{whole}/metrics.jsonl"), read(f"{parts}/metrics.jsonl"), strict=True):
        assert a["loss"] == b["loss"]
        # stage 3 has other buckets, over which the same gradients' squares are summed in another order
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-13)
