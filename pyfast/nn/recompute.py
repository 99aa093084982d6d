"""Recomputing activations in backward instead of keeping them. H width, N heads, D head size, F inner width.

What a layer keeps for backward, in values a token, beside its input and the residual between its two parts (2 H):

    none        two normed copies 2 H, qkv, rotated q and k (Nq + Nk) D, attention's result Nq D, gate and up 2 F, their
                product F
    selective   qkv, attention's result, gate and up: what came out of the products and of attention, none of which is
                computed again. The rest is element-wise and made again from them: norms, rotation, SwiGLU
    attention   nothing of the attention part, whose whole forward runs again; the feed-forward as in none
    ffn         nothing of the feed-forward part; the attention as in none
    full        nothing but the layer's input; the whole layer runs again

The kernels are deterministic, so all five give the same bits. Selective recomputation follows Korthikanti et al. 2022
(arXiv:2205.05198); the whole-layer form Chen et al. 2016 (arXiv:1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

KINDS = ("none", "full", "selective", "attention", "ffn")

Light = Callable[..., Tensor]  # light(function, *args) -> function(*args)


def call(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """The `Light` of a layer that recomputes nothing."""
    return function(*args)


def layer_kinds(recompute: str | Sequence[str], layers: int, every: int = 1) -> list[str]:
    """What each of `layers` layers recomputes: one of `KINDS` a layer.

    Args:
        recompute: one of `KINDS` for every `every`-th layer (the first, and from there on), "none" for the others; or
            one a layer.
    Raises ValueError for words that are none of `KINDS`, a list of another length, and `every` beside a list.
    """
    words = [recompute] if isinstance(recompute, str) else list(recompute)
    for word in words:
        if word not in KINDS:
            raise ValueError(f"recompute: {word!r} is unknown; allowed are {', '.join(KINDS)}")
    if every < 1:
        raise ValueError(f"recompute_every: is {every}, must be at least 1")
    if isinstance(recompute, str):
        return [recompute if index % every == 0 else "none" for index in range(layers)]
    if len(words) != layers:
        raise ValueError(f"recompute: names {len(words)} layers, the model has {layers}; give one word a layer")
    if every != 1:
        raise ValueError(f"recompute_every: is {every} beside a list that names every layer; leave it at 1")
    return words


def run_layer(
    kind: str, attention: Callable[[Tensor, Light], Tensor], ffn: Callable[[Tensor, Light], Tensor], x: Tensor
) -> Tensor:
    """ffn(attention(x)), keeping for backward what `kind` keeps.

    attention, ffn: the halves of a layer, residuals included: (x, light) -> x. They call what is cheap to compute again
    as `light(function, *args)`.
    """
    if kind == "full":
        return _recomputed(lambda x: ffn(attention(x, call), call), x)
    if kind == "selective":
        with Rerun() as light:
            return ffn(attention(x, light), light)
    x = _recomputed(lambda x: attention(x, call), x) if kind == "attention" else attention(x, call)
    return _recomputed(lambda x: ffn(x, call), x) if kind == "ffn" else ffn(x, call)


def offload(device: torch.device) -> AbstractContextManager:
    """A context in which tensors saved for backward wait in pinned host memory. For GPUs.

    Raises ValueError on a CPU, where they are in host memory already.
    """
    if device.type == "cpu":
        raise ValueError("offload: activations of a model on the CPU are in host memory already; leave it off")
    return save_on_cpu(pin_memory=True, device_type=device.type)


class Rerun:
    """Runs cheap functions so that autograd keeps how to make their result again, and not the result.

    Inside the context, `y = rerun(function, *args)` calls the function. Where an op saves y (or a view of it) for its
    backward, the function and its arguments are kept in its place; it runs again when the backward asks for y. The
    arguments are kept alive, so the gain is there where they are kept anyway.
    """

    def __init__(self) -> None:
        self._sources: dict[int, _Source] = {}
        self._results: list[Tensor] = []  # alive, so that no other tensor takes an address within the context
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def __call__(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        y = function(*args)
        if y.numel():
            detached = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
            source = _Source(function, detached, y.storage_offset(), y.device.type, _autocast(y.device.type))
            self._sources[y.untyped_storage().data_ptr()] = source
            self._results.append(y)
        return y

    def __enter__(self) -> Rerun:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._sources, self._results = {}, []  # the graph keeps this object, through its hook

    def _pack(self, saved: Tensor) -> Tensor | _View:
        # by storage: autograd hands over a detached tensor of the same memory, and ops save reshaped views
        source = self._sources.get(saved.untyped_storage().data_ptr()) if saved.numel() else None
        if source is None:
            return saved
        return _View(source, saved.shape, saved.stride(), saved.storage_offset() - source.offset)


@dataclass(frozen=True)
class _Source:
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    offset: int  # of the result in its storage
    device: str
    autocast: dict[str, Any]  # as it was in forward

    @torch.no_grad()
    def run(self) -> Tensor:
        with torch.autocast(self.device, **self.autocast):
            return self.function(*self.args)


@dataclass(frozen=True)
class _View:
    """A view of what a source makes."""

    source: _Source
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(kept: Tensor | _View) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    y = kept.source.run()
    return y.as_strided(kept.shape, kept.stride, y.storage_offset() + kept.offset)


def _autocast(device: str) -> dict[str, Any]:
    return {"enabled": torch.is_autocast_enabled(device), "dtype": torch.get_autocast_dtype(device)}


def _recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    # Nothing here draws from torch's generators, so there is no state of theirs to keep and restore.
    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
