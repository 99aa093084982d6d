"""Triton's numpy interpreter made right for bfloat16, and strict: bounds, races between programs, any program order.

Left as it is, the interpreter multiplies the bits of bfloat16 numbers as integers, without a word; truncates where a
GPU rounds to nearest even; lets a load or store miss its tensor; and always runs programs in one order. `install()`
mends this for the whole process (the interpreter is module-level functions and a builder class, there is nothing
smaller to mend). Works with triton 3.6 to 3.9. tests/support/triton_processes.py calls it in the interpreter's process.

    with shuffled_programs(seed=1):    # programs of a launch in another order
        kernel[grid](...)
    with tf32_products():              # float32 dots whose precision is "tf32" round their operands as a GPU does
        kernel[grid](...)

What it does not model: register and shared-memory limits, layouts, smallest dot sizes, memory ordering. Compiling
shows most of these (triton_compile.py). Bounds are those of a tensor's storage, not of a view. Atomics are not checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
PRECISE = {tl.bfloat16, tl.float16, tl.float32, tl.float64}

# What the patched functions share: this process' one interpreter.
_now = SimpleNamespace(installed=False, seed=None, tf32=False, order=None, memory=None, patched=set(), extra=[])


class OutOfBounds(RuntimeError):
    """An address that lies in no tensor the kernel was given."""


class Race(RuntimeError):
    """Two programs of one launch touch an address and one of them writes it."""


@contextlib.contextmanager
def shuffled_programs(seed: int):
    """Launches inside run their programs in a random order."""
    before, _now.seed = _now.seed, seed
    try:
        yield
    finally:
        _now.seed = before


@contextlib.contextmanager
def tf32_products():
    """Float32 dots with input_precision "tf32" (Triton's default) keep 10 bits of their operands' mantissas."""
    before, _now.tf32 = _now.tf32, True
    try:
        yield
    finally:
        _now.tf32 = before


@contextlib.contextmanager
def reachable(*tensors):
    """Tensors that kernels reach through tables of addresses instead of arguments."""
    before = _now.extra
    _now.extra = [*before, *tensors]
    try:
        yield
    finally:
        _now.extra = before


def install() -> None:
    """Mend the interpreter of this process; once is enough."""
    if _now.installed:
        return
    _now.installed = True
    _round_bfloat16()
    _reduce_bfloat16()
    _check_memory()
    _order_programs()
    _mend_language()


# ---------------------------------------------------------------------------------------------------------------------
# bfloat16, which the interpreter keeps as uint16
# ---------------------------------------------------------------------------------------------------------------------


def widen(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits -> float32."""
    return (np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits, to nearest, ties to even, as cvt.rn.bf16.f32 does."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)


def _round_tf32(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def _wide(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(widen(handle.data), tl.float32)


def _is_bfloat16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _round_bfloat16() -> None:
    builder = InterpreterBuilder
    cast, convert, dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot
    binary, unary = builder.binary_op, builder.unary_op

    def cast_impl(self, source, target):
        if _is_bfloat16(source) and target.scalar != tl.bfloat16:
            wide = _wide(source)
            return wide if target.scalar == tl.float32 else cast(self, wide, target)
        if target.scalar == tl.bfloat16 and not _is_bfloat16(source):
            wide = source if source.dtype.scalar == tl.float32 else cast(self, source, tl.float32)
            return TensorHandle(narrow(wide.data), tl.bfloat16)
        return cast(self, source, target)

    def create_fp_to_fp(self, source, target, rounding):
        pair = {source.dtype.scalar, target.scalar}
        if tl.bfloat16 in pair and pair <= PRECISE and rounding != interpreter._ir.ROUNDING_MODE.RTZ:
            return cast_impl(self, source, target)
        return convert(self, source, target, rounding)

    def create_dot(self, a, b, d, precision, *rest):
        if _is_bfloat16(a):
            a, b = _wide(a), _wide(b)
        elif _now.tf32 and a.dtype.scalar == tl.float32 and precision == interpreter._ir.INPUT_PRECISION.TF32:
            a, b = (TensorHandle(_round_tf32(x.data), tl.float32) for x in (a, b))
        return dot(self, a, b, d, precision, *rest)

    def binary_op(self, lhs, rhs, op):
        if not _is_bfloat16(lhs) or op in BITWISE:
            return binary(self, lhs, rhs, op)
        result = op(widen(lhs.data), widen(rhs.data))
        return TensorHandle(result, tl.int1) if result.dtype == bool else TensorHandle(narrow(result), tl.bfloat16)

    def unary_op(self, x, op):
        return TensorHandle(narrow(op(widen(x.data))), tl.bfloat16) if _is_bfloat16(x) else unary(self, x, op)

    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = cast_impl, create_fp_to_fp, create_dot
    builder.binary_op, builder.unary_op = binary_op, unary_op


def _reduce_bfloat16() -> None:
    """max, min and sum of bfloat16: in float32, rounded once at the end."""

    def through_float32(reduce):
        def reduced(self, x, *args, **kwargs):
            x = x[0] if isinstance(x, tuple) else x
            if x.dtype != tl.bfloat16:
                return reduce(self, x, *args, **kwargs)
            wide = tl.core.tensor(_wide(x.handle), tl.block_type(tl.float32, list(x.shape)))
            results = reduce(self, wide, *args, **kwargs)
            return tuple(map(rounded, results)) if isinstance(results, tuple) else rounded(results)

        return reduced

    def rounded(x):
        if x.dtype != tl.float32:  # the index of an argmax
            return x
        kind = tl.block_type(tl.bfloat16, list(x.shape)) if x.type.is_block() else tl.bfloat16
        return tl.core.tensor(TensorHandle(narrow(x.handle.data), tl.bfloat16), kind)

    ops = interpreter.ReduceOps
    ops.min_max, ops.sum = through_float32(ops.min_max), through_float32(ops.sum)


# ---------------------------------------------------------------------------------------------------------------------
# Bounds and races
# ---------------------------------------------------------------------------------------------------------------------


class _Memory:
    """The storages a launch may touch, and which program wrote or read each byte position first."""

    def __init__(self, tensors):
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.numel()}
        self.starts = np.array(sorted(storages), np.uint64)
        self.ends = self.starts + np.array([storages[start] for start in sorted(storages)], np.uint64)
        self.bases = np.concatenate([[0], np.cumsum(self.ends - self.starts)]).astype(np.int64)
        self.writers = np.zeros(self.bases[-1], np.int32)  # 0 nobody, otherwise number of the program + 1
        self.readers = np.zeros(self.bases[-1], np.int32)  # -1 several programs

    def positions(self, pointers, mask, what) -> np.ndarray:
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        addresses = np.broadcast_to(pointers.data, shape)[np.broadcast_to(mask.data, shape)]
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        which = np.searchsorted(self.starts, addresses, side="right") - 1
        bad = (which < 0) | (addresses + np.uint64(size) > self.ends[np.maximum(which, 0)]) if len(self.ends) else None
        if addresses.size and (bad is None or bad.any()):
            count = addresses.size if bad is None else int(bad.sum())
            raise OutOfBounds(
                f"{what}: {count} of {addresses.size} addresses lie in no argument, program {_program_index()}"
            )
        return self.bases[which] + (addresses - self.starts[which]).astype(np.int64)

    def read(self, pointers, mask) -> None:
        at, program = self.positions(pointers, mask, "load"), _program_number()
        self._refuse(self.writers[at], program, "reads what program {other} wrote")
        known = self.readers[at]
        self.readers[at] = np.where((known == 0) | (known == program), program, -1)

    def write(self, pointers, mask) -> None:
        at, program = self.positions(pointers, mask, "store"), _program_number()
        self._refuse(self.writers[at], program, "writes what program {other} wrote")
        self._refuse(self.readers[at], program, "writes what program {other} read")
        self.writers[at] = program

    @staticmethod
    def _refuse(known, program, what) -> None:
        others = known[(known != 0) & (known != program)]
        if others.size:
            other = "number " + str(others[0] - 1) if others[0] > 0 else "another"
            raise Race(f"program {_program_index()} {what.format(other=other)} ({others.size} addresses)")


def _program_index() -> tuple[int, int, int]:
    return interpreter.interpreter_builder.grid_idx


def _program_number() -> int:
    (x, y, z), (_, height, depth) = _program_index(), interpreter.interpreter_builder.grid_dim
    return (x * height + y) * depth + z + 1


def _tensors(arguments):
    for x in arguments:
        if isinstance(x, TensorDescriptor):
            yield x.base
        elif isinstance(x, tuple):
            yield from _tensors(x)
        elif hasattr(x, "untyped_storage"):
            yield x


def _check_memory() -> None:
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    launch = interpreter.GridExecutor.__call__

    def create_masked_load(self, pointers, mask, *rest, **kwargs):
        if _now.memory is not None:
            _now.memory.read(pointers, mask)
        return load(self, pointers, mask, *rest, **kwargs)

    def create_masked_store(self, pointers, value, mask, *rest, **kwargs):
        if _now.memory is not None:
            _now.memory.write(pointers, mask)
        return store(self, pointers, value, mask, *rest, **kwargs)

    def checked_launch(self, *args, **kwargs):
        _now.memory = _Memory([*_tensors([*args, *kwargs.values()]), *_now.extra])
        _now.patched.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            _now.memory = None

    InterpreterBuilder.create_masked_load = create_masked_load
    InterpreterBuilder.create_masked_store = create_masked_store
    interpreter.GridExecutor.__call__ = checked_launch


# ---------------------------------------------------------------------------------------------------------------------
# Program order, device_assert, nested functions
# ---------------------------------------------------------------------------------------------------------------------


def _order_programs() -> None:
    set_dim, set_index = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx

    def set_grid_dim(self, *sizes):
        set_dim(self, *sizes)
        _now.order = None
        if _now.seed is not None:
            programs = list(np.ndindex(*sizes))
            random.Random(_now.seed).shuffle(programs)
            _now.order = iter(programs)

    def set_grid_idx(self, *index):
        set_index(self, *(index if _now.order is None else next(_now.order)))

    InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx = set_grid_dim, set_grid_idx


def _mend_language() -> None:
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, debug=True)  # tl.device_assert is checked
    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, *scope):
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())  # numpy 2.4 refuses int() of a [1] array

    def call_nested(self, *args, **kwargs):
        """A kernel's call of another @jit function, without patching the whole language again at each call."""
        module = id(self.fn.__globals__)
        if module not in _now.patched:
            interpreter._patch_lang(self.fn)
            _now.patched.add(module)
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.InterpretedFunction.__call__ = call_nested
