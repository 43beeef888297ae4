"""Bytes of quantised weights as numbers, in registers. Exact.

Where a compiler would convert byte by byte, a few instructions make four: a byte laid into the last bits of a float's mantissa
is that float plus the byte, and one subtraction gives the byte itself (Kim et al. 2022, https://arxiv.org/abs/2211.10017, use
the same for fp16). Those instructions are inline PTX, which the interpreter cannot run: each has a twin in plain Triton.
"""

import triton
import triton.language as tl


def has_inline_ptx() -> bool:
    """Whether kernels are compiled, not interpreted."""
    return not triton.knobs.runtime.interpret


@triton.jit
def code_offset(dtype: tl.constexpr):
    """What ``halves`` adds to codes: the float of ``dtype`` whose last bit of mantissa is worth 1."""
    return 128.0 if dtype == tl.bfloat16 else 1024.0 if dtype == tl.float16 else 8388608.0


@triton.jit
def halves(packed, dtype: tl.constexpr, PTX: tl.constexpr):
    """The low and the high halves of bytes, plus ``code_offset``, as ``dtype``: bf16, fp16 or fp32."""
    if not PTX:
        low = ((packed & 15).to(tl.float32) + code_offset(dtype)).to(dtype)
        high = ((packed >> 4).to(tl.float32) + code_offset(dtype)).to(dtype)
    elif dtype == tl.float32:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            and.b32 low, $8, 0x0F0F0F0F;
            shr.u32 high, $8, 4;
            and.b32 high, high, 0x0F0F0F0F;
            prmt.b32 $0, low, 0x4B000000, 0x7650;
            prmt.b32 $1, low, 0x4B000000, 0x7651;
            prmt.b32 $2, low, 0x4B000000, 0x7652;
            prmt.b32 $3, low, 0x4B000000, 0x7653;
            prmt.b32 $4, high, 0x4B000000, 0x7650;
            prmt.b32 $5, high, 0x4B000000, 0x7651;
            prmt.b32 $6, high, 0x4B000000, 0x7652;
            prmt.b32 $7, high, 0x4B000000, 0x7653;
            }""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    elif dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 part, top;
            mov.b32 top, 0x43434343;
            and.b32 part, $4, 0x0F0F0F0F;
            prmt.b32 $0, part, top, 0x4140;
            prmt.b32 $1, part, top, 0x4342;
            shr.u32 part, $4, 4;
            and.b32 part, part, 0x0F0F0F0F;
            prmt.b32 $2, part, top, 0x4140;
            prmt.b32 $3, part, top, 0x4342;
            }""",
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 part, top;
            mov.b32 top, 0x64646464;
            and.b32 part, $4, 0x0F0F0F0F;
            prmt.b32 $0, part, top, 0x4140;
            prmt.b32 $1, part, top, 0x4342;
            shr.u32 part, $4, 4;
            and.b32 part, part, 0x0F0F0F0F;
            prmt.b32 $2, part, top, 0x4140;
            prmt.b32 $3, part, top, 0x4342;
            }""",
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def int8_numbers(codes, PTX: tl.constexpr):
    """int8 as fp32."""
    if not PTX:
        numbers = codes.to(tl.float32)
    else:
        numbers = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            xor.b32 bytes, $4, 0x80808080;
            prmt.b32 $0, bytes, 0x4B000000, 0x7650;
            prmt.b32 $1, bytes, 0x4B000000, 0x7651;
            prmt.b32 $2, bytes, 0x4B000000, 0x7652;
            prmt.b32 $3, bytes, 0x4B000000, 0x7653;
            }""",
            "=r,=r,=r,=r,r",
            [codes],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
        numbers -= 8388736.0  # 2**23, and the 128 that made the bytes unsigned
    return numbers


@triton.jit
def e4m3_numbers(codes):
    """Bytes of e4m3 as fp32, for devices that have no e4m3.

    Exponent and mantissa go where fp32 has its own, so that a number comes out 2**-120 times what it is, for the biases of the
    exponents are 7 and 127. Subnormal bytes are subnormal there too, and one product with 2**120 puts all right. Only the two
    NaNs, which have no exponent of their own, are told apart.
    """
    bits = codes.to(tl.int32)
    shifted = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), shifted.to(tl.float32, bitcast=True) * 1.329227995784916e36)
