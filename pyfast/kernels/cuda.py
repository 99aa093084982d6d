"""What `pyfast.ops` call on NVIDIA GPUs: CUDA C++ and Triton where there is a kernel, else plain torch.

Compiled CUDA comes before Triton where both have a kernel: it needs no compilation while a program runs.

Same names, arguments and results as `pyfast.kernels.cpu`.
"""

from __future__ import annotations

import importlib.util

from pyfast.kernels import cuda_library
from pyfast.kernels.cuda_row_map import CudaRowMap
from pyfast.kernels.plain import *  # noqa: F403 (every function that has no kernel below)

HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON:
    from pyfast.kernels.triton.attention import (  # noqa: F401
        attention_backward,
        attention_delta,
        attention_forward,
        attention_state_backward,
        attention_state_forward,
    )
    from pyfast.kernels.triton.backend_moe import (  # noqa: F401
        grouped_bias_gradient,
        grouped_gemm_forward,
        grouped_gemm_weight_gradient,
        moe_mlp_backward,
        moe_mlp_forward,
        moe_mlp_weight_gradients,
    )

if (_library := cuda_library.load()) is not None:
    _row_map = CudaRowMap(_library)
    row_map, tile_list, gather_rows = _row_map.row_map, _row_map.tile_list, _row_map.gather_rows
    unpermute_forward, unpermute_backward = _row_map.unpermute_forward, _row_map.unpermute_backward
elif HAS_TRITON:
    from pyfast.kernels.triton.backend_row_map import (  # noqa: F401
        gather_rows,
        row_map,
        tile_list,
        unpermute_backward,
        unpermute_forward,
    )
