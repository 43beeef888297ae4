"""The magnitudes that a scale is made from, inside a kernel."""

import triton
import triton.language as tl


@triton.jit
def finite_magnitudes(values):
    """|values|, fp32, and 0 for what is not finite, which changes no scale."""
    magnitudes = tl.abs(values)
    return tl.where(magnitudes < float("inf"), magnitudes, 0.0)
