"""What a routing kernel is told besides its tensors, and the random numbers that it uses.

Random numbers are a pure function of (seed, step, token, expert), the same on every backend: the finaliser of
SplitMix64 (Steele, Lea and Flood, 2014) over a counter. They do not depend on how tokens are spread over ranks and
calls.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SCORES = ("softmax", "softmax_chosen", "sigmoid")  # RouteScore in csrc/route_kernels.h
CHOICES = ("top_k", "balanced", "expert_choice")  # RouteChoice
TINY = 1e-20  # added to a sum of sigmoids before dividing by it, as DeepSeek-V3 does

_JITTER_STREAM, _RANDOM_STREAM = 1, 2
_WHOLE_TOKEN = 65535  # the expert number under which a token's own random number is drawn
_64_BITS = (1 << 64) - 1


class RouteSettings(NamedTuple):
    """The plain arguments of `route_forward` and `route_backward`, in the order of the op's schema."""

    k: int
    score: str
    normalize: bool
    scale: float
    num_groups: int
    topk_groups: int
    group_top2: bool
    choice: str
    slots: int  # of the result: k unless experts choose
    jitter: float
    random_steps: int
    seed: int
    step: int
    capacity: int  # slots an expert takes; -1: see capacity_factor
    capacity_factor: float  # ceil(factor * (valid tokens * k) / E) slots; 0: no limit
    drop_by_probability: bool
    score_sums: bool
    z_sum: bool

    SCHEMA = (
        "int k, str score, bool normalize, float scale, int num_groups, int topk_groups, bool group_top2, str choice, "
        "int slots, float jitter, SymInt random_steps, SymInt seed, SymInt step, SymInt capacity, "
        "float capacity_factor, bool drop_by_probability, bool score_sums, bool z_sum"
    )

    @property
    def limited(self) -> bool:
        """Whether slots may be dropped: by experts, or in expert choice by tokens."""
        return self.capacity >= 0 or self.capacity_factor > 0

    @property
    def random(self) -> float:
        """The probability that a token is routed at random: from 1 at step 0 down to 0 at `random_steps`."""
        return max(0.0, 1.0 - self.step / self.random_steps) if self.random_steps > 0 else 0.0

    @property
    def jitter_key(self) -> int:
        return _key(self.seed, self.step, _JITTER_STREAM)

    @property
    def random_key(self) -> int:
        return _key(self.seed, self.step, _RANDOM_STREAM)


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _64_BITS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _64_BITS
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z


def _key(seed: int, step: int, stream: int) -> int:
    """Where the numbers of one (seed, step, purpose) begin, as a signed 64-bit integer."""
    return _signed(_mix(_mix(_mix(seed & _64_BITS) + step & _64_BITS) + stream & _64_BITS))


def uniform(key: int, token_ids: Tensor, experts: Tensor) -> Tensor:
    """float64 in [0, 1), multiples of 2^-24, for the broadcast int64 token and expert numbers."""

    def shift(z: Tensor, bits: int) -> Tensor:
        return (z >> bits) & ((1 << (64 - bits)) - 1)  # of the unsigned number

    z = (token_ids * 65536 + experts + 1) * _signed(0x9E3779B97F4A7C15) + key
    z = (z ^ shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ shift(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ shift(z, 31)
    return shift(z, 40).double() * 2.0**-24


def jitter_factors(settings: RouteSettings, token_ids: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """[T, E]: what logits are multiplied by, uniform in [1 - jitter, 1 + jitter], and never 0: -inf stays -inf."""
    numbers = torch.arange(experts, device=token_ids.device)
    u = uniform(settings.jitter_key, token_ids.unsqueeze(1), numbers)
    return (1.0 + settings.jitter * (2.0 * u - 1.0 + 2.0**-24)).to(dtype)  # the middle of a 24-bit step


def random_keys(settings: RouteSettings, token_ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(bool [T]: is the token routed at random, float64 [T, E]: its experts are the k greatest of these)."""
    numbers = torch.arange(experts, device=token_ids.device)
    own = uniform(settings.random_key, token_ids, torch.full_like(token_ids, _WHOLE_TOKEN))
    return own < settings.random, uniform(settings.random_key, token_ids.unsqueeze(1), numbers)
