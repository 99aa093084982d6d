"""One training step of one fixed small model in several layouts, against the same machine shared without communication.

    python bench/train_step.py                       # one, baseline, tp2, dp2
    python bench/train_step.py --layouts baseline dp2 torch-ddp --rounds 15

Two processes with one thread each stay up and run the layouts in turn, round after round, so a change in the machine's
speed hits all of them alike. A layout is

    one         rank 0 trains alone, rank 1 sleeps
    baseline    both ranks train the whole batch, each by itself: what sharing the machine costs, with no communication
    tp2, dp2    the two ranks train it together; `dp2` takes half of the batch each
    zero1, 2, 3     dp2 with the optimizer's state shared out, the gradients too, the parameters too
    torch       one process on rank 0 alone, written with torch's own modules and torch.optim.AdamW(fused=True)
    torch-ddp   the same under torch.nn.parallel.DistributedDataParallel on both ranks

Wall time is the slower rank's, CPU time is summed over the ranks. Nothing is printed as a ratio unless the losses of
the layouts agree.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from support import tune_allocator
from torch import Tensor, nn

from pyfast.comm import bootstrap
from pyfast.models import Transformer, TransformerConfig
from pyfast.parallel import ParallelConfig, ParallelMesh, make_buckets
from pyfast.train.config import OptimizerConfig
from pyfast.train.optimizer import make_optimizer, parameter_group

MODEL = TransformerConfig(
    layers=4, width=256, heads=4, kv_heads=2, head_size=64, ffn_width=768, vocab=1024, rope_theta=5e5, norm_eps=1e-5,
    tied_embeddings=False,
)  # fmt: skip
BATCH, SEQUENCE, LEARNING_RATE = 4, 256, 1e-3
LAYOUTS = ("one", "baseline", "tp2", "dp2", "zero1", "zero2", "zero3", "torch", "torch-ddp")
# of the layouts that two ranks train together
PARALLEL = {
    "tp2": ParallelConfig(tensor=2),
    "dp2": ParallelConfig(data=2),
    "zero1": ParallelConfig(data=2, zero=1),
    "zero2": ParallelConfig(data=2, zero=2),
    "zero3": ParallelConfig(data=2, zero=3),
}
Step = Callable[[], float]


@dataclass
class Times:
    """Per round: seconds of wall time (slower rank) and of CPU time (sum of the ranks) for one step."""

    wall: list[float]
    cpu: list[float]


def tokens(begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Rows begin..end of the batch [BATCH, SEQUENCE], the same on every run, and their labels (the next token)."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(MODEL.vocab, (BATCH, SEQUENCE + 1), generator=generator)[begin:end]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ---- pyfast --------------------------------------------------------------------------------------------------------


def pyfast_step(mesh: ParallelMesh, zero: int = 0) -> Step:
    """A training step on `mesh`: this rank's rows of the batch, reduction, AdamW. Returns the mean loss.

    zero: stage of ZeRO.
    """
    rows = BATCH // mesh.size("dp")
    ids, labels = (t.flatten() for t in tokens(mesh.coordinate("dp") * rows, (mesh.coordinate("dp") + 1) * rows))
    cu_seqlens = torch.arange(0, rows * SEQUENCE + 1, SEQUENCE, dtype=torch.int32)
    positions = torch.arange(SEQUENCE).repeat(rows)
    model = Transformer(MODEL, mesh=mesh)
    model.initialize(seed=0)
    buckets = make_buckets(model, mesh, stage=zero, group_of=parameter_group)
    optimizer = make_optimizer(buckets, OptimizerConfig(name="adamw", learning_rate=LEARNING_RATE))
    scale = torch.tensor(1.0 / (BATCH * SEQUENCE))

    def step() -> float:
        buckets.start_micro_batch(last=True)
        loss = model.loss(ids, labels, cu_seqlens=cu_seqlens, positions=positions)
        loss.backward(scale)
        buckets.end_micro_batch()
        buckets.finish()
        optimizer.step(LEARNING_RATE)
        total = loss.detach()
        mesh.group("dp").all_reduce(total, name="loss")
        return float(total) / (BATCH * SEQUENCE)

    return step


# ---- the same model with torch's own modules -----------------------------------------------------------------------


class TorchLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        c = MODEL
        self.norm1, self.norm2 = nn.RMSNorm(c.width, eps=c.norm_eps), nn.RMSNorm(c.width, eps=c.norm_eps)
        self.qkv = nn.Linear(c.width, (c.heads + 2 * c.kv_heads) * c.head_size, bias=False)
        self.output = nn.Linear(c.heads * c.head_size, c.width, bias=False)
        self.gate_up = nn.Linear(c.width, 2 * c.ffn_width, bias=False)
        self.down = nn.Linear(c.ffn_width, c.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = MODEL
        b, s, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(b, s, -1, c.head_size).transpose(1, 2)
        q, k, v = heads.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
        x = x + self.output(y.transpose(1, 2).reshape(b, s, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class TorchModel(nn.Module):
    """The fixed model with torch's modules; loads the weights of pyfast's, so that the losses can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(MODEL.vocab, MODEL.width)
        self.layers = nn.ModuleList(TorchLayer() for _ in range(MODEL.layers))
        self.norm = nn.RMSNorm(MODEL.width, eps=MODEL.norm_eps)
        self.head = nn.Linear(MODEL.width, MODEL.vocab, bias=False)
        frequency = MODEL.rope_theta ** (-torch.arange(0, MODEL.head_size, 2).double() / MODEL.head_size)
        angle = torch.arange(SEQUENCE).double()[:, None] * frequency
        self.register_buffer("cos", angle.cos().float())
        self.register_buffer("sin", angle.sin().float())
        source = Transformer(MODEL)
        source.initialize(seed=0)
        names = {"attention_norm": "norm1", "ffn_norm": "norm2", "attention.qkv": "qkv", "attention.output": "output"}
        names |= {"ffn.gate_up": "gate_up", "ffn.down": "down"}
        state = {}
        for name, value in source.state_dict().items():
            for ours, theirs in names.items():
                name = name.replace(f".{ours}.", f".{theirs}.")
            state[name] = value
        missing, unexpected = self.load_state_dict(state, strict=False)
        if unexpected or set(missing) - {"cos", "sin"}:
            raise RuntimeError(f"weights do not fit: missing {missing}, unexpected {unexpected}")

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def torch_step(rank: int, ranks: int) -> Step:
    """A step of torch's own modules on `ranks` ranks under DistributedDataParallel (none for one rank)."""
    rows = BATCH // ranks
    ids, labels = tokens(rank * rows, (rank + 1) * rows)
    model = TorchModel()
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = wrapped(ids, labels)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(total)
        return float(total) / ranks

    return step


# ---- running -------------------------------------------------------------------------------------------------------


def make_step(layout: str, rank: int) -> Step | None:
    """What `rank` does in one step of `layout`; None: nothing."""
    if layout in PARALLEL:
        config = PARALLEL[layout]
        return pyfast_step(ParallelMesh.create(config, rank=rank, world_size=2), config.zero)
    if layout == "torch-ddp":
        return torch_step(rank, 2)
    if layout == "baseline":
        return pyfast_step(ParallelMesh.single())
    if rank == 1:
        return None
    return pyfast_step(ParallelMesh.single()) if layout == "one" else torch_step(0, 1)


def run_rank(
    rank: int, store: str, layouts: list[str], rounds: int, steps: int, results: multiprocessing.Queue
) -> None:  # fmt: skip
    """One of the two processes: every layout in turn, `rounds` times `steps` steps."""
    torch.set_num_threads(1)
    tune_allocator()
    bootstrap.initialize(rank=rank, world_size=2, store=dist.FileStore(store, 2))
    functions = {layout: make_step(layout, rank) for layout in layouts}
    losses: dict[str, list[float]] = {layout: [] for layout in layouts}
    times: dict[str, list[tuple[float, float]]] = {layout: [] for layout in layouts}
    for _ in range(rounds + 1):  # the first round warms up
        for layout, function in functions.items():
            dist.barrier()
            if function is None:
                continue
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                losses[layout].append(function())
            times[layout].append(
                ((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps),
            )
    results.put((rank, {layout: values[1:] for layout, values in times.items()}, losses))
    dist.barrier()
    bootstrap.shutdown()


def collect(layouts: list[str], rounds: int, steps: int) -> tuple[dict[str, Times], dict[str, list[float]]]:
    """Run both processes; times per layout and rank 0's losses per layout."""
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        store = os.path.join(directory, "store")
        processes = [
            context.Process(target=run_rank, args=(rank, store, layouts, rounds, steps, queue)) for rank in (0, 1)
        ]
        for process in processes:
            process.start()
        received = {}
        while len(received) < 2:
            try:
                rank, times, losses = queue.get(timeout=5)
                received[rank] = times, losses
            except Exception as error:
                if any(process.exitcode for process in processes):
                    for process in processes:
                        process.kill()
                    raise SystemExit("a rank failed, see its traceback above") from error
        for process in processes:
            process.join()
    combined = {}
    for layout in layouts:
        per_rank = [received[rank][0][layout] for rank in (0, 1) if received[rank][0][layout]]
        combined[layout] = Times(
            wall=[max(values[i][0] for values in per_rank) for i in range(rounds)],
            cpu=[sum(values[i][1] for values in per_rank) for i in range(rounds)],
        )
    return combined, received[0][1]


def report(times: dict[str, Times], losses: dict[str, list[float]]) -> None:
    """Print the table, or say which layout's losses disagree and exit."""
    reference = next(iter(losses.values()))
    for layout, values in losses.items():
        worst = max(abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True))
        if worst > 2e-4:
            raise SystemExit(f"the losses of {layout} are off by {worst:.1e}: no times are printed")
    print(f"losses agree: {reference[0]:.5f} at the first step, {reference[-1]:.5f} at the last\n")
    base = times.get("baseline")
    header = f"{'layout':12s} {'wall ms':>9s} {'best':>7s} {'cpu ms':>8s} {'tokens/s':>9s}"
    print(header + ("   x the baseline: wall   cpu" if base else ""))
    for layout, t in times.items():
        wall, cpu = statistics.median(t.wall), statistics.median(t.cpu)
        copies = 2 if layout == "baseline" else 1
        line = f"{layout:12s} {wall * 1e3:9.1f} {min(t.wall) * 1e3:7.1f} {cpu * 1e3:8.1f}"
        line += f" {copies * BATCH * SEQUENCE / wall:9.0f}"
        if base:
            # Each of the two copies does a whole batch in `wall`; two ranks sharing one would ideally need half.
            wall_ratio = statistics.median(w / (b / 2) for w, b in zip(t.wall, base.wall, strict=True))
            cpu_ratio = statistics.median(c / (b / 2) for c, b in zip(t.cpu, base.cpu, strict=True))
            if layout not in ("one", "torch", "baseline"):
                line += f" {wall_ratio:21.2f} {cpu_ratio:5.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="layouts: " + ", ".join(LAYOUTS))
    parser.add_argument("--layouts", nargs="+", default=["one", "baseline", "tp2", "dp2"], choices=LAYOUTS)
    parser.add_argument("--rounds", type=int, default=9, help="rounds counted, after one to warm up (default 9)")
    parser.add_argument("--steps", type=int, default=3, help="steps of each layout in a round (default 3)")
    arguments = parser.parse_args()
    times, losses = collect(arguments.layouts, arguments.rounds, arguments.steps)
    report(times, losses)


if __name__ == "__main__":
    main()
