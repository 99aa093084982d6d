"""How long the default data takes to load, and a micro-batch of 16 rows of 256 to make: `python bench/bench_data.py`"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from pyfast.train.data import Dataset, load_dataset
from pyfast.train.tokenizer import ByteTokenizer


def seconds(function: Callable[[], object], rounds: int) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def load() -> Dataset:
    return load_dataset(None, ByteTokenizer(), sequence_length=256, micro_batch=16, global_batch=32, vocab=257)


def main() -> None:
    dataset = load()
    print(f"load {dataset.tokens:,} tokens of the standard library: {seconds(load, 5) * 1e3:.0f} ms")
    steps = iter(range(10**6))
    batch = seconds(lambda: dataset.batch(next(steps), 0, 1, 2), 300)
    print(f"one micro-batch of 16 rows of 256 tokens: {batch * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
