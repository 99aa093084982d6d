"""Compiles Triton kernels for GPUs that are not here, and says what came out. Needs no GPU, driver or CUDA.

    kernels = compile_launches(90, lambda: launch(torch.empty(...), ...))    # the launcher's own code, nothing runs
    for kernel in kernels:
        kernel.check(tensor_cores=True)

`compile_launches` runs real launch code on CPU tensors with a stand-in driver: specialization, descriptors, options and
configurations are those of a launch. Needs a process without TRITON_INTERPRET; see triton_processes.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

# The most shared memory a block may have, bytes.
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# The instruction that multiplies 16-bit tiles: mma, wgmma, tcgen05.mma.
TENSOR_CORE = {80: "HMMA", 86: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
MNEMONICS = "HGMMA HMMA UTCHMMA UTMALDG UTMASTG LDGSTS LDL STL USETMAXREG FFMA".split()
_TOOLS = os.path.join(os.path.dirname(triton.backends.nvidia.__file__), "bin")


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled for one architecture."""

    name: str
    arch: int
    registers: int  # of a thread
    spilled: int  # bytes of local memory of a thread
    shared: int  # bytes of a block
    asked_warps: int
    warps: int  # more than asked for when the compiler split off warps of its own (warp specialization)
    instructions: dict[str, int] = field(repr=False)

    def check(self, *, tensor_cores: bool = True, tma: bool = False, warp_specialized: bool = False) -> None:
        """Raises AssertionError naming what is wrong: spills, too much shared memory, no tensor-core instruction."""
        who = f"{self.name} for sm_{self.arch}, {self.asked_warps} warps"
        assert self.spilled == 0, f"{who}: {self.spilled} bytes of registers are spilled"
        assert self.shared <= SHARED_LIMIT[self.arch], f"{who}: {self.shared} bytes of shared memory cannot be had"
        if tensor_cores:
            wanted = TENSOR_CORE[self.arch]
            assert self.instructions.get(wanted), f"{who}: no {wanted} among {self.instructions}"
        if tma and self.arch >= 90:
            assert self.instructions.get("UTMALDG"), f"{who}: no TMA load among {self.instructions}"
        if warp_specialized:
            on = self.instructions.get("USETMAXREG") and self.warps > self.asked_warps
            assert on, f"{who}: warp specialization is off, {self.warps} warps, {self.instructions}"


class _AbsentGPU:
    """What Triton asks a driver for before a launch."""

    def __init__(self, arch: int):
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch  # compiled kernels are cached by device number

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        return lambda function, quantiles=None, **options: [1.0] * 3

    def map_python_to_cpp_type(self, kind):
        return "int"


@contextlib.contextmanager
def absent_gpu(arch: int) -> Iterator[list[Compiled]]:
    """Launches inside are compiled for sm_`arch` and not run; the list fills with what they gave, one a kernel."""
    results: list[Compiled] = []
    seen = set()
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            results.append(_inspect(kernel, arch, options.get("num_warps", 4)))
        return kernel

    before = driver._active  # `active` would look for a GPU, and raise
    driver.set_active(_AbsentGPU(arch))
    JITFunction.run = compile_only
    try:
        yield results
    finally:
        JITFunction.run = run
        driver._active = before


def compile_launches(arch: int, launch: Callable[[], object]) -> list[Compiled]:
    """Every kernel that `launch()` would start, compiled for sm_`arch`."""
    with absent_gpu(arch) as results:
        launch()
    return results


def _inspect(kernel, arch: int, asked_warps: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = _run("nvdisasm", "-c", file.name)
        usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", _run("cuobjdump", "--dump-resource-usage", file.name)))
    counts = {name: len(re.findall(rf"\b{name}\b", listing)) for name in MNEMONICS}
    return Compiled(
        name=kernel.metadata.name,
        arch=arch,
        registers=int(usage["REG"]),
        spilled=int(usage["STACK"]) + int(usage["LOCAL"]),
        shared=kernel.metadata.shared,
        asked_warps=asked_warps,
        warps=kernel.metadata.num_warps,
        instructions={name: count for name, count in counts.items() if count},
    )


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([os.path.join(_TOOLS, tool), *arguments], capture_output=True, text=True, check=True).stdout
