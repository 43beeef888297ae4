"""Quantised products and quantisers in float64."""

from rapid_llm.kernels.reference.quantization.fp4 import mxfp4_gemm, nvfp4_gemm, quantize_nvfp4
from rapid_llm.kernels.reference.quantization.weight_only import w4a16_gemm, w8a16_gemm

__all__ = ["mxfp4_gemm", "nvfp4_gemm", "quantize_nvfp4", "w4a16_gemm", "w8a16_gemm"]
