"""Builds the C++ CPU kernels: one shared library per instruction set, and the pybind11 module that loads them.

Needs a C++17 compiler and pybind11, nothing else: csrc includes no torch header. Sources are compiled side by side on
all cores. Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
KERNEL_SOURCES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / "cpu").glob("*.cpp"))
BINDING_SOURCES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("bindings*.cpp"))
HEADERS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.h"))
# -ffp-contract=fast: a * b + c is one fma. No -ffast-math: NaN, inf and the order of sums mean what they say.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-g0",
]
# -fno-gnu-unique keeps inline statics of the libraries apart; the warning is a false alarm of GCC's own intrinsics.
GCC_ONLY = ["-fno-gnu-unique", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
ISA_FLAGS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    ISA_FLAGS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    ISA_FLAGS["avx512"] = [
        "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c", "-mprefer-vector-width=512",
    ]  # fmt: skip


def kernel_library(isa: str) -> Extension:
    """The kernels of csrc/cpu for one instruction set: pyfast/_cpu_<isa>.so, loaded by pyfast._C, never imported."""
    return Extension(
        f"pyfast._cpu_{isa}",
        KERNEL_SOURCES,
        define_macros=[("PYFAST_ISA", f'"{isa}"')],
        extra_compile_args=FLAGS + ISA_FLAGS[isa],
        depends=HEADERS,
        language="c++",
    )


class BuildKernels(build_ext):
    """setuptools' build_ext with all objects compiled in one pool of threads, and only those that are out of date.

    `build_ext --inplace --isas avx512` builds one instruction set only: quicker while a kernel is being written.
    """

    user_options = build_ext.user_options + [
        ("isas=", None, "instruction sets to build, comma separated (default: all)")
    ]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.isas = None

    def build_extensions(self) -> None:
        if self.isas:
            wanted = ["pyfast._C"] + [f"pyfast._cpu_{isa}" for isa in self.isas.split(",")]
            self.extensions = [extension for extension in self.extensions if extension.name in wanted]
        if "clang" not in " ".join(self.compiler.compiler_so):
            for extension in self.extensions:
                extension.extra_compile_args += GCC_ONLY
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            jobs = [
                (extension, [pool.submit(self.compile_one, extension, source) for source in extension.sources])
                for extension in self.extensions
            ]
            for extension, objects in jobs:
                # What is left for setuptools is to link.
                extension.extra_objects = [job.result() for job in objects]
                extension.sources = []
        super().build_extensions()

    def compile_one(self, extension: Extension, source: str) -> str:
        # Each library has its own object directory: the same sources are compiled once per instruction set.
        directory = os.path.join(self.build_temp, extension.name)
        (target,) = self.compiler.object_filenames([source], output_dir=directory)
        newest = max(os.path.getmtime(path) for path in [source, "setup.py", *extension.depends])
        if self.force or not os.path.exists(target) or os.path.getmtime(target) < newest:
            self.compiler.compile(
                [source],
                output_dir=directory,
                macros=extension.define_macros,
                include_dirs=extension.include_dirs,
                extra_postargs=extension.extra_compile_args,
            )
        return target

    def build_extension(self, extension: Extension) -> None:
        extension.depends = [*extension.depends, *extension.extra_objects]  # linked again when an object is newer
        super().build_extension(extension)


module = Extension(
    "pyfast._C",
    BINDING_SOURCES,
    include_dirs=[pybind11.get_include()],
    extra_compile_args=["-std=c++17", "-O1", "-fvisibility=hidden", "-Wall", "-g0"],
    extra_link_args=["-ldl"] if sys.platform.startswith("linux") else [],
    depends=HEADERS,
    language="c++",
)

setup(
    ext_modules=[module] + [kernel_library(isa) for isa in ISA_FLAGS],
    cmdclass={"build_ext": BuildKernels},
)
