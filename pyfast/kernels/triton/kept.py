"""How the expert MLP keeps a bfloat16 pre-activation for backward: 16 bits with 6 of exponent and 9 of mantissa.

bfloat16 spends 8 bits on an exponent far wider than activations are. With 6 (2^-39 to 2^24; less is 0, more is the
largest) the router's gradient, a dot product with the activation, is 4 times as accurate; csrc/cpu/moe_mlp.h keeps the
same codes. float32 and float16 are kept as they are. All ones but the sign is NaN.

    float32    s eeeeeeee mmmmmmmmm mmmmmmmmmmmmmm
    code       s   eeeeee mmmmmmmmm                   exponent + 87; a code of 0 is 0

Prefixes: b_ block in registers, m_ mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CODE_BIAS = tl.constexpr(87 << 23)  # what the exponent field of a code counts from, 127 - 40
CODE_LEAST = tl.constexpr(88 << 23)  # 2^-39 as float32 bits
CODE_LARGEST = tl.constexpr(0x7FFE)
CODE_NAN = tl.constexpr(0x7FFF)
CODE_SHIFT = tl.constexpr(14)  # bits of float32's mantissa that are rounded away
BELOW_HALF = tl.constexpr((1 << 13) - 1)  # added before they are cut off, and 1 more where the result would be odd
INFINITY_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)


def kept_view(h: Tensor) -> Tensor:
    """The tensor as kernels load and store it: the codes of a bfloat16 one are int16."""
    return h.view(torch.int16) if h.dtype == torch.bfloat16 else h


@triton.jit
def to_kept(b_x, KEPT: tl.constexpr):
    """float32 -> what is kept, in the element type of a `kept_view`: codes to nearest even, or a cast."""
    if KEPT == tl.int16:
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_magnitude = b_bits & 0x7FFFFFFF
        b_odd = (b_magnitude >> CODE_SHIFT) & 1
        b_code = tl.minimum((b_magnitude - CODE_BIAS + BELOW_HALF + b_odd) >> CODE_SHIFT, CODE_LARGEST)
        b_code = tl.where(b_magnitude < CODE_LEAST, 0, b_code)
        b_code = tl.where(b_magnitude > INFINITY_BITS, CODE_NAN, b_code)
        b_kept = (((b_bits >> 16) & 0x8000) | b_code).to(tl.int16)
    else:
        b_kept = b_x.to(KEPT)
    return b_kept


@triton.jit
def from_kept(b_kept):
    """What is kept -> float32."""
    if b_kept.dtype == tl.int16:
        b_code = b_kept.to(tl.int32)
        b_magnitude = b_code & CODE_NAN
        b_bits = (b_magnitude << CODE_SHIFT) + CODE_BIAS
        b_bits = tl.where(b_magnitude == 0, 0, b_bits)
        b_bits = tl.where(b_magnitude == CODE_NAN, NAN_BITS, b_bits)
        b_x = (b_bits | ((b_code >> 15) << 31)).to(tl.float32, bitcast=True)
    else:
        b_x = b_kept.to(tl.float32)
    return b_x
