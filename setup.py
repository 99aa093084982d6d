"""Builds the C++ CPU kernels: one shared library per instruction set, and the pybind11 module that loads them.

Needs a C++17 compiler and pybind11, nothing else: csrc includes no torch header. Sources are compiled side by side on
all cores. Where nvcc is found, the CUDA kernels are built too (`build_ext --no-cuda` leaves them out). Everything else
about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
KERNEL_SOURCES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / "cpu").glob("*.cpp"))
BINDING_SOURCES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("bindings*.cpp"))
CUDA_SOURCES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / "cuda").glob("*.cu"))
CUDA_HEADERS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / "cuda").glob("*.h"))
HEADERS = sorted({str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.h")} - {*CUDA_HEADERS})
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


# GPU code -> what it is made from. compute_80 stays in the library too, for newer GPUs to translate.
CUDA_TARGETS = {"sm_80": "compute_80", "sm_90a": "compute_90a", "sm_100": "compute_100"}
CUDA_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"]


def find_nvcc() -> str | None:
    """The CUDA compiler, if this machine has one."""
    usual = "/usr/local/cuda/bin/nvcc"
    return shutil.which("nvcc") or (usual if os.path.exists(usual) else None)


class CudaLibrary(Extension):
    """The kernels of csrc/cuda: pyfast/_cuda.so with a CUDA runtime of its own, loaded only where CUDA is used."""

    def __init__(self, nvcc: str) -> None:
        super().__init__("pyfast._cuda", CUDA_SOURCES, depends=CUDA_HEADERS)
        self.nvcc = nvcc

    def target_flags(self) -> list[str]:
        """The GPUs that this nvcc knows among those the kernels are compiled for."""
        known = subprocess.run(
            [self.nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True
        ).stdout.split()
        targets = {code: arch for code, arch in CUDA_TARGETS.items() if code in known or code.rstrip("a") in known}
        codes = {arch: f"[{code},{arch}]" if code == "sm_80" else code for code, arch in targets.items()}
        return [flag for arch, code in codes.items() for flag in ("-gencode", f"arch={arch},code={code}")]

    def compile(self, source: str, target: str) -> None:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        self.run([*CUDA_FLAGS, *self.target_flags(), "-c", source, "-o", target])

    def link(self, objects: list[str], target: str) -> None:
        os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
        self.run(["-shared", "-cudart", "static", *self.target_flags(), *objects, "-o", target])

    def run(self, arguments: list[str]) -> None:
        print(" ".join([self.nvcc, *arguments]))
        try:
            subprocess.run([self.nvcc, *arguments], check=True)
        except subprocess.CalledProcessError as error:
            raise CompileError(
                f"{self.nvcc} failed; to build without the CUDA kernels: "
                "pip install . -C--global-option=build_ext -C--global-option=--no-cuda"
            ) from error


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

    `build_ext --inplace --isas avx512` builds one instruction set only, `--no-cuda` all without the CUDA kernels:
    quicker while a kernel is being written.
    """

    user_options = build_ext.user_options + [
        ("isas=", None, "instruction sets to build, comma separated, and no CUDA kernels (default: all)"),
        ("no-cuda", None, "leave out the CUDA kernels even if nvcc is there"),
    ]
    boolean_options = build_ext.boolean_options + ["no-cuda"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.isas = None
        self.no_cuda = "--no-cuda" in sys.argv  # bdist_wheel makes this command anew, without the options it was given

    def build_extensions(self) -> None:
        if self.no_cuda:
            self.extensions = [extension for extension in self.extensions if not isinstance(extension, CudaLibrary)]
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
        target = os.path.join(directory, os.path.splitext(source)[0] + ".o")  # where compiler.compile puts it too
        newest = max(os.path.getmtime(path) for path in [source, "setup.py", *extension.depends])
        if not self.force and os.path.exists(target) and os.path.getmtime(target) >= newest:
            return target
        if isinstance(extension, CudaLibrary):
            extension.compile(source, target)
        else:
            self.compiler.compile(
                [source],
                output_dir=directory,
                macros=extension.define_macros,
                include_dirs=extension.include_dirs,
                extra_postargs=extension.extra_compile_args,
            )
        return target

    def build_extension(self, extension: Extension) -> None:
        if isinstance(extension, CudaLibrary):
            extension.link(extension.extra_objects, self.get_ext_fullpath(extension.name))
            return
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

nvcc = find_nvcc()
cuda = [CudaLibrary(nvcc)] if nvcc else []

setup(
    ext_modules=cuda + [module] + [kernel_library(isa) for isa in ISA_FLAGS],
    cmdclass={"build_ext": BuildKernels},
)
