"""The door to the float64 twins of kernels/reference, which owe nothing to the rows under test."""

from rapid_llm.kernels.reference.activation import swiglu
from rapid_llm.kernels.reference.attention import (
    flash_decoding,
    flash_decoding_fp8,
    flashattention2_nopad,
    flashattention2_nopad_fp8,
)
from rapid_llm.kernels.reference.embeddings import vocab_embedding
from rapid_llm.kernels.reference.fused import add_rms_norm_fp8, qk_norm_rope_kv_write, rope_kv_write, swiglu_fp8
from rapid_llm.kernels.reference.gemm import dense_gemm
from rapid_llm.kernels.reference.kvcache import update_kv_buffer, update_kv_buffer_fp8, update_kv_index
from rapid_llm.kernels.reference.moe import (
    fused_moe,
    fused_moe_fp8,
    fused_moe_mxfp4,
    fused_moe_w4a16,
    fused_moe_w8a16,
    route_experts,
)
from rapid_llm.kernels.reference.norm import add_rms_norm, rms_norm
from rapid_llm.kernels.reference.quantization import (
    dequantised,
    fp8_gemm,
    gather_columns,
    int8_gemm,
    mxfp4_gemm,
    nearest_e4m3,
    nvfp4_gemm,
    quantize_fp8,
    quantize_int8,
    quantize_nvfp4,
    w4a16_gemm,
    w8a16_gemm,
)
from rapid_llm.kernels.reference.rotary import rope
from rapid_llm.kernels.reference.sampling import (
    adjust_logits,
    filtered_probabilities,
    mask_logits,
    philox4x32,
    sample,
    top_logprobs,
)

__all__ = [
    "add_rms_norm",
    "add_rms_norm_fp8",
    "adjust_logits",
    "dense_gemm",
    "dequantised",
    "filtered_probabilities",
    "flash_decoding",
    "flash_decoding_fp8",
    "flashattention2_nopad",
    "flashattention2_nopad_fp8",
    "fp8_gemm",
    "fused_moe",
    "fused_moe_fp8",
    "fused_moe_mxfp4",
    "fused_moe_w4a16",
    "fused_moe_w8a16",
    "gather_columns",
    "int8_gemm",
    "mask_logits",
    "mxfp4_gemm",
    "nearest_e4m3",
    "nvfp4_gemm",
    "philox4x32",
    "qk_norm_rope_kv_write",
    "quantize_fp8",
    "quantize_int8",
    "quantize_nvfp4",
    "rms_norm",
    "rope",
    "rope_kv_write",
    "route_experts",
    "sample",
    "swiglu",
    "swiglu_fp8",
    "top_logprobs",
    "update_kv_buffer",
    "update_kv_buffer_fp8",
    "update_kv_index",
    "vocab_embedding",
    "w4a16_gemm",
    "w8a16_gemm",
]
