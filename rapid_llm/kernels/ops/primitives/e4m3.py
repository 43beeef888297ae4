"""Rounding to e4m3 inside a kernel: the same numbers, bit for bit, as the plain-torch quantiser gives.

Divisions are IEEE ones, since a quotient that is off by one bit rounds to another code where it lies beside a midpoint. Values
are clamped before they are cast: what a cast does with larger ones is the target's business.
"""

import triton
import triton.language as tl


@triton.jit
def finite_magnitudes(values):
    """|values|, fp32, and 0 for what is not finite, which changes no scale."""
    magnitudes = tl.abs(values)
    return tl.where(magnitudes < float("inf"), magnitudes, 0.0)


@triton.jit
def e4m3_scale(largest):
    """The scale that takes ``largest`` to 448; at least the least normal fp32 number, so that zeros have one."""
    return tl.maximum(tl.math.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32)), 1.1754943508222875e-38)


@triton.jit
def to_e4m3(values, scale):
    """values / scale as e4m3, NaN where the value is not finite. ``scale`` has the shape of ``values`` or broadcasts to it."""
    quotients = tl.math.div_rn(values, tl.broadcast_to(scale, values.shape))
    quotients = tl.minimum(tl.maximum(quotients, -448.0), 448.0)
    return tl.where(tl.abs(values) < float("inf"), quotients, float("nan")).to(tl.float8e4nv)
