"""Builds the CPU kernels of one instruction set with address and undefined-behaviour sanitizer and runs cpu_kernels.py.

    python tests/fuzz/sanitized.py                                # builds (two minutes), then a minute of each kernel
    python tests/fuzz/sanitized.py --seconds 300 moe_mlp route    # further arguments are those of cpu_kernels.py

The library is kept in build/sanitized and made anew when a source is newer. Needs GCC and Linux.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC, BUILD = ROOT / "csrc", ROOT / "build" / "sanitized"
ISA = {"avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"],
       "avx2": ["-mavx2", "-mfma", "-mf16c"], "baseline": []}  # fmt: skip
FLAGS = ["-std=c++17", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-gnu-unique", "-w"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]


def build(isa: str) -> Path:
    """The instrumented library."""
    directory = BUILD / isa
    directory.mkdir(parents=True, exist_ok=True)
    newest = max(path.stat().st_mtime for path in CSRC.rglob("*.h"))

    def compile_one(source: Path) -> Path:
        target = directory / f"{source.stem}.o"
        if not target.exists() or target.stat().st_mtime < max(newest, source.stat().st_mtime):
            macro = f'-DPYFAST_ISA="{isa}"'
            subprocess.run(
                ["g++", *FLAGS, *ISA[isa], *SANITIZE, macro, "-c", str(source), "-o", str(target)], check=True
            )
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sorted((CSRC / "cpu").glob("*.cpp"))))
    library = directory / "kernels.so"
    subprocess.run(["g++", "-shared", *SANITIZE, *map(str, objects), "-o", str(library), "-lpthread"], check=True)
    return library


def runtime(name: str) -> str:
    """Path of a library of the compiler's."""
    return subprocess.run(
        ["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()


def main() -> int:
    if "-h" in sys.argv or "--help" in sys.argv:
        print(__doc__)
        return 0
    sys.path.insert(0, str(ROOT))
    from pyfast import _C

    isa = next(isa for isa in ISA if isa in _C.supported_isas())
    library = build(isa)
    print(f"built {library.relative_to(ROOT)}", flush=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so')}",  # before torch, which brings its own
        # leaks are Python's and torch's own, which end with the process
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    script = str(Path(__file__).with_name("cpu_kernels.py"))
    return subprocess.run(
        [sys.executable, script, "--library", str(library), *sys.argv[1:]], env=environment
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
