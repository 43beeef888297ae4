"""bf16 and fp8 as a GPU has them, in Triton's interpreter.

The interpreter (TRITON_INTERPRET=1, Triton 3.6 to 3.9) keeps bf16 as uint16 and fp8 as uint8 and then computes with those bit
patterns: sums, products, comparisons, reductions and dot products of bf16 are wrong by any factor, float32 is cut instead of
rounded to bf16, a carry out of an fp8 mantissa is lost, fp8 NaNs read as numbers. ``install`` replaces these operations by ones
on float32 values, rounded once to nearest even. An fp8 down-cast saturates, as ``cvt.rn.satfinite`` does in PTX.

It also does what a GPU does and numpy does not: a dot product of float32 in tf32 precision rounds its operands, a largest or
smallest value passes over NaNs, and an overflow is no warning. Compiled kernels are not affected.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Values = np.ndarray[Any, Any]

_FP8 = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
_PLAIN = (tl.float16, tl.float32, tl.float64)
_ROUND_TO_ZERO = interpreter._ir.ROUNDING_MODE.RTZ


def decode(bits: Values, dtype: Any) -> Values:
    """The values of an array as the interpreter keeps it: float32 of bf16 and fp8 bit patterns, any other array as it is."""
    if dtype == tl.bfloat16:
        return (np.asarray(bits).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype in _FP8:
        return _fp8_values(dtype)[np.asarray(bits).view(np.uint8)]
    return bits


def encode(values: Values, dtype: Any) -> Values:
    """An array of ``values`` as the interpreter keeps one of ``dtype``: rounded to nearest even, fp8 saturating."""
    if dtype == tl.bfloat16:
        bits = np.asarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1).astype(np.uint32)) >> 16
        return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FFF), rounded).astype(np.uint16)
    if dtype in _FP8:
        target = _FP8[dtype]
        exact = torch.from_numpy(np.array(values, dtype=np.float32))
        largest = torch.finfo(target).max
        return torch.where(exact.isnan(), exact, exact.clamp(-largest, largest)).to(target).view(torch.uint8).numpy()
    return np.asarray(values).astype(interpreter._get_np_dtype(dtype))


@functools.cache
def _fp8_values(dtype: Any) -> Values:
    """The float32 value of each of the 256 bit patterns."""
    return torch.arange(256, dtype=torch.uint8).view(_FP8[dtype]).float().numpy()


def _is_soft(dtype: Any) -> bool:
    """Whether the interpreter keeps the type as bit patterns that numpy cannot compute with."""
    return dtype == tl.bfloat16 or dtype in _FP8


def _is_known(dtype: Any) -> bool:
    return _is_soft(dtype) or dtype in _PLAIN


def _values(handle: Any) -> Values:
    return decode(handle.data, handle.dtype.scalar)


def _handle(values: Values, dtype: Any) -> Any:
    return interpreter.TensorHandle(encode(values, dtype), dtype)


@functools.cache
def install() -> None:
    """Patch the interpreter of this process. Patches once, however often it is called."""
    _patch(interpreter, "_convert_float", _convert_float)
    builder = interpreter.InterpreterBuilder
    for name, replacement in _BUILDER.items():
        _patch(builder, name, replacement)
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.get_bf16 = lambda self, value: _handle(np.array([value], dtype=np.float32), tl.bfloat16)
    interpreter.ReduceOps.min_max = _min_max
    for owner, name in ((interpreter.ReduceOps, "sum"), (interpreter.ScanOps, "cumsum"), (interpreter.ScanOps, "cumprod")):
        _patch(owner, name, _in_float32)
    _patch(interpreter, "_patch_lang_tensor", _patch_lang_tensor)
    _patch(interpreter, "_patch_lang", _LanguagePatches().patch)
    _patch(interpreter.GridExecutor, "__call__", _call_grid)


def _patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Put ``replacement`` where ``owner.name`` is; it is called with the original before all other arguments."""
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, patched)


def _convert_float(original: Any, bits: Values, source: Any, target: Any, rounding_mode: Any) -> Values:
    source, target = source.scalar, target.scalar
    if not (_is_known(source) and _is_known(target)) or rounding_mode == _ROUND_TO_ZERO:
        return original(bits, source, target, rounding_mode)  # type: ignore[no-any-return]
    converted = encode(decode(bits, source), target)
    bit_patterns: Values = converted.view(getattr(np, f"uint{target.primitive_bitwidth}")).reshape(bits.shape)
    return bit_patterns


def _cast(original: Any, self: Any, source: Any, target: Any) -> Any:
    source_type, target_type = source.dtype.scalar, target.scalar
    if not (_is_soft(source_type) or _is_soft(target_type)):
        return original(self, source, target)
    return _handle(_values(source), target_type)


def _binary(original: Any, self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    dtype = lhs.dtype.scalar
    if not _is_soft(dtype) or op in (np.bitwise_and, np.bitwise_or, np.bitwise_xor):
        return original(self, lhs, rhs, op)
    result = op(_values(lhs), _values(rhs))
    return interpreter.TensorHandle(result, tl.int1) if result.dtype == np.bool_ else _handle(result, dtype)


def _unary(original: Any, self: Any, arg: Any, op: Any) -> Any:
    dtype = arg.dtype.scalar
    return _handle(op(_values(arg)), dtype) if _is_soft(dtype) else original(self, arg, op)


def _fma(original: Any, self: Any, x: Any, y: Any, z: Any) -> Any:
    dtype = z.dtype.scalar
    if not _is_soft(dtype):
        return original(self, x, y, z)
    return _handle(_values(x).astype(np.float64) * _values(y) + _values(z), dtype)


def _clamp(original: Any, self: Any, arg: Any, low: Any, high: Any, propagate_nans: Any) -> Any:
    dtype = arg.dtype.scalar
    if not _is_soft(dtype):
        return original(self, arg, low, high, propagate_nans)
    ignores_nans = propagate_nans == interpreter._ir.PROPAGATE_NAN.NONE
    larger, smaller = (np.fmax, np.fmin) if ignores_nans else (np.maximum, np.minimum)
    return _handle(smaller(larger(_values(arg), _values(low)), _values(high)), dtype)


def _dot(original: Any, self: Any, a: Any, b: Any, acc: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    if a.dtype.scalar not in (tl.float16, tl.float32) and not _is_soft(a.dtype.scalar):
        return original(self, a, b, acc, input_precision, max_num_imprecise_acc)
    lhs, rhs = (_values(side).astype(np.float32) for side in (a, b))  # float16 products are exact in float32, and BLAS has them
    if a.dtype.scalar == tl.float32 and input_precision == interpreter._ir.INPUT_PRECISION.TF32:
        lhs, rhs = _tf32(lhs), _tf32(rhs)
    dtype = acc.dtype.scalar
    return _handle(np.matmul(lhs, rhs) + _values(acc), dtype)


def _tf32(values: Values) -> Values:
    """float32 values of 10 mantissa bits, rounded half away from zero as ``cvt.rna.tf32`` does."""
    bits = values.view(np.uint32)
    special = (bits & 0x7F800000) == 0x7F800000
    return np.where(special, bits, (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def _atomic_rmw(original: Any, self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
    """Floating-point addition on bf16, one lane after the other."""
    dtype = val.dtype.scalar
    if not _is_soft(dtype) or op != interpreter._ir.ATOMIC_OP.FADD:
        return original(self, op, ptr, val, mask, sem, scope)
    memory, np_dtype = interpreter._interpreter, interpreter._get_np_dtype(dtype)
    pointers = ptr.data.reshape(-1)
    chosen = np.broadcast_to(mask.data, ptr.data.shape).reshape(-1)
    added = np.broadcast_to(_values(val), ptr.data.shape).reshape(-1)
    before = np.zeros(pointers.shape, dtype=np_dtype)
    for lane in np.flatnonzero(chosen):
        here, on = pointers[lane : lane + 1], np.ones(1, dtype=bool)
        before[lane : lane + 1] = memory.load(here, on, np.zeros(1, dtype=np_dtype), np_dtype)
        memory.store(here, encode(decode(before[lane : lane + 1], dtype) + added[lane], dtype), on)
    return interpreter.TensorHandle(before.reshape(ptr.data.shape), dtype)


_BUILDER: dict[str, Callable[..., Any]] = {
    "cast_impl": _cast,
    "binary_op": _binary,
    "unary_op": _unary,
    "create_fma": _fma,
    "create_clampf": _clamp,
    "create_dot": _dot,
    "create_atomic_rmw": _atomic_rmw,
}


def _min_max(self: Any, operands: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
    """Largest or smallest values of a tensor, or of the first of a tuple, and their leftmost places. NaNs are passed over."""
    operand = operands[0] if isinstance(operands, tuple) else operands
    dtype, values = operand.dtype.scalar, _values(operand.handle)
    largest = val_reduce_op in (np.max, np.nanmax) or idx_reduce_op in (np.argmax, np.nanargmax)
    results = []
    if val_reduce_op is not None:
        best = (np.fmax if largest else np.fmin).reduce(values, axis=self.axis, keepdims=self.keep_dims)
        results.append(self.to_tensor(encode(best, dtype) if _is_soft(dtype) else best, operand.dtype))
    if idx_reduce_op is not None:
        best = (np.fmax if largest else np.fmin).reduce(values, axis=self.axis, keepdims=True)
        results.append(self.to_tensor(np.argmax(values == best, axis=self.axis, keepdims=self.keep_dims), tl.int32))
    return tuple(results) if len(results) > 1 else results[0]


def _in_float32(original: Any, self: Any, operand: Any) -> Any:
    """A sum or scan of bf16 over float32 values, rounded to bf16 at the end."""
    dtype = operand.dtype.scalar
    if not _is_soft(dtype):
        return original(self, operand)
    values = _values(operand.handle)
    shape = tl.block_type(tl.float32, list(values.shape))
    result = original(self, tl.core.tensor(interpreter.TensorHandle(values, tl.float32), shape))
    rounded = [self.to_tensor(_rounded(part, dtype), dtype) for part in (result if isinstance(result, list) else [result])]
    return rounded if isinstance(result, list) else rounded[0]


def _rounded(part: Any, dtype: Any) -> Any:
    """The bit patterns of a float32 tensor in ``dtype``; of a scalar one, which the interpreter keeps as [1], a number."""
    bits = encode(part.handle.data, dtype)
    return bits if part.type.is_block() else bits.item()


def _patch_lang_tensor(original: Any, tensor: Any, scope: Any) -> Any:
    """numpy 2.4 refuses int() of an array of one element, which is how Triton 3.6 reads the end of a loop."""
    result = original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))
    return result


class _LanguagePatches:
    """Patches each language module once a launch. The interpreter does so at every call of a helper, for half of its time."""

    def __init__(self) -> None:
        self._patched: set[int] = set()
        self._changes: list[Any] = []  # of the launch: what its end undoes

    def patch(self, original: Any, function: Any) -> Any:
        """The scope of what was patched for ``function``; that of a launch also undoes what its helpers had patched."""
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        is_launch = not self._changes
        if not is_launch and modules <= self._patched:
            return None  # a helper's scope is never asked for anything
        scope = original(function)
        if is_launch:
            self._patched, self._changes = modules, scope._changes
        else:
            self._patched |= modules
            self._changes.extend(scope._changes)
        return scope


def _call_grid(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with np.errstate(all="ignore"):
        return original(self, *args, **kwargs)
