"""Writes small llama checkpoints of both kinds byte by byte, so that a test can break any byte. Owes nothing to the package."""

import json
import struct
from dataclasses import dataclass, field

import numpy as np

NUM_LAYERS, HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 2, 64, 96, 4, 2, 16, 257

_BYTE_CHARS = {b: chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]}
_BYTE_CHARS |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in _BYTE_CHARS)}
BYTE_TOKENS = [_BYTE_CHARS[b] for b in range(256)]
"""One token for each byte, in GPT-2's alphabet."""
END = "<|end|>"


def llama_config(**changes) -> dict:
    """config.json of the toy model; a change to ``...`` removes the key."""
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "eos_token_id": 256,
    } | changes
    return {key: value for key, value in values.items() if value is not ...}


def llama_tensors(
    seed: int = 0, dtype=np.float32, *, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE, num_heads: int = NUM_HEADS
) -> dict[str, np.ndarray]:
    """Normal random weights of the toy model by Hugging Face name, without a head."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCAB, hidden)}
    for layer in range(NUM_LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (num_heads * HEAD_DIM, hidden),
            at + "self_attn.k_proj.weight": (NUM_KV_HEADS * HEAD_DIM, hidden),
            at + "self_attn.v_proj.weight": (NUM_KV_HEADS * HEAD_DIM, hidden),
            at + "self_attn.o_proj.weight": (hidden, num_heads * HEAD_DIM),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "mlp.gate_proj.weight": (intermediate, hidden),
            at + "mlp.up_proj.weight": (intermediate, hidden),
            at + "mlp.down_proj.weight": (hidden, intermediate),
        }
    shapes["model.norm.weight"] = (hidden,)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


# --- safetensors folders ---


def safetensors_bytes(tensors: dict[str, np.ndarray], dtypes: dict[str, str] | None = None) -> bytes:
    """A .safetensors file. A uint16 array is written as BF16 bits; ``dtypes`` overrides what the header says."""
    names = {np.dtype("f4"): "F32", np.dtype("f2"): "F16", np.dtype("u2"): "BF16"}
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, values in tensors.items():
        dtype = (dtypes or {}).get(name, names[values.dtype])
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(values.tobytes() for values in tensors.values())


def write_folder(folder, *, config=None, tensors=None, num_shards=1, generation=None, tokenizer=None):
    """A folder in Hugging Face layout; ``tokenizer`` holds arguments of write_tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = llama_tensors() if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(llama_config() if config is None else config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer is not None:
        write_tokenizer(folder, **tokenizer)
    if num_shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return folder
    weight_map, names = {}, list(tensors)
    for number in range(num_shards):
        shard = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[number * len(names) // num_shards : (number + 1) * len(names) // num_shards]
        (folder / shard).write_bytes(safetensors_bytes({name: tensors[name] for name in part}))
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def tokenizer_json(*, added=(END,), post_processor=None, decoder=None, merges=()) -> dict:
    """tokenizer.json of a byte-level tokenizer: ids 0 to 255 are bytes, then merged pairs, then the added (special) tokens."""
    vocab = {token: place for place, token in enumerate([*BYTE_TOKENS, *("".join(pair) for pair in merges)])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(vocab) + i, "content": token} | flags for i, token in enumerate(added)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": post_processor,
        "decoder": byte_level if decoder is None else decoder,
        "model": {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in merges]},
    }


def write_tokenizer(folder, *, config=None, **parts):
    """tokenizer.json, and tokenizer_config.json with the keys of ``config``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(**parts)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END} if config is None else config))
    return folder


def bos_template(token: str, token_id: int) -> dict:
    """A post-processor that puts ``token`` before a text."""
    special = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    single = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


# --- GGUF ---

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
_STRING, _ARRAY = 8, 9


@dataclass
class GgufTensor:
    """One tensor of a GGUF file: shape outermost first, ggml type by number, data as stored."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    data: bytes


@dataclass
class Gguf:
    """A GGUF file to be. ``raw_metadata`` are values given with their type code: (code, bytes)."""

    metadata: dict = field(default_factory=dict)
    tensors: list[GgufTensor] = field(default_factory=list)
    raw_metadata: dict = field(default_factory=dict)
    version: int = 3
    alignment: int = 32

    def to_bytes(self) -> bytes:
        """The file."""
        entries = {key: _value(value) for key, value in self.metadata.items()} | self.raw_metadata
        if self.alignment != 32:
            entries["general.alignment"] = (4, struct.pack("<I", self.alignment))
        head = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(entries))
        head += b"".join(_string(key) + struct.pack("<I", code) + data for key, (code, data) in entries.items())
        data = b""
        for tensor in self.tensors:
            data += b"\0" * (-len(data) % self.alignment)
            dims = tensor.shape[::-1]
            head += _string(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.type_id, len(data))
            data += tensor.data
        return head + b"\0" * (-len(head) % self.alignment) + data


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<B", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return _STRING, _string(value)
    if value and isinstance(value[0], str):
        return _ARRAY, struct.pack("<IQ", _STRING, len(value)) + b"".join(map(_string, value))
    return _ARRAY, struct.pack(f"<IQ{len(value)}i", 5, len(value), *value)


def gguf_metadata(**changes) -> dict:
    """Metadata of the toy model, its byte-level tokenizer included. Keys with dots go in as ``**{"llama.x": 1}``; ... removes."""
    values = {
        "general.architecture": "llama",
        "llama.block_count": NUM_LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INTERMEDIATE,
        "llama.attention.head_count": NUM_HEADS,
        "llama.attention.head_count_kv": NUM_KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.vocab_size": VOCAB,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*BYTE_TOKENS, END],
        "tokenizer.ggml.token_type": [1] * 256 + [3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 256,
    } | changes
    return {key: value for key, value in values.items() if value is not ...}


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_GGUF_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """What a GGUF file calls the tensor that Hugging Face calls ``name``."""
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_WHOLE:
        return f"{_GGUF_WHOLE[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"


def permuted(name: str, values: np.ndarray) -> np.ndarray:
    """Rows of q and k as the converter of the llama family stores them: row i of a head's first half, row i of its second, ..."""
    if "q_proj" not in name and "k_proj" not in name:
        return values
    heads = values.reshape(-1, HEAD_DIM, *values.shape[1:])
    order = [half * HEAD_DIM // 2 + i for i in range(HEAD_DIM // 2) for half in (0, 1)]
    return heads[:, order].reshape(values.shape)


def llama_gguf(tensors: dict[str, np.ndarray], type_id: int = F32, quantise=None, **metadata) -> Gguf:
    """The toy model as a GGUF file. Matrices are of ``type_id`` (``quantise``: float32 rows -> bytes), vectors are F32."""
    stored = []
    for name, values in tensors.items():
        rows = np.ascontiguousarray(permuted(name, values))
        if rows.ndim == 1 or type_id == F32:
            stored.append(GgufTensor(gguf_name(name), rows.shape, F32, rows.astype("<f4").tobytes()))
        else:
            data = rows.astype("<f2").tobytes() if type_id == F16 else quantise(rows).tobytes()
            stored.append(GgufTensor(gguf_name(name), rows.shape, type_id, data))
    return Gguf(gguf_metadata(**metadata), stored)


# --- K types: quantisers of their own, since the gguf package only reads these. Not for blocks of zeros ---


def quantised_q4_k(rows: np.ndarray) -> np.ndarray:
    """Float rows -> Q4_K blocks [n, 144]."""
    head, integers = _from_minimum(rows, 15)
    return np.concatenate([head, _paired(integers.reshape(-1, 4, 2, 32))], axis=1)


def quantised_q5_k(rows: np.ndarray) -> np.ndarray:
    """Float rows -> Q5_K blocks [n, 176]."""
    head, integers = _from_minimum(rows, 31)
    fifth_bits = sum((integers[:, i] >> 4) << i for i in range(8))
    return np.concatenate([head, fifth_bits, _paired(integers.reshape(-1, 4, 2, 32) & 15)], axis=1)


def quantised_q6_k(rows: np.ndarray) -> np.ndarray:
    """Float rows -> Q6_K blocks [n, 210]."""
    groups = rows.reshape(-1, 16, 16)
    scales = np.abs(groups).max(axis=2) / 31
    whole, parts = _in_units(scales, 127)
    steps = whole.astype(np.float32) * parts
    integers = (np.clip(np.rint(groups / steps[:, :, None]), -32, 31) + 32).astype(np.uint8)
    low = _paired(integers.reshape(-1, 2, 2, 64) & 15)
    quarters = integers.reshape(-1, 2, 4, 32) >> 4
    high = sum(quarters[:, :, i] << 2 * i for i in range(4)).reshape(-1, 64)
    return np.concatenate([low, high, parts, whole.view(np.uint8)], axis=1)


def _from_minimum(rows: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """Heads [n, 16] of Q4_K or Q5_K, and integers [n, 8, 32] from 0 to ``largest``: an element is integer * scale - minimum."""
    groups = rows.reshape(-1, 8, 32)
    minima = np.maximum(-groups.min(axis=2), 0)
    scales = (groups.max(axis=2) + minima) / largest
    (scale, scale_parts), (minimum, minimum_parts) = _in_units(scales, 63), _in_units(minima, 63)
    steps, starts = scale.astype(np.float32) * scale_parts, minimum.astype(np.float32) * minimum_parts
    integers = np.clip(np.rint((groups + starts[:, :, None]) / steps[:, :, None]), 0, largest).astype(np.uint8)
    firsts = [parts[:, :4] | parts[:, 4:] >> 4 << 6 for parts in (scale_parts, minimum_parts)]
    rest = scale_parts[:, 4:] & 15 | minimum_parts[:, 4:] << 4
    return np.concatenate([scale.view(np.uint8), minimum.view(np.uint8), *firsts, rest], axis=1), integers


def _in_units(values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Positive values [n, k] as a float16 unit [n, 1] and how many of it: 1 to ``most``, rounded up so that none is cut off."""
    unit = (values.max(axis=1, keepdims=True) / most).astype("<f2")
    return unit, np.clip(np.ceil(values / unit.astype(np.float32)), 1, most).astype(np.uint8)


def _paired(nibbles: np.ndarray) -> np.ndarray:
    """Integers below 16 [n, groups, 2, width] -> bytes [n, groups * width]: the first of two in the low nibbles."""
    return (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).reshape(len(nibbles), -1)
