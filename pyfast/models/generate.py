"""Continue token sequences by sampling, with a cache of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.models.transformer import Transformer


class Cache:
    """Keys and values of one layer, [B, capacity, Nk, D] each, filled from the front."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._k = self._v = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add [B, S, Nk, D] at the end; returns views of all keys and values so far."""
        if self._k is None:
            shape = (k.shape[0], self.capacity, *k.shape[2:])
            self._k, self._v = k.new_empty(shape), v.new_empty(shape)
        end = self.length + k.shape[1]
        self._k[:, self.length : end] = k
        self._v[:, self.length : end] = v
        self.length = end
        return self._k[:, :end], self._v[:, :end]


@torch.no_grad()
def generate(model: Transformer, ids: Tensor, steps: int, temperature: float = 1.0, seed: int = 0) -> Tensor:
    """`ids` followed by `steps` sampled tokens: int64 [S] -> [S + steps], or [B, S] -> [B, S + steps].

    temperature divides the logits; 0 takes the likeliest token. The result depends on the model, ids and seed alone,
    and is the same on every tensor-parallel rank, all of which must call this. Raises ValueError for an empty prompt,
    a negative number of steps or temperature, and a sequence longer than model.max_positions.
    """
    if ids.dim() not in (1, 2) or ids.shape[-1] == 0:
        raise ValueError(f"ids have shape {tuple(ids.shape)}, they must be [S] or [B, S] with at least one token")
    if steps < 0 or not temperature >= 0:
        raise ValueError(f"steps={steps} and temperature={temperature} must not be negative")
    total = ids.shape[-1] + steps
    if total > model.config.max_positions:
        raise ValueError(f"{total} tokens are more than model.max_positions={model.config.max_positions}")
    sequence = ids if ids.dim() == 2 else ids.unsqueeze(0)
    generator = torch.Generator().manual_seed(seed)
    caches = [Cache(total) for _ in model.layers]
    new = sequence
    for _ in range(steps):
        start = caches[0].length
        positions = torch.arange(start, start + new.shape[1], device=ids.device)
        logits = model(new, positions=positions, caches=caches)[:, -1]
        new = sample(logits, temperature, generator).to(ids.device).unsqueeze(1)
        if model.group is not None:
            model.group.broadcast(new, src=0, name="sampled token")  # whatever the rounding, one choice
        sequence = torch.cat([sequence, new], dim=1)
    return sequence if ids.dim() == 2 else sequence.squeeze(0)


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token id for each row of logits [B, V]; on the CPU in float64, so that the draw is the same on any device."""
    logits = logits.double().cpu()
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits - logits.amax(-1, keepdim=True)  # at most 0: a tiny temperature cannot overflow
    return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator).squeeze(-1)
