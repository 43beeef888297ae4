"""One set of tensor names: Hugging Face's. GGUF names are translated; what no layer here has a use for is dropped."""

import re
from pathlib import Path

from rapid_llm.errors import CheckpointError

ROPE_DIVISORS = "rope_freqs.weight"
"""A GGUF tensor that belongs to the config: what each rotary frequency is divided by (how llama3's scaling is written there)."""

_GGUF_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    ROPE_DIVISORS: ROPE_DIVISORS,
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
}
_GGUF_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")

_KV_SCALE = re.compile(r"\.self_attn(\.[qkv]_proj)?\.([qkv]_scale|kv_scale|output_scale|[kv]_zero_point)$")


def from_gguf(name: str, file: Path) -> str:
    """The Hugging Face name of a tensor of a GGUF file of one of the architectures that are served.

    Raises:
        CheckpointError: a tensor that this architecture has no use for here; its values would be ignored, and the text wrong.
    """
    if name in _GGUF_WHOLE:
        return _GGUF_WHOLE[name]
    match = _GGUF_LAYER_NAME.fullmatch(name)
    if match and match[2] in _GGUF_LAYER:
        return f"model.layers.{match[1]}.{_GGUF_LAYER[match[2]]}.{match[3]}"
    wanted = "tensors of a decoder of the llama family"
    raise CheckpointError(f"{file}: tensor {name!r} is unknown", wanted=wanted, change="use a checkpoint of a supported model")


def is_unneeded(name: str) -> bool:
    """Whether a tensor of a folder is no weight: rotary frequencies, which every loader computes by itself (old exports hold
    them), and scales of a KV cache in few bits, which are read only where the cache is kept so."""
    return name.endswith(".rotary_emb.inv_freq") or _KV_SCALE.search(name) is not None


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of a folder is a scale, or the like, of a KV cache in few bits."""
    return _KV_SCALE.search(name) is not None
