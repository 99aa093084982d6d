"""Train a transformers model on pyfast's attention, and check it against transformers' own.

python examples/transformers_attention.py [--steps 20] [--length 512]

The model is a small Llama with random weights and learns the bytes of this file; nothing is downloaded. To use a model
of your own, call register() and give attn_implementation="pyfast" to from_pretrained.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pyfast.integrations.transformers import register


def batch(length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Four pieces of this file of different lengths, padded on the right."""
    with open(__file__, "rb") as file:
        text = torch.tensor(list(file.read()))
    ids, mask = torch.zeros(4, length, dtype=torch.int64), torch.zeros(4, length, dtype=torch.int64)
    for row, size in enumerate((length, length * 3 // 4, length // 2, length // 3)):
        start = int(torch.randint(len(text) - size, (), generator=generator))
        ids[row, :size], mask[row, :size] = text[start : start + size], 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def losses(attention: str, steps: int, length: int) -> tuple[list[float], float]:
    """The loss of every step, and the seconds of a step, under one implementation of attention."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=length,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, result, begin = torch.Generator().manual_seed(0), [], time.perf_counter()
    for _ in range(steps):
        loss = model(**batch(length, generator), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
    return result, (time.perf_counter() - begin) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=512)
    arguments = parser.parse_args()

    register()
    (eager, eager_seconds), (ours, seconds) = (
        losses(attention, arguments.steps, arguments.length) for attention in ("eager", "pyfast")
    )
    print(f"loss with eager attention   {eager[0]:.5f} -> {eager[-1]:.5f}   {eager_seconds * 1e3:7.1f} ms a step")
    print(f"loss with pyfast attention  {ours[0]:.5f} -> {ours[-1]:.5f}   {seconds * 1e3:7.1f} ms a step")
    furthest = max(abs(a - b) for a, b in zip(eager, ours, strict=True))
    print(f"furthest apart at any step  {furthest:.1e}")


if __name__ == "__main__":
    main()
