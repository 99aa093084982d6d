"""Runs CUDA kernels on the CPU under AddressSanitizer, in a process that has it loaded: run by test_simt.py.

python simt_under_asan.py kernels LIBRARY                     the cases of maps and row movement
python simt_under_asan.py planted LIBRARY SHARED GLOBAL       a kernel that writes as many ints beyond its memory
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from kernels.row_map_cases import MAPS, MOVES, check_maps, check_moves, check_tiles  # noqa: E402
from support.simt.build import no_stream  # noqa: E402

from pyfast.kernels.cuda_row_map import CudaRowMap  # noqa: E402


def main(what: str, path: str, *numbers: str) -> None:
    torch.set_num_threads(1)
    library = ctypes.CDLL(path)
    if what == "planted":
        out = torch.zeros(64, dtype=torch.int32)
        assert library.planted_write_beyond(ctypes.c_void_p(out.data_ptr()), 64, *map(int, numbers)) == 0
        return
    backend = CudaRowMap(library, no_stream)
    for name, make in MAPS.items():
        if make()[0].numel() * make()[1] > 100_000:
            continue  # seconds each under the sanitizer; their kernels are those of the others
        check_maps(backend, name)
        check_tiles(backend, name, 16)
    for name in MOVES:
        check_moves(backend, name, torch.bfloat16)
    check_moves(backend, "odd width", torch.float32)
    check_moves(backend, "aligned width", torch.float64)
    print("clean")


if __name__ == "__main__":
    main(*sys.argv[1:])
