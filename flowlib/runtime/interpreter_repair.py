"""Repairs for Triton's NumPy interpreter, 3.6 to 3.8. Use :func:`flowlib.runtime.interpreter.install`.

The interpreter keeps bfloat16 and fp8 as raw 8 and 16 bit patterns and lets NumPy compute on those. Repaired here:

- bfloat16 arithmetic, dot, fma, comparison, sum, min, max and cumulative sums: computed in fp32 and rounded once;
- fp32 to bfloat16 and to fp8: round to nearest even (fp8 saturating), where stock truncates or loses the carry;
- ``maximum``, ``minimum`` and ``max``, ``min`` ignore NaN as the GPU does;
- xor and or reductions (behind ``tl.sort`` and ``tl.topk``) use a ufunc, where stock loops over elements in Python;
- loop bounds loaded from memory work with NumPy 2.4; ``~x`` of unsigned integers works with NumPy 2;
- floating-point warnings of NumPy (``inf - inf`` in a masked lane) are silenced while a kernel runs;
- a call of a device function does not go through all of Triton's language again to replace what has been replaced: a
  third of the time of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock

Array = np.ndarray[Any, Any]
Handle = stock.TensorHandle
Builder = stock.InterpreterBuilder

_FP8 = {tl.float8e4nv: (torch.float8_e4m3fn, 448.0), tl.float8e5: (torch.float8_e5m2, 57344.0)}
_WIDE = (tl.float32, tl.float16, tl.bfloat16)
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)
_applied = False


def apply() -> None:
    """Patch the interpreter of this process, once."""
    global _applied
    if _applied:
        return
    _repair_conversions()
    _repair_arithmetic()
    _repair_nan_and_bits()
    _repair_reductions()
    _repair_scans()
    _repair_loop_bounds()
    _silence_numpy()
    _spare_device_calls()
    _applied = True


def bf16_to_fp32(bits: Array) -> Array:
    """uint16 bit patterns -> fp32 values."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def fp32_to_bf16(values: Array) -> Array:
    """fp32 values -> uint16 bit patterns, rounded to nearest even."""
    values = np.asarray(values, dtype=np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16).reshape(values.shape)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def _fp8_to_fp32(bits: Array, dtype: tl.dtype) -> Array:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(_FP8[dtype][0]).float().numpy().reshape(bits.shape)


def _fp32_to_fp8(values: Array, dtype: tl.dtype) -> Array:
    torch_dtype, largest = _FP8[dtype]
    clamped = torch.from_numpy(np.ascontiguousarray(values)).clamp(-largest, largest)
    return clamped.to(torch_dtype).view(torch.uint8).numpy().reshape(values.shape)


def _is_bf16(handle: Handle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _to_fp32(data: Array, dtype: tl.dtype) -> Array:
    if dtype == tl.bfloat16:
        return bf16_to_fp32(data)
    if dtype in _FP8:
        return _fp8_to_fp32(data, dtype)
    return np.ascontiguousarray(data).view(np.float16 if dtype == tl.float16 else np.float32).astype(np.float32)


def _from_fp32(values: Array, dtype: tl.dtype) -> Array:
    if dtype == tl.bfloat16:
        return fp32_to_bf16(values)
    if dtype in _FP8:
        return _fp32_to_fp8(values, dtype)
    return values.astype(np.float16 if dtype == tl.float16 else np.float32)


def _widen(handle: Handle) -> Handle:
    """The same values in fp32, where they are held as bfloat16."""
    return Handle(bf16_to_fp32(handle.data), tl.float32) if _is_bf16(handle) else handle


def _bf16(values: Array) -> Handle:
    return Handle(fp32_to_bf16(values), tl.bfloat16)


def _repair_conversions() -> None:
    stock_convert, stock_cast = stock._convert_float, Builder.cast_impl
    known = (*_WIDE, *_FP8)

    def convert(data: Array, source: tl.dtype, target: tl.dtype, rounding: Any) -> Array:
        source, target = source.scalar, target.scalar
        narrow = tl.bfloat16 in (source, target) or source in _FP8 or target in _FP8
        if narrow and source in known and target in known:
            return _from_fp32(_to_fp32(data, source), target)
        return stock_convert(data, source, target, rounding)

    def cast(self: Builder, handle: Handle, target: tl.dtype) -> Handle:
        source, wanted = handle.dtype.scalar, target.scalar
        if source == wanted or tl.bfloat16 not in (source, wanted):
            return stock_cast(self, handle, target)
        if wanted == tl.bfloat16:
            return _bf16(handle.data.astype(np.float32))
        return _widen(handle) if wanted == tl.float32 else stock_cast(self, _widen(handle), target)

    stock._convert_float = convert
    Builder.cast_impl = cast
    if not hasattr(Builder, "get_bf16"):
        Builder.get_bf16 = lambda self, value: _bf16(np.array([value], np.float32))


def _repair_arithmetic() -> None:
    binary, unary, ternary = Builder.binary_op, Builder.unary_op, Builder.ternary_op
    stock_fma, stock_dot = Builder.create_fma, Builder.create_dot

    def binary_op(self: Builder, left: Handle, right: Handle, op: Callable) -> Handle:
        if not _is_bf16(left) or op in _BITWISE:
            return binary(self, left, right, op)
        out = op(_widen(left).data, _widen(right).data)
        return Handle(out, tl.int1) if out.dtype == np.bool_ else _bf16(out)

    def unary_op(self: Builder, arg: Handle, op: Callable) -> Handle:
        return _bf16(op(_widen(arg).data)) if _is_bf16(arg) else unary(self, arg, op)

    def ternary_op(self: Builder, a: Handle, b: Handle, c: Handle, op: Callable) -> Handle:
        if op is np.where or not _is_bf16(c):
            return ternary(self, a, b, c, op)
        return _bf16(op(_widen(a).data, _widen(b).data, _widen(c).data))

    def create_fma(self: Builder, x: Handle, y: Handle, z: Handle) -> Handle:
        if not _is_bf16(z):
            return stock_fma(self, x, y, z)
        return _bf16(_widen(x).data * _widen(y).data + _widen(z).data)

    def create_dot(self: Builder, a: Handle, b: Handle, acc: Handle, *rest: Any) -> Handle:
        return stock_dot(self, _dot_operand(a), _dot_operand(b), acc, *rest)

    Builder.binary_op, Builder.unary_op, Builder.ternary_op = binary_op, unary_op, ternary_op
    Builder.create_fma, Builder.create_dot = create_fma, create_dot


def _dot_operand(handle: Handle) -> Handle:
    """Low precision operands in fp32, so that products are exact and the sum is fp32, as on tensor cores."""
    dtype = handle.dtype.scalar
    if dtype not in (tl.bfloat16, tl.float16, *_FP8):
        return handle
    return Handle(_to_fp32(handle.data, dtype), tl.float32)


def _repair_nan_and_bits() -> None:
    stock_ones = Builder.get_all_ones_value

    def get_all_ones_value(self: Builder, dtype: tl.dtype) -> Handle:
        numpy_dtype = stock._get_np_dtype(dtype)
        if np.dtype(numpy_dtype).kind != "u":
            return stock_ones(self, dtype)
        return Handle(np.full(1, np.iinfo(numpy_dtype).max, dtype=numpy_dtype), dtype.scalar)

    Builder.get_all_ones_value = get_all_ones_value
    Builder.create_maxnumf = lambda self, left, right: self.binary_op(left, right, np.fmax)
    Builder.create_minnumf = lambda self, left, right: self.binary_op(left, right, np.fmin)


def _in_fp32(value: tl.tensor) -> tl.tensor:
    data = bf16_to_fp32(value.handle.data)
    return tl.core.tensor(Handle(data, tl.float32), tl.block_type(tl.float32, list(data.shape)))


def _in_bf16(value: tl.tensor) -> tl.tensor:
    dtype = tl.block_type(tl.bfloat16, value.type.shape) if value.type.is_block() else tl.bfloat16
    return tl.core.tensor(_bf16(value.handle.data), dtype)


def _repair_reductions() -> None:
    ops = stock.ReduceOps
    stock_sum, stock_min_max, stock_apply = ops.sum, ops.min_max, ops.apply_impl
    ignoring_nan = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}  # the nan forms warn where every lane is NaN
    bitwise = {
        getattr(tl.standard, name): ufunc
        for name, ufunc in (("_xor_combine", np.bitwise_xor), ("_or_combine", np.bitwise_or))
        if hasattr(tl.standard, name)
    }

    def total(self: Any, value: tl.tensor) -> tl.tensor:
        if value.dtype.scalar != tl.bfloat16:
            return stock_sum(self, value)
        return _in_bf16(stock_sum(self, _in_fp32(value)))

    def min_max(self: Any, value: Any, val_reduce_op: Any = None, idx_reduce_op: Any = None) -> Any:
        value = value[0] if isinstance(value, tuple) else value
        val_reduce_op = ignoring_nan.get(val_reduce_op, val_reduce_op)
        if value.dtype.scalar != tl.bfloat16:
            return stock_min_max(self, value, val_reduce_op, idx_reduce_op)
        found = stock_min_max(self, _in_fp32(value), val_reduce_op, idx_reduce_op)
        if isinstance(found, tuple):
            return _in_bf16(found[0]), found[1]
        return _in_bf16(found) if val_reduce_op else found

    def apply_impl(self: Any, values: Any) -> Any:
        ufunc, first = bitwise.get(self.combine_fn), values[0]
        if ufunc is None or self.axis is None or first.handle.data.dtype.kind not in "iub":
            return stock_apply(self, values)
        reduced = ufunc.reduce(first.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(reduced, first.dtype)

    ops.sum, ops.min_max, ops.apply_impl = total, min_max, apply_impl


def _repair_scans() -> None:
    stock.ScanOps.cumsum = _scan_in_fp32(stock.ScanOps.cumsum)
    stock.ScanOps.cumprod = _scan_in_fp32(stock.ScanOps.cumprod)


def _scan_in_fp32(stock_scan: Callable) -> Callable:
    def scan(self: Any, value: tl.tensor) -> list[tl.tensor]:
        if value.dtype.scalar != tl.bfloat16:
            return stock_scan(self, value)
        return [_in_bf16(stock_scan(self, _in_fp32(value))[0])]

    return scan


def _repair_loop_bounds() -> None:
    """Scalars are held as arrays of one element, which NumPy 2.4 no longer turns into an int by itself."""
    stock_patch = stock._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        stock_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    stock._patch_lang_tensor = patch


def _silence_numpy() -> None:
    """A GPU raises no floating-point warnings; neither should a run whose warnings are errors."""
    stock_call = stock.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return stock_call(self, *args, **kwargs)

    stock.GridExecutor.__call__ = call


def _spare_device_calls() -> None:
    """Stock patches the language at each call of a device function."""
    stock_call = stock.InterpretedFunction.__call__
    of_function: dict[Any, list[Any]] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in of_function:
            of_function[self.fn] = [value for value in self.fn.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.load) for language in of_function[self.fn]):
            return stock_call(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise stock.InterpreterError(repr(error)) from error

    stock.InterpretedFunction.__call__ = call
