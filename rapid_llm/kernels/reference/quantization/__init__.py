"""Quantised products and quantisers in float64."""

from rapid_llm.kernels.reference.quantization.columns import gather_columns
from rapid_llm.kernels.reference.quantization.fp4 import mxfp4_gemm, nvfp4_gemm, quantize_nvfp4
from rapid_llm.kernels.reference.quantization.fp8 import dequantised, fp8_gemm, nearest_e4m3, quantize_fp8
from rapid_llm.kernels.reference.quantization.w8a8_int8 import int8_gemm, quantize_int8
from rapid_llm.kernels.reference.quantization.weight_only import w4a16_gemm, w8a16_gemm

__all__ = [
    "dequantised",
    "fp8_gemm",
    "gather_columns",
    "int8_gemm",
    "mxfp4_gemm",
    "nearest_e4m3",
    "nvfp4_gemm",
    "quantize_fp8",
    "quantize_int8",
    "quantize_nvfp4",
    "w4a16_gemm",
    "w8a16_gemm",
]
