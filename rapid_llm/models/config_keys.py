"""Typed look-ups in a config file, and what its keys mean to us: read, harmless, or changing the maths. Torch-free."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rapid_llm.errors import CheckpointError

logger = logging.getLogger(__name__)

MAX_SIZE = 2**31 - 1

# Keys of config.json that change the maths, with the values that mean "as llama always did".
HF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": (None, "silu", "swish"),
    "pretraining_tp": (None, 1),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "partial_rotary_factor": (None, 1.0),
    "rotary_pct": (None, 1.0),
    "rope_interleaved": (None, False),
    "use_mrope": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "scale_emb": (None, 1.0),
    "scale_depth": (None,),
    "dim_model_base": (None,),
    "clip_qkv": (None,),
    "qk_norm": (None, False),
    "use_qk_norm": (None, False),
    "alibi": (None, False),
    "parallel_residual": (None, False),
    "use_parallel_residual": (None, False),
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "n_routed_experts": (None, 0),
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "routed_scaling_factor": (None, 1.0),
    "scoring_func": (None, "softmax"),
}
# The same where every layer is dense: keys that the sparse architectures read.
HF_DENSE: dict[str, tuple[Any, ...]] = {"num_experts": (None, 0), "num_local_experts": (None, 0)}
_READ = {
    "model_type",
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "bos_token_id",
    "eos_token_id",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    *HF_DENSE,
    "quantization_config",
    "compression_config",
}
_READ_OF_EXPERTS = {"num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"}
# Training, bookkeeping and other libraries' settings: no effect on what the model computes.
_HARMLESS = {
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "attention_dropout",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "finetuning_task",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "task_specific_params",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
}

# The same for GGUF, below the name of the architecture.
GGUF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.dimension_sections": (None,),
    "attention.scale": (None, 0.0),
    "attention.causal": (None, True),
    "attention.clamp_kqv": (None, 0.0),
    "attention.max_alibi_bias": (None, 0.0),
    "attn_logit_softcapping": (None, 0.0),
    "final_logit_softcapping": (None, 0.0),
    "logit_scale": (None, 0.0, 1.0),
    "residual_scale": (None, 0.0, 1.0),
    "embedding_scale": (None, 0.0, 1.0),
    "expert_shared_count": (None, 0),
    "expert_group_count": (None, 0, 1),
    "expert_gating_func": (None, 0, 1),
    "expert_weights_scale": (None, 0.0, 1.0),
    "use_parallel_residual": (None, False),
    "tensor_data_layout": (None, "reference"),
}
GGUF_DENSE: dict[str, tuple[Any, ...]] = {"expert_count": (None, 0), "expert_used_count": (None, 0)}


def read_token_ids(raw: Mapping[str, Any], key: str, file: Path) -> tuple[int, ...]:
    """The ids under ``key``, which may be one id, a list of them, null or absent.

    Raises:
        CheckpointError: anything else.
    """
    value = raw.get(key)
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= MAX_SIZE:
            problem = f"{file}: key {key!r} is no token id"
            raise CheckpointError(problem, got=repr(value), wanted="an id >= 0, a list of them, or null", change=f"correct {key}")
    return ids


def is_finite_number(value: Any) -> bool:
    """Whether ``value`` is an int or float that a float can hold, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**1023 if isinstance(value, int) else math.isfinite(value)


class Keys:
    """Typed look-ups in a config file; every refusal names file and key."""

    def __init__(self, raw: Mapping[str, Any], file: Path) -> None:
        self.raw, self.file = raw, file

    def refused(self, key: str, wanted: str) -> CheckpointError:
        """The error for a value that cannot be used."""
        got = repr(self.raw[key]) if key in self.raw else "no such key"
        change = "correct the file or fetch it again"
        return CheckpointError(f"{self.file}: key {key!r} cannot be used", got=got, wanted=wanted, change=change)

    def size(self, key: str, *, default: int | None = None, high: int = MAX_SIZE) -> int:
        """An integer from 1 to ``high``; null is absent. Without a default an absent key is refused."""
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
            raise self.refused(key, f"an integer from 1 to {high:,}")
        return value

    def positive(self, key: str, *, default: float) -> float:
        """A number above 0; null is absent. A default of 0 refuses an absent key."""
        value = self.raw.get(key)
        value = default if value is None else value
        if not is_finite_number(value) or value <= 0:
            raise self.refused(key, "a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; absent and null are false."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refused(key, "true or false")
        return bool(value)


def refuse_other_maths(raw: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], below: str, file: Path) -> None:
    """Raise CheckpointError for the first key, named with ``below`` before it, whose value is not one of its ``neutral`` ones."""
    for key, allowed in neutral.items():
        name = below + key
        if name in raw and not any(value is raw[name] or equal(value, raw[name]) for value in allowed):
            problem = f"{file}: key {name!r} changes the maths and is not supported"
            wanted = " | ".join("no such key" if value is None else repr(value) for value in allowed)
            raise CheckpointError(problem, got=repr(raw[name]), wanted=wanted, change="use a model without it")


def equal(one: Any, other: Any) -> bool:
    """Equality that keeps True apart from 1, and never asks an array."""
    is_bool = isinstance(one, bool) == isinstance(other, bool)
    return is_bool and isinstance(other, str | int | float | list) and bool(one == other)


def log_unknown(raw: Mapping[str, Any], file: Path, *, has_experts: bool) -> None:
    """Log in one line the keys of a config.json that nobody here has heard of."""
    unknown = sorted(set(raw) - _READ - (_READ_OF_EXPERTS if has_experts else set()) - _HARMLESS - set(HF_NEUTRAL))
    if unknown:
        logger.warning("%s: keys that this version does not know and does not follow: %s", file, ", ".join(unknown))
