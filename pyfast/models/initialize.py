"""Initial weights that depend on the seed and the parameter's name, never on the layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from pyfast.models.config import TransformerConfig
from pyfast.nn.layout import Layout, get_layout


def seed_of(seed: int, name: str) -> int:
    """A 63-bit seed for one named tensor."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def initial_tensor(name: str, shape: tuple[int, ...], *, seed: int, std: float, layers: int) -> Tensor:
    """The unsharded float32 tensor of a parameter: norms 1, biases 0, matrices normal.

    Matrices that write to the residual stream (attention.output, ffn.down) have std / sqrt(2 layers), so that the
    stream's variance does not grow with depth (Radford et al., GPT-2, 2019).
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(("attention.output.weight", "ffn.down.weight")):
        std = std / math.sqrt(2 * layers)
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fill `model` (a Transformer) from `seed`: one whole tensor at a time on the CPU, then this rank's part of it."""
    for name, parameter in model.named_parameters():
        fill_initial(name, parameter, get_layout(parameter), model.config, model.mesh, seed)


@torch.no_grad()
def fill_initial(
    name: str, local: Tensor, layout: Layout, config: TransformerConfig, mesh: object | None, seed: int
) -> None:
    """Fill one parameter of a Transformer, or a tensor like it."""
    full = initial_tensor(name, layout.shape, seed=seed, std=config.initial_std, layers=config.layers)
    local.copy_(full if mesh is None else layout.shard(full, mesh))


@torch.no_grad()
def copy_shard(parameter: nn.Parameter, full: Tensor, mesh: object | None) -> None:
    """Copy this rank's part of an unsharded tensor into a parameter, converting dtype and device."""
    parameter.copy_(full if mesh is None else get_layout(parameter).shard(full, mesh))
