"""Checkpoints in the shapes of models people serve, with random weights: as fast as the models, and nothing is downloaded."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_STD = 0.02
_NOISE = (1 << 24) - 3  # elements that are drawn; an odd number, so that no two matrices hold them in the same place
_SHARDS = 16
_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
_QWEN = {"rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "head_dim": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "max_position_embeddings": 131_072, "tie_word_embeddings": True,
    },
    "llama-8b": _LLAMA | {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151_936, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "max_position_embeddings": 40_960, "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
"""config.json of each: Qwen3-0.6B (with a longer context, for benchmarks of long prompts), Llama-3.1-8B (its rope scaling
left out), Qwen3-30B-A3B."""


def write_checkpoint(folder: Path, model: str, *, layers: int | None = None) -> int:
    """Write config, tokenizer and bf16 weights of one of CONFIGS, ``layers`` layers of it; returns the weights' bytes."""
    config = CONFIGS[model] | {"bos_token_id": 0, "eos_token_id": 1}
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    _tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    noise = (torch.randn(_NOISE, generator=torch.Generator().manual_seed(0)) * _STD).bfloat16()
    tensors = list(_tensors(config))
    shares = [tensors[shard::_SHARDS] for shard in range(_SHARDS)]
    with ThreadPoolExecutor(_SHARDS) as pool:
        sizes = list(pool.map(lambda i: _write_shard(folder / _name(i), shares[i], noise), range(_SHARDS)))
    weight_map = {name: _name(shard) for shard, share in enumerate(shares) for name, _ in share}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(sizes)


def _name(shard: int) -> str:
    return f"model-{shard + 1:05}-of-{_SHARDS:05}.safetensors"


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, as Hugging Face checkpoints of the llama family have them."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, shape in (("q_proj", (q, hidden)), ("k_proj", (kv, hidden)), ("v_proj", (kv, hidden)), ("o_proj", (hidden, q))):
            yield f"{name}.self_attn.{part}.weight", shape
        if config["model_type"].startswith("qwen3"):
            yield from ((f"{name}.self_attn.{part}.weight", (dim,)) for part in ("q_norm", "k_norm"))
        yield from ((f"{name}.{part}.weight", (hidden,)) for part in ("input_layernorm", "post_attention_layernorm"))
        if "num_experts" not in config:
            yield from _feed_forward(f"{name}.mlp", hidden, config["intermediate_size"])
            continue
        yield f"{name}.mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield from _feed_forward(f"{name}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _feed_forward(name: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner))):
        yield f"{name}.{part}.weight", shape


def _write_shard(file: Path, tensors: list[tuple[str, tuple[int, ...]]], noise: torch.Tensor) -> int:
    """Norms are 1, everything else is noise; returns the bytes of the tensors."""
    header, at = {}, 0
    for name, shape in tensors:
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random, start = noise.view(torch.uint8).numpy(), 0
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, shape in tensors:
            left = 2 * torch.Size(shape).numel()
            if len(shape) == 1:
                out.write(torch.ones(shape, dtype=torch.bfloat16).view(torch.uint8).numpy())
                continue
            while left:
                piece = random[start : start + left]
                out.write(piece)
                left -= len(piece)
                start = (start + len(piece)) % len(random)
    return at


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Every id has a text, so that whatever random weights say can be shown; the first 256 are the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    vocab |= {f"<{i}>": i for i in range(len(alphabet), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
