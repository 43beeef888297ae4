"""Quantised products and quantisers in float64."""

from rapid_llm.kernels.reference.quantization.weight_only import w4a16_gemm, w8a16_gemm

__all__ = ["w4a16_gemm", "w8a16_gemm"]
