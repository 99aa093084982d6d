"""pyfast: fused kernels and a thin parallel layer for training large transformers, on CPUs and GPUs."""

from __future__ import annotations

from types import ModuleType

__version__ = "0.1.0"
_PACKAGES = ("comm", "integrations", "models", "nn", "ops", "parallel", "train")


def __getattr__(name: str) -> ModuleType:
    """`pyfast.ops` and the others are imported on first use: `pyfast --help` needs no torch."""
    import importlib

    if name in _PACKAGES:
        return importlib.import_module(f"pyfast.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__version__", *_PACKAGES]
