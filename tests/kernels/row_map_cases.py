"""Maps and row movement: what every backend is asked, and what the answer must be (kernels/reference_row_map.py).

A backend is a module or object with row_map, tile_list, gather_rows, unpermute_forward and unpermute_backward as in
pyfast/kernels/cpu_row_map.py. Tensors are on CPU here; `device` moves them there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyfast.kernels import reference_row_map as reference
from pyfast.kernels.dtypes import sum_dtype
from pyfast.kernels.tiles import tile_bound

# The error allowed in a result, relative to the norm: one rounding of the dtype, or of the float32 sum.
TOLERANCE = {torch.float32: 3e-7, torch.float64: 1e-15, torch.bfloat16: 2.5e-3, torch.float16: 3e-4}
WEIGHT_TOLERANCE = {torch.float32: 5e-7, torch.float64: 1e-15, torch.bfloat16: 5e-7, torch.float16: 5e-7}


def random_experts(tokens: int, k: int, num_experts: int, *, dropped: float = 0.0, seed: int = 0) -> Tensor:
    """int32 [T, K], a share `dropped` of it -1."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.randint(0, num_experts, (tokens, k), generator=generator, dtype=torch.int32)
    return experts.masked_fill(torch.rand(tokens, k, generator=generator) < dropped, -1)


# name -> (experts [T, K], num_experts)
MAPS: dict[str, Callable[[], tuple[Tensor, int]]] = {
    "one": lambda: (torch.tensor([[0]], dtype=torch.int32), 1),
    "no tokens": lambda: (torch.empty(0, 2, dtype=torch.int32), 3),
    "one expert": lambda: (torch.zeros(37, 2, dtype=torch.int32), 1),
    "one slot a token": lambda: (random_experts(129, 1, 5), 5),
    "more experts than slots": lambda: (random_experts(3, 2, 100), 100),
    "all dropped": lambda: (torch.full((5, 2), -1, dtype=torch.int32), 4),
    "some dropped": lambda: (random_experts(300, 3, 7, dropped=0.3), 7),
    "the same expert twice": lambda: (torch.tensor([[2, 2], [0, 2], [1, 1], [2, -1]], dtype=torch.int32), 3),
    "int64": lambda: (random_experts(70, 2, 9).long(), 9),
    "int64, some dropped": lambda: (random_experts(70, 2, 9, dropped=0.5).long(), 9),
    "transposed": lambda: (random_experts(4, 65, 6, dropped=0.1).t(), 6),
    "every second of int64": lambda: (random_experts(130, 4, 6).long()[::2, 1::2], 6),
    "all to the last": lambda: (torch.full((200, 2), 1023, dtype=torch.int32), 1024),
    "many experts": lambda: (random_experts(600, 4, 1024), 1024),
    "many slots": lambda: (random_experts(2500, 4, 33, dropped=0.02), 33),
}

# tokens, k, num_experts, width, share of dropped slots
MOVES = {
    "one": (1, 1, 1, 1, 0.0),
    "no tokens": (0, 2, 3, 8, 0.0),
    "odd width": (7, 2, 4, 15, 0.0),
    "odd width, some dropped": (33, 3, 5, 31, 0.3),
    "aligned width": (40, 2, 8, 64, 0.1),
    "all dropped": (4, 2, 3, 16, 1.0),
    "many slots a token": (9, 20, 4, 36, 0.2),
    "wide": (6, 2, 4, 1000, 0.2),
}


def check_maps(backend, name: str, device: str = "cpu") -> None:
    """The maps of one case are the reference's, bit for bit."""
    experts, num_experts = MAPS[name]()
    maps = backend.row_map(experts.to(device), num_experts)
    for what, ours, expected in zip(
        ("offsets", "gather", "slot", "inverse"), maps, reference.row_map(experts, num_experts), strict=True
    ):
        assert ours.dtype == torch.int32, what
        assert torch.equal(ours.cpu(), expected), f"{what}: {ours.tolist()} instead of {expected.tolist()}"


def check_tiles(backend, name: str, block: int, device: str = "cpu") -> None:
    """The tiles of one case are the reference's, fit the bound, and nothing follows them."""
    experts, num_experts = MAPS[name]()
    offsets = reference.row_map(experts, num_experts)[0]
    bound = tile_bound(experts.numel(), num_experts, block)
    tiles, count = backend.tile_list(offsets.to(device), block, bound)
    expected = reference.tile_list(offsets, block)
    assert tiles.dtype == count.dtype == torch.int32 and tiles.shape == (bound, 2) and count.shape == (1,)
    assert count.item() == len(expected)
    assert tiles.tolist() == [list(tile) for tile in expected] + [[-1, -1]] * (bound - len(expected))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    norm = expected.norm().item()
    return (actual.cpu().double() - expected).norm().item() / (norm if norm else 1.0)


def check_moves(backend, name: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Gather, weighted sum and gradients of one case against dense matrices in float64; what has no row is 0."""
    tokens, k, num_experts, width, dropped = MOVES[name]
    experts = random_experts(tokens, k, num_experts, dropped=dropped)
    _, gather, slot, inverse = reference.row_map(experts, num_experts)
    torch.manual_seed(0)
    x, dy = torch.randn(tokens, width).to(dtype), torch.randn(tokens, width).to(dtype)
    rows = torch.randn(tokens * k, width).to(dtype)
    rows[slot < 0] = float("nan")  # nobody's
    weights = torch.rand(tokens, k, dtype=sum_dtype(dtype))
    weights[::3] = 0  # a weight of 0 has a gradient too

    on = {name: t.to(device) for name, t in dict(gather=gather, slot=slot, inverse=inverse, weights=weights).items()}
    gathered = backend.gather_rows(x.to(device), on["gather"])
    assert gathered.dtype == dtype and torch.equal(gathered.cpu(), reference.gather_rows(x, gather))

    rows64 = rows.double().masked_fill(slot[:, None] < 0, 0).requires_grad_()
    weights64 = weights.double().requires_grad_()
    for used in (None, weights64):
        y = backend.unpermute_forward(rows.to(device), on["inverse"], None if used is None else on["weights"], k)
        expected = reference.unpermute(rows64, inverse, used, k)
        assert y.dtype == dtype and y.shape == (tokens, width)
        assert relative_error(y, expected.detach()) <= TOLERANCE[dtype]
        assert not y.cpu()[(experts < 0).all(1)].any()

    drows64, dweights64 = torch.autograd.grad(expected, (rows64, weights64), dy.double())
    maps = (on["gather"], on["slot"], on["weights"])
    drows, dweights = backend.unpermute_backward(dy.to(device), rows.to(device), *maps, True, True)
    assert drows.dtype == dtype and dweights.dtype == sum_dtype(dtype) and dweights.shape == (tokens, k)
    assert relative_error(drows, drows64) <= TOLERANCE[dtype]
    assert relative_error(dweights, dweights64) <= WEIGHT_TOLERANCE[dtype]
    assert not drows.cpu()[slot < 0].any() and not dweights.cpu()[experts < 0].any()
    only_rows, nothing = backend.unpermute_backward(dy.to(device), None, *maps, True, False)
    assert torch.equal(only_rows, drows) and nothing.numel() == 0
    nothing, only_weights = backend.unpermute_backward(dy.to(device), rows.to(device), *maps, False, True)
    assert torch.equal(only_weights, dweights) and nothing.numel() == 0
