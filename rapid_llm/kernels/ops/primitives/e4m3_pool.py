"""K and V as bytes of e4m3 with a scale a head: rounding them on their way into the pool, and making numbers of them again.

Bytes are made without e4m3 instructions, so that they are the same on every device, as plain torch makes them. On the way back a
device that has e4m3 turns two bytes into two fp16 numbers with one instruction; bf16 would take five. So queries of bf16 meet
keys in fp16, which holds every e4m3 number and, but for its range, every bf16 number: a power of two a row brings them into it.
"""

import triton
import triton.language as tl

from rapid_llm.kernels.ops.primitives.codes import e4m3_numbers
from rapid_llm.kernels.ops.primitives.e4m3 import nearest_e4m3

WEIGHT_BITS = tl.constexpr(15.0)
"""Softmax weights of up to 1 are taken times two to this in fp16, which so holds those down to 2**-39; their sum is, too."""


@triton.jit
def e4m3_bytes(values, scale):
    """values / scale as bytes of e4m3: the nearest number of at most 448 in size, and NaN where the value is not finite.

    2**-120 times an e4m3 number is the fp32 number that has its exponent and mantissa at the top, for the biases are 7 and 127.
    """
    values = values.to(tl.float32)
    quotients = tl.math.div_rn(values, tl.broadcast_to(scale, values.shape))
    nearest = nearest_e4m3(tl.minimum(tl.maximum(quotients, -448.0), 448.0))
    bits = (nearest * 7.52316384526264e-37).to(tl.int32, bitcast=True)
    codes = ((bits >> 20) & 0x7F) | ((bits >> 24) & 0x80)
    return tl.where(tl.abs(values) < float("inf"), codes, 0x7F).to(tl.uint8)


@triton.jit
def pool_numbers(codes, dtype: tl.constexpr):
    """What was loaded from a pool, e4m3 or, for devices that have none, its bytes, as fp16 or fp32. Exact."""
    return e4m3_numbers(codes).to(dtype) if codes.dtype == tl.uint8 else codes.to(dtype)


@triton.jit
def pairs_of_numbers(pairs, dtype: tl.constexpr, PTX: tl.constexpr):
    """What the first and the second byte of int16 elements stand for, as fp16 or fp32 each. Exact.

    A matrix instruction takes neighbours along a column from one register, and shared memory turns such columns around for
    elements of 16 bits, not of 8: bytes would be loaded one by one. ``PTX``: on a device that has e4m3, and compiled.
    """
    if PTX and dtype == tl.float16:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            .reg .b32 upper, lower;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 upper, low;
            cvt.rn.f16x2.e4m3x2 lower, high;
            prmt.b32 $0, upper, lower, 0x5410;
            prmt.b32 $1, upper, lower, 0x7632;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        first = e4m3_numbers(pairs & 0xFF).to(dtype)
        second = e4m3_numbers((pairs >> 8) & 0xFF).to(dtype)
    return first, second


@triton.jit
def beside_e4m3(rows):
    """bf16, fp16 or fp32 rows [M, D] in the dtype that e4m3 numbers meet them in, and what each row was divided by, [M].

    bf16 becomes fp16, each row divided by the power of two that leaves its largest number between 2**14 and 2**15. What is lost
    is less than 2**-39 of that number. The others stay as they are.
    """
    if rows.dtype == tl.bfloat16:
        values = rows.to(tl.float32)
        largest = tl.max(tl.abs(values), 1)
        exponents = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
        exponents = tl.minimum(tl.maximum(exponents, 27), 227)  # 2**-100 to 2**100: a row of zeros has a divisor, too
        divisors = ((exponents - 14) << 23).to(tl.float32, bitcast=True)
        factors = ((268 - exponents) << 23).to(tl.float32, bitcast=True)  # one over the divisor
        turned = (values * factors[:, None]).to(tl.float16)
    else:
        turned = rows
        divisors = tl.full((rows.shape[0],), 1.0, tl.float32)
    return turned, divisors
