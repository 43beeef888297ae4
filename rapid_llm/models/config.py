"""ModelConfig: the sizes of a model and nothing else, read from config.json or GGUF metadata. Torch-free.

A key that changes the maths and that this version does not follow is refused by name: text that is subtly wrong is worse than
no text. A key nobody here has heard of is logged, once for a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rapid_llm.errors import CheckpointError
from rapid_llm.models.config_keys import (
    GGUF_DENSE,
    GGUF_NEUTRAL,
    HF_DENSE,
    HF_NEUTRAL,
    Keys,
    log_unknown,
    read_token_ids,
    refuse_other_maths,
)
from rapid_llm.models.experts import Experts, experts_from_gguf, experts_from_hf, has_gguf_experts
from rapid_llm.models.registry import ARCHITECTURES, Architecture
from rapid_llm.models.rope_scaling import RopeScaling, rope_from_gguf, rope_from_hf

MAX_LAYERS = 10_000


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model, named as in Hugging Face configs.

    Attributes:
        architecture: name of its row in ``models/registry.py``.
        intermediate_size: of the feed-forward of a dense layer.
        head_dim: width of one attention head; even, since rotary embedding pairs its halves.
        rope_theta, rope_scaling: base of the rotary frequencies, and how they are stretched, if they are.
        max_position_embeddings: positions that the file names; ``context`` counts the scaling in.
        tie_word_embeddings: what the config wishes; whether the file holds an own ``lm_head.weight`` decides.
        qkv_bias, o_bias, mlp_bias: these projections have biases.
        qk_norm: every head of q and k goes through an RMS norm before it is rotated.
        experts: of the sparse layers; None where there is none.
        sliding_window: tokens that a layer looks back at most, in some layer at least; None where none is bounded.
        bos_token_id: begin-of-text id, for a tokenizer that names none.
        eos_token_ids: end-of-text ids, which are joined with those of generation_config.json and the tokenizer.
        quantization: how the checkpoint's weights are quantised, as its config says it; None where it says nothing.
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
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    experts: Experts | None = None
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)

    @property
    def context(self) -> int:
        """The longest sequence the model was made for, in tokens."""
        if self.rope_scaling is None:
            return self.max_position_embeddings
        return self.rope_scaling.context(self.max_position_embeddings)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], file: Path) -> "ModelConfig":
        """Read config.json as parsed; ``file`` is named in errors.

        Raises:
            CheckpointError: an unknown architecture, a missing or impossible size, or a key that changes the maths.
        """
        row = _architecture_of(raw, file)
        refuse_other_maths(raw, HF_NEUTRAL if row.experts else HF_NEUTRAL | HF_DENSE, "", file)
        log_unknown(raw, file, has_experts=row.experts is not None)
        keys = Keys({**row.defaults, **raw}, file)
        attention_bias, mlp_bias = keys.flag("attention_bias"), keys.flag("mlp_bias")
        num_layers = keys.size("num_hidden_layers", high=MAX_LAYERS)
        max_positions = keys.size("max_position_embeddings")
        theta, scaling = rope_from_hf(keys, max_positions, row.rope_theta)
        num_heads = keys.size("num_attention_heads")
        hidden_size, intermediate_size = keys.size("hidden_size"), keys.size("intermediate_size")
        return _consistent(
            cls(
                architecture=row.name,
                vocab_size=keys.size("vocab_size"),
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=keys.size("num_key_value_heads", default=num_heads),
                head_dim=keys.size("head_dim", default=_per_head(hidden_size, num_heads)),
                rms_norm_eps=keys.positive("rms_norm_eps", default=1e-6),
                rope_theta=theta,
                max_position_embeddings=max_positions,
                tie_word_embeddings=keys.flag("tie_word_embeddings"),
                qkv_bias=attention_bias if row.qkv_bias is None else row.qkv_bias,
                o_bias=attention_bias if row.o_bias is None else row.o_bias,
                mlp_bias=mlp_bias if row.mlp_bias is None else row.mlp_bias,
                qk_norm=row.qk_norm,
                rope_scaling=scaling,
                experts=experts_from_hf(row.experts, keys, num_layers, intermediate_size) if row.experts else None,
                sliding_window=_sliding_window(keys, num_layers),
                bos_token_id=next(iter(read_token_ids(raw, "bos_token_id", file)), None),
                eos_token_ids=read_token_ids(raw, "eos_token_id", file),
                quantization=_quantization(keys),
            ),
            file,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], file: Path) -> "ModelConfig":
        """Read GGUF metadata; ``file`` is named in errors. Biases and tied embeddings are for the tensor table to say.

        Raises:
            CheckpointError: as ``from_hf``.
        """
        row = _row_of_gguf(metadata, file)
        below = f"{row.gguf_name}."
        refuse_other_maths(metadata, GGUF_NEUTRAL if row.experts else GGUF_NEUTRAL | GGUF_DENSE, below, file)
        keys = Keys(metadata, file)
        context_length = keys.size(below + "context_length")
        theta, scaling = rope_from_gguf(keys, below, context_length)
        num_heads = keys.size(below + "attention.head_count")
        hidden_size = keys.size(below + "embedding_length")
        intermediate_size = keys.size(below + "feed_forward_length")
        head_dim = keys.size(below + "attention.key_length", default=_per_head(hidden_size, num_heads))
        for key in ("attention.value_length", "rope.dimension_count"):
            if keys.size(below + key, default=head_dim) != head_dim:
                raise keys.refused(below + key, f"the head width, {head_dim}")
        tokens = metadata.get("tokenizer.ggml.tokens")
        config = cls(
            architecture=row.name,
            vocab_size=keys.size(below + "vocab_size", default=len(tokens) if isinstance(tokens, list) and tokens else None),
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_layers=keys.size(below + "block_count", high=MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=keys.size(below + "attention.head_count_kv", default=num_heads),
            head_dim=head_dim,
            rms_norm_eps=keys.positive(below + "attention.layer_norm_rms_epsilon", default=1e-6),
            rope_theta=theta,
            max_position_embeddings=context_length,
            tie_word_embeddings=True,
            qk_norm=row.qk_norm,
            rope_scaling=scaling,
            experts=experts_from_gguf(row.experts, keys, below, intermediate_size) if row.experts else None,
            sliding_window=_gguf_window(keys, below),
            bos_token_id=next(iter(read_token_ids(metadata, "tokenizer.ggml.bos_token_id", file)), None),
            eos_token_ids=read_token_ids(metadata, "tokenizer.ggml.eos_token_id", file),
        )
        return _consistent(config, file)


def _row_of_gguf(metadata: Mapping[str, Any], file: Path) -> Architecture:
    name = metadata.get("general.architecture")
    rows = [row for row in ARCHITECTURES if name is not None and row.gguf_name == name]
    if rows:
        is_sparse = has_gguf_experts(metadata, f"{name}.")
        return next((row for row in rows if (row.experts is not None) == is_sparse), rows[0])
    known = list(dict.fromkeys(row.gguf_name for row in ARCHITECTURES if row.gguf_name is not None))
    raise _unknown_architecture(file, f"general.architecture {name!r}", known)


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


def _sliding_window(keys: Keys, num_layers: int) -> int | None:
    """The window of the layers that have one: all, or those that "layer_types" names, or those from "max_window_layers" on."""
    if keys.raw.get("use_sliding_window") is not None and not keys.flag("use_sliding_window"):
        return None
    types = keys.raw.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or any(kind not in ("full_attention", "sliding_attention") for kind in types):
            raise keys.refused("layer_types", "a list of full_attention and sliding_attention")
        return keys.size("sliding_window") if "sliding_attention" in types else None
    if keys.raw.get("sliding_window") is None:
        return None
    first = keys.raw.get("max_window_layers")
    is_bounded = first in (None, 0) or keys.size("max_window_layers") < num_layers
    return keys.size("sliding_window") if is_bounded else None


def _quantization(keys: Keys) -> Mapping[str, Any] | None:
    """The object under "quantization_config" or, as it was called before, "compression_config"; what it says is for others."""
    found = [key for key in ("quantization_config", "compression_config") if keys.raw.get(key) is not None]
    if not found:
        return None
    if len(found) > 1:
        raise keys.refused(found[1], "one of quantization_config and compression_config")
    value = keys.raw[found[0]]
    if not isinstance(value, Mapping):
        raise keys.refused(found[0], "an object")
    return value


def _gguf_window(keys: Keys, below: str) -> int | None:
    key = below + "attention.sliding_window"
    return None if keys.raw.get(key) in (None, 0) else keys.size(key)


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
