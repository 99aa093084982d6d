"""Which kernels run and on whose threads: instruction sets, torch's OpenMP runtime, what an import loads.

Each claim is about a whole process, so each is checked in a fresh one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pyfast import ops
from pyfast.kernels import cpu

RUNNER = Path(__file__).parent / "isa_results.py"
TOLERANCE = {"float32": 2e-6, "float64": 1e-14, "bfloat16": 8e-3, "float16": 1e-3}  # of the norm
NO_CPU_KERNEL = {"copy_to_group", "reduce_from_group", "gather_from_group", "RowMap", "Routing"}
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def run(*command: str) -> str:
    """The standard output of `python *command`, which must succeed."""
    here = RUNNER.parent  # not the checkout, whose pyfast may not be the one that is installed
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def results_of(isa: str, directory: Path) -> dict[str, torch.Tensor]:
    run(str(RUNNER), isa, str(directory / isa))
    return load_file(directory / isa)


@pytest.fixture(scope="module")
def best(tmp_path_factory) -> dict[str, torch.Tensor]:
    return results_of(cpu.available_isas()[0], tmp_path_factory.mktemp("isa"))


def test_every_op_is_compared(best):
    missing = set(ops.__all__) - NO_CPU_KERNEL - {key.split()[0] for key in best}
    assert not missing, f"add a case to {RUNNER.name} for {sorted(missing)}"


@pytest.mark.parametrize("isa", ["avx512", "avx2", "baseline"])
def test_every_instruction_set_computes_the_same(isa, best, tmp_path):
    """On a machine with AVX-512 (and AVX512-BF16) this is also the test that one without it works."""
    if isa not in cpu.available_isas():
        pytest.skip(f"{isa} was not built or this processor lacks it")
    results = results_of(isa, tmp_path)
    assert results.keys() == best.keys()
    for key, tensor in results.items():
        expected = best[key].double()
        error = (tensor.double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[key.split()[1]], f"{key}: {error:.2e}"


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match="isa is 'mmx'.*baseline"):
        cpu.use_isa("mmx")


@linux_only
def test_the_openmp_runtime_is_torchs():
    code = """
import torch
from pyfast import _C, ops
ops.rms_norm(torch.ones(999, 999), torch.ones(999))
assert _C.has_openmp()
print("\\n".join({line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}))
"""
    libraries = [path for path in run("-c", code).splitlines() if re.match(r"lib(g|i)?omp\d*[-.]", Path(path).name)]
    assert len(libraries) == 1, libraries


@linux_only
def test_set_num_threads_is_obeyed():
    """Counts the threads that spend time while a kernel runs: as many as asked for, also after more were there."""
    code = """
import os, time, torch
from pyfast import ops
def nanoseconds():
    return {t: int(open(f"/proc/self/task/{t}/schedstat").read().split()[0]) for t in os.listdir("/proc/self/task")}
torch.set_num_threads(1)
x, weight = torch.ones(2000, 1000), torch.ones(1000)
for count in (1, 3, 2, 1):
    torch.set_num_threads(count)
    time.sleep(0.3)  # workers of the loop before have stopped spinning
    before = nanoseconds()
    for _ in range(20):
        ops.rms_norm(x, weight)
    print(sum(spent > before.get(thread, 0) + 10_000 for thread, spent in nanoseconds().items()))
"""
    assert run("-c", code).split() == ["1", "3", "2", "1"]


def test_import_loads_nothing_needless():
    """`import pyfast` loads no kernels; the ops need neither triton nor CUDA, and touch neither."""
    code = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import pyfast
assert "pyfast._C" not in sys.modules and "pyfast.ops" not in sys.modules, sorted(sys.modules)
import torch
from pyfast import ops
ops.rms_norm(torch.ones(3, 4), torch.ones(4, requires_grad=True)).sum().backward()
assert not torch.cuda.is_initialized()
"""
    run("-c", code)


def test_ops_do_not_import_triton():
    run("-c", "import sys, pyfast.ops; assert 'triton' not in sys.modules")


def test_importing_the_package_loads_no_kernels():
    """Kernels are loaded for the device that is used, by `kernels.for_device`, and not before."""
    code = "import sys, pyfast.ops, pyfast.nn, pyfast.models, pyfast.parallel, pyfast.kernels.plain"
    run("-c", f"{code}; assert 'pyfast._C' not in sys.modules and 'pyfast.kernels.cpu' not in sys.modules")


def test_compiled_functions_without_kernels_say_so():
    """In a process that has imported the bare module alone: an error, not a crash."""
    code = """
from pyfast import _C
zeros = (0,) * 9
array = (0, (0, 1, 1), (1, 1, 1))
tables, options = (0,) * 6, (True, 1.0, -1, -1, 0.0)
calls = (
    lambda: _C.fma_peak(0.01),
    lambda: _C.attention_forward(0, array, array, array, tables, options, 0, 1, 0, 0, False, False, 0),
    lambda: _C.attention_delta(0, False, array, array, 0, 0, 1),
    lambda: _C.swiglu_forward(*zeros),
)
for call in calls:
    try:
        call()
    except RuntimeError as error:
        print(error)
"""
    lines = run("-c", code).splitlines()
    assert len(lines) == 4
    assert all("no CPU kernels are loaded: import pyfast.kernels.cpu" in line for line in lines)
