"""pyfast and its tests without the optional packages: everything can be imported, and what needs one says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
OPTIONAL = ("matplotlib", "tokenizers", "transformers", "triton")
# A name that is None in sys.modules cannot be imported, nor any module below it.
ABSENT = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL}))\n"

EVERY_MODULE = """
import importlib, pkgutil
import pyfast

def reraise(name):
    raise

names = [module.name for module in pkgutil.walk_packages(pyfast.__path__, "pyfast.", onerror=reraise)]
names = [name for name in names if "._cpu_" not in name]  # loaded by pyfast._C, never imported
names = [name for name in names if name != "pyfast._cuda"]  # opened by kernels/cuda_library.py, never imported
names = [name for name in names if not name.startswith("pyfast.kernels.triton.")]  # these need it
for name in names:
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", []):
        getattr(module, public)
print(*names)
"""


def without_optional_packages(directory: Path, code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run `code` in `directory`: Python finds modules there, so it must not be the checkout, which may be unbuilt."""
    command = [sys.executable, "-c", ABSENT + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=directory, timeout=300)


def test_every_module_and_public_name_can_be_imported(tmp_path):
    run = without_optional_packages(tmp_path, EVERY_MODULE)
    assert run.returncode == 0, run.stderr
    some = {"pyfast.ops.attention", "pyfast.models.hugging_face", "pyfast.train.tokenizer", "pyfast.cli"}
    assert some <= set(run.stdout.split())


def test_every_test_file_can_be_collected(tmp_path):
    """So that a suite without them skips the tests that need one, with the reason, and fails none."""
    code = "import pytest; sys.exit(pytest.main(['--collect-only', '-qq', '-p', 'no:cacheprovider', sys.argv[1]]))"
    run = without_optional_packages(tmp_path, code, str(TESTS))
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_tokenizer_file_asks_for_the_package_it_needs(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    run = without_optional_packages(
        tmp_path, "from pyfast.train.tokenizer import load_tokenizer; load_tokenizer('tokenizer.json')"
    )
    assert run.returncode != 0
    assert "pip install 'pyfast[tokenizers]'" in run.stderr
