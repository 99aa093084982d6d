"""Checking that what should be equal on several ranks is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from pyfast.nn.layout import get_layout
from pyfast.parallel.mesh import ParallelMesh


def check_replicas(named_parameters: Iterable[tuple[str, Tensor]], mesh: ParallelMesh) -> None:
    """Compare, bit by bit, every tensor that its `Layout` says is replicated over ranks of the mesh.

    A collective over the mesh (digests only, a few bytes a tensor).

    Raises:
        RuntimeError: naming every tensor, mesh dimension, group and rank that differs; alike on all ranks.
    """
    mine = []
    for name, parameter in named_parameters:
        for dimension in get_layout(parameter).replicated_over():
            if mesh.size(dimension) > 1:
                mine.append((name, dimension, mesh.group(dimension).ranks, _digest(parameter)))
    # every rank sees all digests, so that all raise the same error, not only those of the group that differs
    everyone = mesh.group("world").all_gather_object(mine, name="check replicas")
    seen: dict[tuple[str, str, tuple[int, ...]], dict[int, str]] = {}
    for rank, entries in zip(mesh.group("world").ranks, everyone, strict=True):
        for name, dimension, group, digest in entries:
            seen.setdefault((name, dimension, group), {})[rank] = digest
    problems = []
    for (name, dimension, group), digests in seen.items():
        absent = [rank for rank in group if rank not in digests]
        odd = [rank for rank in group if rank in digests and digests[rank] != digests[min(digests)]]
        if absent or odd:
            problems.append(
                f"'{name}' over {dimension} group {group}: "
                + (f"rank(s) {odd} differ from rank {min(digests)}" if odd else f"rank(s) {absent} do not have it")
            )
    if problems:
        raise RuntimeError("replicas differ. " + "; ".join(problems))


def _digest(tensor: Tensor) -> str:
    """Digest of dtype, shape and bytes."""
    data = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{data.dtype} {tuple(data.shape)}".encode(), digest_size=16)
    digest.update(data.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
