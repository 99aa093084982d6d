"""`python -m pyfast` is `pyfast`."""

from __future__ import annotations

import sys

from pyfast.cli import main

if __name__ == "__main__":  # the processes that training starts import this module again
    sys.exit(main())
