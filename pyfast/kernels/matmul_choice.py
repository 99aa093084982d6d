"""Whose matrix product is faster on this processor, by dtype and size; the measurements are in docs/kernels.md."""

from __future__ import annotations

import platform

import torch


def _torch_has_fast_matmul(dtype: torch.dtype) -> bool:
    """Whether torch multiplies bfloat16 / float16 matrices with instructions made for it on this processor."""
    name = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    supported = getattr(torch.ops.mkldnn, name, None)  # absent in builds without oneDNN
    if supported is None or not supported():
        return False
    if dtype == torch.float16 or platform.machine() not in ("x86_64", "AMD64"):
        return True
    # oneDNN says yes on every AVX-512 processor, but without its bf16 dot product torch needs 2.7 times our time.
    dot_product = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(dot_product and dot_product())


_FAST_IN_TORCH = frozenset(dtype for dtype in (torch.bfloat16, torch.float16) if _torch_has_fast_matmul(dtype))


def packed_gemm_is_faster(dtype: torch.dtype, rows: int, out_features: int, in_features: int) -> bool:
    """Whether `cpu.gemm` beats torch's matmul in the three products of a linear layer: its result, its two gradients.

    float32 once packing is paid for; half precision wherever torch has no matmul
    instructions for it and falls back to scalar code; float64 never by enough.
    """
    if dtype == torch.bfloat16 or dtype == torch.float16:
        return dtype not in _FAST_IN_TORCH and out_features >= 8 and in_features >= 8 and rows >= 8
    # rows last, and no min(): a dynamic number of rows (torch.export) is then only asked about where it decides
    return dtype == torch.float32 and out_features >= 64 and in_features >= 64 and rows >= 192
