"""Rounding to e4m3 inside a kernel: the same numbers, bit for bit, as the plain-torch quantiser gives.

Divisions are IEEE ones, since a quotient that is off by one bit rounds to another code where it lies beside a midpoint. Values
are clamped before they are cast: what a cast does with larger ones is the target's business.
"""

import triton
import triton.language as tl

from rapid_llm.kernels.device import DeviceInfo


@triton.jit
def e4m3_scale(largest):
    """The scale that takes ``largest`` to 448; at least the least normal fp32 number, so that zeros have one."""
    return tl.maximum(tl.math.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32)), 1.1754943508222875e-38)


@triton.jit
def to_e4m3(values, scale, TWO_STEPS: tl.constexpr):
    """values / scale as e4m3, NaN where the value is not finite. ``scale`` has the shape of ``values`` or broadcasts to it."""
    quotients = tl.math.div_rn(values, tl.broadcast_to(scale, values.shape))
    quotients = tl.minimum(tl.maximum(quotients, -448.0), 448.0)
    if TWO_STEPS:
        quotients = nearest_e4m3(quotients)
    return tl.where(tl.abs(values) < float("inf"), quotients, float("nan")).to(tl.float8e4nv)


@triton.jit
def nearest_e4m3(values):
    """The e4m3 number nearest to each fp32 value of at most 448 in size, ties to the even one, as fp32.

    Beside 1.5 * 2**20 times a power of two, fp32 numbers are an eighth of that power apart, which is what e4m3 numbers are.
    """
    powers = (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    far = tl.maximum(powers, 0.015625) * 1572864.0  # 2**-6: below it e4m3 numbers stay as far apart
    nearest = (values + far) - far
    signs = values.to(tl.int32, bitcast=True) & -0x80000000  # of a zero, which the sum has lost
    return (nearest.to(tl.int32, bitcast=True) | signs).to(tl.float32, bitcast=True)


def casts_in_two_steps(device: DeviceInfo) -> bool:
    """Whether Triton takes fp32 to e4m3 by way of fp16, as 3.6 does on sm89: rounding twice may miss the nearest number."""
    return device.sm == 89
