"""ModelConfig: the sizes of a model and nothing else, read from config.json or GGUF metadata. Torch-free.

A key that changes the maths and that this version does not follow is refused by name: text that is subtly wrong is worse than
no text. A key nobody here has heard of is logged, once for a file.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapid_llm.errors import CheckpointError
from rapid_llm.models.registry import ARCHITECTURES, Architecture

logger = logging.getLogger(__name__)

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000

# Keys of config.json that change the maths, with the values that mean "as llama always did".
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": (None, "silu", "swish"),
    "pretraining_tp": (None, 1),
    "quantization_config": (None,),
    "compression_config": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "partial_rotary_factor": (None, 1.0),
    "rotary_pct": (None, 1.0),
    "rope_interleaved": (None, False),
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
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
}
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
}
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
    "pad_token_id",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "task_specific_params",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
}
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}

# The same for GGUF, below "llama.".
_GGUF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": (None, "none"),
    "rope.scaling.factor": (None, 0.0, 1.0),
    "rope.scale_linear": (None, 0.0, 1.0),
    "attention.sliding_window": (None, 0),
    "attention.scale": (None, 0.0),
    "attention.causal": (None, True),
    "attention.clamp_kqv": (None, 0.0),
    "attention.max_alibi_bias": (None, 0.0),
    "attn_logit_softcapping": (None, 0.0),
    "final_logit_softcapping": (None, 0.0),
    "logit_scale": (None, 0.0, 1.0),
    "residual_scale": (None, 0.0, 1.0),
    "embedding_scale": (None, 0.0, 1.0),
    "expert_count": (None, 0),
    "expert_used_count": (None, 0),
    "use_parallel_residual": (None, False),
    "tensor_data_layout": (None, "reference"),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model, named as in Hugging Face configs.

    Attributes:
        architecture: "llama"; the module of ``models/`` that builds it.
        head_dim: width of one attention head; even, since rotary embedding pairs its halves.
        max_position_embeddings: the longest sequence the model was made for, in tokens.
        tie_word_embeddings: what the config wishes; whether the file holds an own ``lm_head.weight`` decides.
        attention_bias: q, k, v and o projections have biases.
        mlp_bias: gate, up and down projections have biases.
        bos_token_id: begin-of-text id, for a tokenizer that names none.
        eos_token_ids: end-of-text ids, which are joined with those of generation_config.json and the tokenizer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], file: Path) -> "ModelConfig":
        """Read config.json as parsed; ``file`` is named in errors.

        Raises:
            CheckpointError: an unknown architecture, a missing or impossible size, or a key that changes the maths.
        """
        row = _architecture_of(raw, file)
        _refuse_other_maths(raw, _NEUTRAL, "", file)
        _log_unknown(raw, file)
        keys = _Keys(raw, file)
        num_heads = keys.size("num_attention_heads")
        hidden_size = keys.size("hidden_size")
        return _consistent(
            cls(
                architecture=row.name,
                vocab_size=keys.size("vocab_size"),
                hidden_size=hidden_size,
                intermediate_size=keys.size("intermediate_size"),
                num_layers=keys.size("num_hidden_layers", high=MAX_LAYERS),
                num_heads=num_heads,
                num_kv_heads=keys.size("num_key_value_heads", default=num_heads),
                head_dim=keys.size("head_dim", default=_per_head(hidden_size, num_heads)),
                rms_norm_eps=keys.positive("rms_norm_eps", default=1e-6),
                rope_theta=_rope_theta(keys),
                max_position_embeddings=keys.size("max_position_embeddings", default=2048),
                tie_word_embeddings=keys.flag("tie_word_embeddings"),
                attention_bias=keys.flag("attention_bias"),
                mlp_bias=keys.flag("mlp_bias"),
                bos_token_id=next(iter(read_token_ids(raw, "bos_token_id", file)), None),
                eos_token_ids=read_token_ids(raw, "eos_token_id", file),
            ),
            file,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], file: Path) -> "ModelConfig":
        """Read GGUF metadata; ``file`` is named in errors. Biases and tied embeddings are for the tensor table to say.

        Raises:
            CheckpointError: as ``from_hf``.
        """
        row = _row_by_gguf_name(metadata.get("general.architecture"), file)
        below = f"{row.gguf_name}."
        _refuse_other_maths(metadata, _GGUF_NEUTRAL, below, file)
        keys = _Keys(metadata, file)
        num_heads = keys.size(below + "attention.head_count")
        hidden_size = keys.size(below + "embedding_length")
        head_dim = keys.size(below + "attention.key_length", default=_per_head(hidden_size, num_heads))
        for key in ("attention.value_length", "rope.dimension_count"):
            if keys.size(below + key, default=head_dim) != head_dim:
                raise keys.refused(below + key, f"the head width, {head_dim}")
        tokens = metadata.get("tokenizer.ggml.tokens")
        config = cls(
            architecture=row.name,
            vocab_size=keys.size(below + "vocab_size", default=len(tokens) if isinstance(tokens, list) and tokens else None),
            hidden_size=hidden_size,
            intermediate_size=keys.size(below + "feed_forward_length"),
            num_layers=keys.size(below + "block_count", high=MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=keys.size(below + "attention.head_count_kv", default=num_heads),
            head_dim=head_dim,
            rms_norm_eps=keys.positive(below + "attention.layer_norm_rms_epsilon", default=1e-6),
            rope_theta=keys.positive(below + "rope.freq_base", default=10000.0),
            max_position_embeddings=keys.size(below + "context_length"),
            tie_word_embeddings=True,
            bos_token_id=next(iter(read_token_ids(metadata, "tokenizer.ggml.bos_token_id", file)), None),
            eos_token_ids=read_token_ids(metadata, "tokenizer.ggml.eos_token_id", file),
        )
        return _consistent(config, file)


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


class _Keys:
    """Typed look-ups in a config file; every refusal names file and key."""

    def __init__(self, raw: Mapping[str, Any], file: Path) -> None:
        self.raw, self.file = raw, file

    def refused(self, key: str, wanted: str) -> CheckpointError:
        got = repr(self.raw[key]) if key in self.raw else "no such key"
        change = "correct the file or fetch it again"
        return CheckpointError(f"{self.file}: key {key!r} cannot be used", got=got, wanted=wanted, change=change)

    def size(self, key: str, *, default: int | None = None, high: int = MAX_SIZE) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
            raise self.refused(key, f"an integer from 1 to {high:,}")
        return value

    def positive(self, key: str, *, default: float) -> float:
        value = self.raw.get(key, default)
        if not is_finite_number(value) or value <= 0:
            raise self.refused(key, "a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refused(key, "true or false")
        return bool(value)


def _row_by_gguf_name(name: Any, file: Path) -> Architecture:
    for row in ARCHITECTURES:
        if row.gguf_name == name:
            return row
    raise _unknown_architecture(file, f"general.architecture {name!r}", [row.gguf_name for row in ARCHITECTURES])


def _architecture_of(raw: Mapping[str, Any], file: Path) -> Architecture:
    """The row that config.json names, by class ("architectures") and by type; the two must agree where both stand.

    auto_map would name Python code to run. It is never followed: classes come from the registry.
    """
    names, kind = raw.get("architectures"), raw.get("model_type")
    for row in ARCHITECTURES:
        has_class = names is None or (isinstance(names, list) and len(names) == 1 and names[0] in row.hf_names)
        if has_class and kind in (row.name, None) and (names, kind) != (None, None):
            return row
    wanted = [f"{row.name} ({', '.join(row.hf_names)})" for row in ARCHITECTURES]
    raise _unknown_architecture(file, f"model_type {kind!r}, architectures {names!r}", wanted)


def _unknown_architecture(file: Path, got: str, wanted: list[str]) -> CheckpointError:
    problem = f"{file}: the architecture is not supported"
    return CheckpointError(problem, got=got, wanted=" | ".join(wanted), change="use a model of a supported architecture")


def _refuse_other_maths(raw: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], below: str, file: Path) -> None:
    for key, allowed in neutral.items():
        name = below + key
        if name in raw and not any(value is raw[name] or _equal(value, raw[name]) for value in allowed):
            problem = f"{file}: key {name!r} changes the maths and is not supported"
            wanted = " | ".join("no such key" if value is None else repr(value) for value in allowed)
            raise CheckpointError(problem, got=repr(raw[name]), wanted=wanted, change="use a model without it")
    types = raw.get("layer_types")
    if not below and types is not None and types != ["full_attention"] * (len(types) if isinstance(types, list) else 0):
        problem = f"{file}: key 'layer_types' changes the maths and is not supported"
        raise CheckpointError(problem, got=repr(types)[:120], wanted="full_attention only", change="use a model without it")


def _equal(one: Any, other: Any) -> bool:
    """Equality that keeps True apart from 1, and never asks an array."""
    is_bool = isinstance(one, bool) == isinstance(other, bool)
    return is_bool and isinstance(other, str | int | float | list) and bool(one == other)


def _log_unknown(raw: Mapping[str, Any], file: Path) -> None:
    unknown = sorted(set(raw) - _READ - _HARMLESS - set(_NEUTRAL))
    if unknown:
        logger.warning("%s: keys that this version does not know and does not follow: %s", file, ", ".join(unknown))


def _rope_theta(keys: _Keys) -> float:
    """The rotary base: at the top level, or (newer exports) among ``rope_parameters``; where both stand they must agree."""
    found = {}
    for key in ("rope_scaling", "rope_parameters"):
        inner = keys.raw.get(key)
        if inner is None:
            continue
        if not isinstance(inner, dict):
            raise keys.refused(key, "an object or null")
        kind = inner.get("rope_type", inner.get("type", "default"))
        if kind != "default":
            problem = f"{keys.file}: rope type {kind!r} in {key!r} is not supported"
            raise CheckpointError(
                problem, got=repr(inner), wanted="rope type 'default' or null", change="use a model without rope scaling"
            )
        if set(inner) - _ROPE_KEYS or not _equal(1.0, inner.get("partial_rotary_factor", 1.0)):
            raise keys.refused(key, "only rope_type 'default' and rope_theta")
        if "rope_theta" in inner:
            found[key] = _Keys(inner, keys.file).positive("rope_theta", default=0.0)
    if keys.raw.get("rope_theta") is not None:
        found["rope_theta"] = keys.positive("rope_theta", default=0.0)
    if len(set(found.values())) > 1:
        problem = f"{keys.file}: the rotary base is given twice and differs"
        raise CheckpointError(problem, got=repr(found), wanted="one rope_theta", change="remove the wrong one")
    return next(iter(found.values()), 10000.0)


def _per_head(hidden_size: int, num_heads: int) -> int | None:
    """Head width where the file names none: an even share of the hidden size, or nothing where it does not divide."""
    return hidden_size // num_heads if hidden_size % num_heads == 0 else None


def _consistent(config: ModelConfig, file: Path) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        got = f"{config.num_heads} attention heads, {config.num_kv_heads} key-value heads"
        problem = f"{file}: the head counts do not fit"
        raise CheckpointError(problem, got=got, wanted="a multiple of the key-value heads", change="correct num_key_value_heads")
    if config.head_dim % 2:
        problem = f"{file}: head_dim is odd"
        raise CheckpointError(problem, got=str(config.head_dim), wanted="an even head_dim", change="correct head_dim")
    return config
