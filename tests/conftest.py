"""What every test runs under: uninitialised memory is NaN, results do not depend on the machine's core count."""

from __future__ import annotations

import pytest
import torch
from support.triton_processes import (  # noqa: F401 (hooks)
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
)


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Fill `torch.empty` with NaN (integers with their maximum), so that memory read before it is written shows."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def ranks():
    """A pool of gloo ranks: `ranks.run(function, world_size, *args)`; see support/ranks.py."""
    from support.ranks import RankPool

    with RankPool() as pool:
        yield pool
