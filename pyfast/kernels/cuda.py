"""What `pyfast.ops` call on NVIDIA GPUs: Triton where there is a kernel and triton is installed, else plain torch.

Same names, arguments and results as `pyfast.kernels.cpu`.
"""

from __future__ import annotations

import importlib.util

from pyfast.kernels.plain import *  # noqa: F403 (every function that has no kernel below)

HAS_TRITON = importlib.util.find_spec("triton") is not None
