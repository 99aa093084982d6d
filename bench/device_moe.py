"""Mixture of experts on a GPU: results against float64, then speed beside torch's grouped product.

    python bench/device.py --section moe
    python bench/device_moe.py                # only: which tile sizes of each product would be fastest

T tokens, K slots a token, R = T * K sorted rows, E experts, H model width, F expert width.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F
from device import Check, guarded, relative_error
from torch import Tensor

from pyfast import kernels, ops
from pyfast.kernels import reference_moe


@dataclass(frozen=True)
class Size:
    """A layer."""

    tokens: int
    k: int
    experts: int
    width: int
    expert_width: int


# The published comparison: Liger's Triton kernels reach 501 / 413 TFLOP/s in it on H100, SonicMoE 365 to 600.
PUBLISHED = Size(32768, 8, 128, 2048, 768)
# Odd widths, experts without rows, a tile more than full, many rows.
CHECKED = (Size(1000, 3, 7, 256, 208), Size(333, 2, 9, 15, 31), Size(5, 2, 40, 64, 48), Size(4096, 4, 8, 512, 384))
# TFLOP/s (forward, forward + backward) and TB/s on an H200.
TARGETS = {"forward": 450.0, "forward + backward": 400.0, "bandwidth": 3.0}
# Relative to the norm: half precision rounds the pre-activation, the activation and each slot's row.
ALLOWED = {torch.bfloat16: 1e-2, torch.float32: 3e-6, torch.float16: 1.5e-3}
# The gradient of the routing weights in bfloat16, where a pre-activation kept in bfloat16 would not do.
ROUTER, ROUTER_ALLOWED = Size(64, 2, 3, 64, 4096), 2e-3


def problem(size: Size, dtype: torch.dtype, device: torch.device, dropped: float = 0.0) -> tuple[list[Tensor], Tensor]:
    """([x, weights, w_gate_up, w_down], experts)"""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return torch.randn(shape, generator=generator).mul_(scale).to(device, dtype)

    scores = torch.rand(size.tokens, size.experts, generator=generator)
    weights, experts = scores.topk(size.k)
    experts = experts.int().masked_fill_(torch.rand(weights.shape, generator=generator) < dropped, -1)
    tensors = [
        normal(size.tokens, size.width), weights.to(device),
        normal(size.experts, 2 * size.expert_width, size.width, scale=size.width**-0.5),
        normal(size.experts, size.width, size.expert_width, scale=size.expert_width**-0.5),
    ]  # fmt: skip
    return tensors, experts.to(device)


# ---------------------------------------------------------------------------------------------------------------------
# Right?
# ---------------------------------------------------------------------------------------------------------------------


def check(device: torch.device, sizes: tuple[Size, ...] = CHECKED, dtypes: tuple = tuple(ALLOWED)) -> Iterator[Check]:
    """Maps, outputs and all gradients, aligned or not, with dropped slots; and that a second run has the same bits."""
    for size in sizes:
        _, experts = problem(size, torch.float32, device, dropped=0.1)
        for name, backend in movers(device).items():
            title = f"maps of {name}, {size}: entries that differ"
            yield from guarded(
                title, lambda t=title, b=backend, e=experts, s=size: [Check(t, maps_that_differ(b, e, s), 0.0)]
            )
    for dtype, size in itertools.product(dtypes, sizes):
        title = f"moe_mlp, {size}, {str(dtype)[6:]}"
        yield from guarded(title, lambda t=title, s=size, d=dtype: layer_checks(t, s, d, device))
    title = f"dweights of moe_mlp, {ROUTER}, bfloat16"
    yield from guarded(title, lambda: [Check(title, router_error(device), ROUTER_ALLOWED)])


def layer_checks(title: str, size: Size, dtype: torch.dtype, device: torch.device) -> list[Check]:
    errors, same = layer_errors(size, dtype, device)
    checks = [Check(f"{name} of {title}", error, ALLOWED[dtype]) for name, error in errors.items()]
    return [*checks, Check(f"results that differ in a second run, {title}", 0.0 if same else 1.0, 0.0)]


def router_error(device: torch.device) -> float:
    return layer_errors(ROUTER, torch.bfloat16, device)[0]["dweights"]


def layer_errors(size: Size, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, float], bool]:
    """(relative error of output and gradients, whether two runs give the same bits)."""
    tensors, experts = problem(size, dtype, device, dropped=0.1)
    dy = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)

    def results(layer, leaves):
        leaves = [t.detach().requires_grad_() for t in leaves]
        y = layer(leaves[0], experts, *leaves[1:])
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    ours, again = results(ops.moe_mlp, tensors), results(ops.moe_mlp, tensors)
    expected = results(reference_moe.moe_mlp, [t.double() for t in tensors])
    names = ("y", "dx", "dweights", "dw_gate_up", "dw_down")
    errors = {name: relative_error(a, b) for name, a, b in zip(names, ours, expected, strict=True)}
    return errors, all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


def maps_that_differ(backend, experts: Tensor, size: Size) -> float:
    """How many entries of the device's maps are not those of the CPU."""
    ours, expected = backend.row_map(experts, size.experts), ops.row_map(experts.cpu(), size.experts)
    return float(sum((a.cpu() != b).sum().item() for a, b in zip(ours, expected[:4], strict=True)))


# ---------------------------------------------------------------------------------------------------------------------
# Fast?
# ---------------------------------------------------------------------------------------------------------------------


def median_seconds(function: Callable[[], object], device: torch.device, runs: int = 20) -> float:
    """The median of `runs` runs after three to warm up; between them the GPU's L2 cache is overwritten."""
    on_gpu = device.type == "cuda"
    cache = torch.empty(2**28 if on_gpu else 1, dtype=torch.int8, device=device)
    seconds = []
    for run in range(runs + 3):
        cache.zero_()
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            elapsed = start.elapsed_time(end) / 1e3
        else:
            begin = time.perf_counter()
            function()
            elapsed = time.perf_counter() - begin
        if run >= 3:
            seconds.append(elapsed)
    return statistics.median(seconds)


def torch_layer(x: Tensor, experts: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """The layer as frameworks write it around torch's own grouped product."""
    expert, order = experts.flatten().sort(stable=True)
    ids = torch.arange(w_gate_up.shape[0], dtype=expert.dtype, device=x.device)
    offsets = torch.searchsorted(expert, ids, right=True, out_int32=True)  # unlike bincount, waits for nothing
    token = order // experts.shape[1]
    gate, up = torch._grouped_mm(x.index_select(0, token), w_gate_up.transpose(1, 2), offs=offsets).chunk(2, dim=1)
    rows = torch._grouped_mm(F.silu(gate) * up, w_down.transpose(1, 2), offs=offsets)
    rows = rows.float() * weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(x, dtype=torch.float32).index_add(0, token, rows).to(x.dtype)


def measure(device: torch.device, deadline: float, size: Size = PUBLISHED) -> Iterator[str]:
    """Tables in markdown: the layer in bfloat16, then maps and row movement of every backend."""
    yield f"\n## moe: {size}, bfloat16\n\n| | ms | TFLOP/s | target | torch._grouped_mm, ms | ratio |"
    yield "|---|---|---|---|---|---|"
    yield from measure_layer(size, device)
    yield "\n| | us | TB/s | target |\n|---|---|---|---|"
    for name, backend in movers(device).items():
        if time.monotonic() < deadline:
            yield from measure_movement(name, backend, size, device)


def measure_layer(size: Size, device: torch.device) -> Iterator[str]:
    """Forward, and forward + backward, beside torch's grouped product."""
    (x, weights, w_gate_up, w_down), experts = problem(size, torch.bfloat16, device)
    dy = torch.randn_like(x)
    flop = 6 * size.tokens * size.k * size.width * size.expert_width
    leaves = [t.requires_grad_() for t in (x, weights, w_gate_up, w_down)]

    def forward(layer):
        with torch.no_grad():
            return layer(x, experts, weights, w_gate_up, w_down)

    def forward_backward(layer):
        return torch.autograd.grad(layer(x, experts, weights, w_gate_up, w_down), leaves, dy)

    error = relative_error(forward(ops.moe_mlp), forward(torch_layer))
    if not error <= ALLOWED[torch.bfloat16]:
        yield f"torch's layer computes something else (relative difference {error:.1e}): nothing is compared"
        return
    for what, run, work in (("forward", forward, flop), ("forward + backward", forward_backward, 3 * flop)):
        ours, theirs = (median_seconds(lambda r=run, f=f: r(f), device) for f in (ops.moe_mlp, torch_layer))
        yield (
            f"| {what} | {ours * 1e3:.3f} | {work / ours / 1e12:.1f} | {TARGETS[what]:.0f} | {theirs * 1e3:.3f} | "
            f"{theirs / ours:.2f} |"
        )


def movers(device: torch.device) -> dict[str, object]:
    """The backends of maps and row movement that this device has."""
    if device.type != "cuda":
        return {"cpu": kernels.for_device(device)}
    from pyfast.kernels import cuda_library

    found = {}
    if kernels.for_device(device).HAS_TRITON:
        from pyfast.kernels.triton import backend_row_map

        found["triton"] = backend_row_map
    library = cuda_library.load()
    if library is not None:
        from pyfast.kernels.cuda_row_map import CudaRowMap

        found["cuda c++"] = CudaRowMap(library)
    return found


def measure_movement(name: str, backend, size: Size, device: torch.device) -> Iterator[str]:
    """Maps in microseconds, row movement in TB/s of the bytes that must be read and written."""
    (x, weights, _, _), experts = problem(size, torch.bfloat16, device)
    _, gather, slot, inverse = backend.row_map(experts, size.experts)
    sorted_rows = backend.gather_rows(x, gather)
    tokens, rows = x.numel() * x.element_size(), sorted_rows.numel() * x.element_size()
    seconds = median_seconds(lambda: backend.row_map(experts, size.experts), device)
    yield f"| {name}: row_map | {seconds * 1e6:.1f} | | |"
    moves = {
        "gather_rows": (lambda: backend.gather_rows(x, gather), 2 * rows),
        "unpermute": (lambda: backend.unpermute_forward(sorted_rows, inverse, weights, size.k), rows + tokens),
        "unpermute backward": (
            lambda: backend.unpermute_backward(x, sorted_rows, gather, slot, weights, True, True), 3 * rows,
        ),
    }  # fmt: skip
    for what, (function, moved) in moves.items():
        seconds = median_seconds(function, device)
        yield f"| {name}: {what} | {seconds * 1e6:.1f} | {moved / seconds / 1e12:.2f} | {TARGETS['bandwidth']:.0f} |"


def sweep(size: Size, device: torch.device, deadline: float) -> None:
    """Times tile sizes for each product of the layer until `deadline`, without changing what ships: the table is
    gemm_config.py's. A configuration takes seconds to compile."""
    from triton.runtime.errors import OutOfResources

    from pyfast.kernels.triton import grouped_gemm, moe_mlp
    from pyfast.kernels.triton import moe_launch as launch
    from pyfast.kernels.triton.gemm_config import GemmConfig

    (x, weights, w_gate_up, w_down), experts = problem(size, torch.bfloat16, device)
    offsets, gather, slot, _ = kernels.for_device(device).row_map(experts, size.experts)
    h, a = moe_mlp.moe_up(x, w_gate_up, gather, offsets)
    dh = torch.randn_like(h)  # h itself holds codes, not numbers
    dw_gate_up = torch.empty_like(w_gate_up)
    products = {
        "up": (lambda: moe_mlp.moe_up(x, w_gate_up, gather, offsets), 4),
        "gemm": (lambda: grouped_gemm.grouped_gemm(a, w_down, offsets), 2),
        "gemm transposed": (lambda: grouped_gemm.grouped_gemm(dh, w_gate_up, offsets, transpose=True), 4),
        "down_dgrad": (lambda: moe_mlp.moe_down_dgrad(x, w_down, h, weights, gather, slot, offsets), 2),
        "wgrad": (lambda: grouped_gemm.grouped_wgrad(dh, x, offsets, dw_gate_up, False, gather=gather), 4),
    }
    tiles = itertools.product((64, 128), (64, 128, 256), (32, 64), (4, 8), (3, 4))
    for config, (name, (product, share)) in itertools.product([GemmConfig(*tile) for tile in tiles], products.items()):
        if time.monotonic() > deadline:
            print("(out of time: the rest was not measured)")
            return
        with mock.patch.object(launch, "gemm_config", lambda *_, config=config: config):
            try:
                seconds = median_seconds(product, device, runs=5)
            except OutOfResources as error:
                print(f"{name:16s} {config}: {error}")
                continue
        flop = share * size.tokens * size.k * size.width * size.expert_width
        print(f"{name:16s} {config}: {flop / seconds / 1e12:.1f} TFLOP/s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="device_moe.py", description="Which tile sizes are fastest.")
    parser.add_argument("--minutes", type=float, default=4.0, help="stop after this long (default 4)")
    sweep(PUBLISHED, torch.device("cuda"), time.monotonic() + 60 * parser.parse_args().minutes)
