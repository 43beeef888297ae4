"""Which class runs which architecture, and what a config file leaves unsaid about it. The support matrix, as data; torch-free.

A class is named as a string and imported when a model is built.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from rapid_llm.models.experts import ExpertNames


@dataclass(frozen=True)
class Architecture:
    """One row of the support matrix. Architectures that differ in what stands here only are rows of one class.

    Attributes:
        name: "model_type" of a Hugging Face config.json; what ModelConfig.architecture holds.
        hf_names: values of "architectures" there.
        gguf_name: value of "general.architecture" in a GGUF file; None where the converter writes another row's. Where two rows
            share it, the file's count of experts tells them apart.
        target: "module:class".
        qkv_bias, o_bias, mlp_bias: whether these projections have biases; None is what "attention_bias" and "mlp_bias" say.
        qk_norm: every head of q and k goes through an RMS norm before it is rotated.
        gguf_pairs: GGUF files hold the rows of q and k in ggml's order of neighbouring pairs.
        experts: what the parts of a sparse layer are called; None where every layer is dense.
        rope_theta: the rotary base where config.json names none.
        defaults: what the architecture's own config class takes for keys that config.json leaves out.
    """

    name: str
    hf_names: tuple[str, ...]
    gguf_name: str | None
    target: str
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    gguf_pairs: bool = False
    experts: ExpertNames | None = None
    rope_theta: float = 10_000.0
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        """Import the class."""
        module, _, name = self.target.partition(":")
        return getattr(import_module(module), name)


_DECODER = "rapid_llm.models.llama:LlamaForCausalLM"
_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

ARCHITECTURES = (
    Architecture("llama", ("LlamaForCausalLM",), "llama", _DECODER, gguf_pairs=True, defaults={"max_position_embeddings": 2048}),
    Architecture(
        "mistral",
        ("MistralForCausalLM",),
        None,
        _DECODER,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    ),
    Architecture(
        "qwen2", ("Qwen2ForCausalLM",), "qwen2", _DECODER, qkv_bias=True, o_bias=False, mlp_bias=False, defaults=_QWEN_DEFAULTS
    ),
    Architecture(
        "qwen3",
        ("Qwen3ForCausalLM",),
        "qwen3",
        _DECODER,
        mlp_bias=False,
        qk_norm=True,
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    ),
    Architecture(
        "mixtral",
        ("MixtralForCausalLM",),
        "llama",
        _DECODER,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        gguf_pairs=True,
        experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
        rope_theta=1_000_000.0,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    Architecture(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        "qwen3moe",
        _DECODER,
        mlp_bias=False,
        qk_norm=True,
        experts=ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
)


def architecture(name: str) -> Architecture:
    """The row called ``name``; KeyError when there is none (the checkpoint reader has refused it by then)."""
    return {row.name: row for row in ARCHITECTURES}[name]
