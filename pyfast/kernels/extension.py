"""The compiled module `pyfast._C`, or an error that says why it is not there."""

from __future__ import annotations

try:
    from pyfast import _C
except ImportError as error:
    import os

    import pyfast

    where = os.path.dirname(os.path.abspath(pyfast.__file__))
    if os.path.exists(os.path.join(os.path.dirname(where), "setup.py")):
        raise ImportError(
            f"{where} is the source tree, in which nothing is compiled: Python found it before the installed package "
            "because this directory comes first in its path. Run from another directory (or use the `pyfast` command "
            "instead of `python -m pyfast`), or compile in place with `python setup.py build_ext --inplace`."
        ) from error
    raise ImportError(
        f"the compiled part of pyfast cannot be loaded from {where}: {error}. Install it again with `pip install .` "
        "(needs a C++17 compiler)."
    ) from error

__all__ = ["_C"]
