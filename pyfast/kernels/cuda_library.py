"""The compiled CUDA kernels, pyfast/_cuda*.so: there when the package was built with nvcc, used when CUDA is.

It holds plain extern "C" launchers and its own CUDA runtime, so it needs no torch and one build serves every torch.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os

import torch

import pyfast

LEAST_CAPABILITY = (8, 0)  # sm_80, the oldest GPU that setup.py compiles for


def path() -> str | None:
    """Where the library lies, or None if it was not built (there was no nvcc)."""
    here = os.path.dirname(os.path.abspath(pyfast.__file__))
    paths = [os.path.join(here, f"_cuda{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for path in paths if os.path.exists(path)), None)


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, or None if it was not built or the GPU here is older than those it was built for."""
    found = path()
    if found is None or (torch.cuda.is_available() and torch.cuda.get_device_capability() < LEAST_CAPABILITY):
        return None
    return ctypes.CDLL(found)
