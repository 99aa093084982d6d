"""The compiled CUDA kernels, pyfast/_cuda*.so: there when the package was built with nvcc, used when CUDA is.

It holds plain extern "C" launchers and its own CUDA runtime, so it needs no torch and one build serves every torch.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os

import pyfast


def path() -> str | None:
    """Where the library lies, or None if it was not built (there was no nvcc)."""
    here = os.path.dirname(os.path.abspath(pyfast.__file__))
    paths = [os.path.join(here, f"_cuda{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for path in paths if os.path.exists(path)), None)


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, or None if it was not built. Loading it touches no device."""
    found = path()
    return None if found is None else ctypes.CDLL(found)
