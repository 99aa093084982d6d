"""Training end to end: the config, the loop, the data, and the processes it runs on."""

from __future__ import annotations

from typing import Any

_MODULES = {
    "TrainConfig": "config",
    "from_dict": "config",
    "Trainer": "trainer",
    "FitResult": "trainer",
    "TrainingError": "errors",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import on first use: reading a config needs no model, and `pyfast --help` needs no torch."""
    import importlib

    if name in _MODULES:
        return getattr(importlib.import_module(f"pyfast.train.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
