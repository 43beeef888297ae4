"""The sizes that rows are measured and tuned at: those of models people serve, at the token counts of decode and prefill."""

from collections.abc import Iterator

from rapid_llm.errors import ConfigError
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.ops.interfaces import Sizes

TOKENS = (1, 16, 64, 256, 1024, 4096, 16_384)
BATCHES = (1, 8, 64, 256)
CONTEXTS = (128, 1024, 8192, 32_768)
PROMPTS = (512, 2048, 8192)
HEADS = ((32, 8, 128), (16, 8, 128), (32, 4, 128), (64, 8, 128), (9, 3, 64))  # query heads, key-value heads, head width
HIDDEN = (1024, 2048, 4096, 8192, 14_336)
WIDE = (3072, 14_336)  # of a feed-forward
LAYERS = {
    # n, k of the projections
    "llama-8b": ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)),
    "qwen3-0.6b": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
}
VOCABULARIES = (49_152, 128_256, 151_936)
GEMM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
QUANTISED_TOKENS = (1, 8, 16, 32, 64, 256, 1024, 4096)
# experts, experts of a token, hidden and inner width: of Qwen3-30B-A3B and of Mixtral-8x7B
MIXTURES = ((128, 8, 2048, 768), (8, 2, 4096, 14_336))
MOE_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16_384)
_MOST_KEYS = 1 << 19  # of all sequences of a decode batch: 2.1 GB of 8 heads of 128 in bf16
PAGE_SIZE = 16
_MOST_SEARCHED = 4 * 10**12  # operations of one call: 5 ms at the rate of an H200


def tuning_sizes(op: str) -> list[Sizes]:
    """The serving sizes that a search of tiles tries: all, but few of decode attention, whose one tile serves every length, and
    none of experts whose products take tens of milliseconds each."""
    sizes = serving_sizes(op)
    if op.startswith("fused_moe"):
        return [each for each in sizes if catalog().contract(op).cost(each, 2).flops <= _MOST_SEARCHED]
    if op not in ("flash_decoding", "flash_decoding_fp8"):
        return sizes
    return [each for each in sizes if each["num_seqs"] in (1, 64) and each["kv_len"] in (128, 1024, 8192)]


def serving_sizes(op: str) -> list[Sizes]:
    """Every set of sizes of ``op``, all that its contract names. Raises: ConfigError on an op without any here."""
    if op not in _SIZES:
        raise ConfigError("no serving sizes for this op", got=op, wanted=", ".join(_SIZES), change="add it to measure/serving.py")
    return list(_SIZES[op]())


def _of_rows(name: str, widths: tuple[int, ...]) -> Iterator[Sizes]:
    for width in widths:
        for tokens in TOKENS:
            yield {"num_tokens": tokens, name: width}


def _rope() -> Iterator[Sizes]:
    for heads, kv_heads, dim in HEADS:
        for tokens in TOKENS:
            yield {"num_tokens": tokens, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "rotary_dim": dim}


def _rope_kv_write() -> Iterator[Sizes]:
    for heads, kv_heads, dim in HEADS:
        for tokens in TOKENS:
            yield {"num_tokens": tokens, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "num_rows": 1 << 16}


def _embedding() -> Iterator[Sizes]:
    for hidden, vocabulary in ((576, 49_152), (1024, 151_936), (4096, 128_256)):
        for tokens in TOKENS:
            yield {"num_tokens": tokens, "vocab_size": vocabulary, "hidden_size": hidden}


def _gemm() -> Iterator[Sizes]:
    for shapes in LAYERS.values():
        for n, k in shapes:
            for tokens in GEMM_TOKENS:
                yield {"num_tokens": tokens, "n": n, "k": k}
    for n, k in ((128_256, 4096), (151_936, 1024)):  # heads see one row a sequence
        for rows in BATCHES:
            yield {"num_tokens": rows, "n": n, "k": k}


def _of_llama() -> Iterator[Sizes]:
    """Projections of the larger model."""
    for n, k in LAYERS["llama-8b"]:
        for tokens in QUANTISED_TOKENS:
            yield {"num_tokens": tokens, "n": n, "k": k}


def _in_groups(widths: tuple[int, ...]) -> Iterator[Sizes]:
    """Rows that end in e4m3, with a scale a token or one for each 128."""
    for sizes in _of_rows("d", widths):
        yield from ({**sizes, "group": group} for group in (sizes["d"], 128))


def _quantised() -> Iterator[dict[str, int]]:
    """Rows that go into those."""
    for k in (4096, 14_336):
        for tokens in TOKENS:
            yield {"num_tokens": tokens, "k": k}


def _weight_only(group: int | None) -> Iterator[Sizes]:
    """Projections of the larger model; ``group`` is None where an output has one scale."""
    for sizes in _of_llama():
        yield {**sizes, "group": group or sizes["k"]}


def _fp4() -> Iterator[Sizes]:
    """As _weight_only; the size of a group is the format's."""
    return ({name: each[name] for name in ("num_tokens", "n", "k")} for each in _weight_only(None))


def _routes() -> Iterator[Sizes]:
    for experts, top_k in ((128, 8), (8, 2), (256, 8)):
        for tokens in MOE_TOKENS:
            yield {"num_tokens": tokens, "num_experts": experts, "top_k": top_k}


def _mixtures(group: int | None = None) -> Iterator[Sizes]:
    """Layers of experts; ``group`` is 0 where an output has one scale and None where there is none to name."""
    for experts, top_k, hidden, inner in MIXTURES:
        for tokens in MOE_TOKENS:
            yield {
                "num_tokens": tokens,
                "num_experts": experts,
                "top_k": top_k,
                "hidden_size": hidden,
                "intermediate_size": inner,
                **({} if group is None else {"group": group}),
            }


def _kv_write() -> Iterator[Sizes]:
    for _, kv_heads, dim in ((32, 8, 128), (32, 4, 128), (9, 3, 64)):
        for tokens in TOKENS:
            yield {"num_tokens": tokens, "num_kv_heads": kv_heads, "head_dim": dim, "num_rows": 1 << 20}


def _kv_index() -> Iterator[Sizes]:
    for updates in BATCHES:
        yield {"num_updates": updates, "num_table_rows": 256, "num_columns": 8192}


def _attention(heads: tuple[int, int, int], num_seqs: int, q_len: int, kv_len: int) -> Sizes:
    return {
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": heads[2],
        "page_size": PAGE_SIZE,
        "num_seqs": num_seqs,
        "q_len": q_len,
        "kv_len": kv_len,
    }


def _decode() -> Iterator[Sizes]:
    for heads in HEADS:
        for batch in BATCHES:
            yield from (_attention(heads, batch, 1, keys) for keys in CONTEXTS if batch * keys <= _MOST_KEYS)


def _prefill() -> Iterator[Sizes]:
    for heads in HEADS:
        for prompt in PROMPTS:
            yield _attention(heads, 1, prompt, prompt)
        yield _attention(heads, 16, 512, 512)
        yield _attention(heads, 1, 512, 8192)  # a chunk behind a cached prefix
        yield _attention(heads, 1, 32, 1024)


def _logits() -> Iterator[Sizes]:
    for vocabulary in VOCABULARIES:
        for batch in BATCHES:
            yield {"num_seqs": batch, "vocab_size": vocabulary}


def _adjusted() -> Iterator[Sizes]:
    """As _logits, every row with penalties and a few edits."""
    for sizes in _logits():
        yield {**sizes, "table_rows": sizes["num_seqs"], "num_edits": 8 * sizes["num_seqs"]}


def _masked() -> Iterator[Sizes]:
    """As _logits, every row with a mask of its own."""
    for sizes in _logits():
        yield {**sizes, "num_masks": sizes["num_seqs"]}


_SIZES = {
    "rms_norm": lambda: _of_rows("d", HIDDEN),
    "add_rms_norm": lambda: _of_rows("d", HIDDEN),
    "swiglu": lambda: _of_rows("d", WIDE),
    "rope": _rope,
    "rope_kv_write": _rope_kv_write,
    "qk_norm_rope_kv_write": _rope_kv_write,
    "vocab_embedding": _embedding,
    "dense_gemm": _gemm,
    "w8a16_gemm": lambda: _weight_only(None),
    "w4a16_gemm": lambda: _weight_only(128),
    "route_experts": _routes,
    "fused_moe": _mixtures,
    "fused_moe_fp8": lambda: _mixtures(0),
    "fused_moe_w8a16": lambda: _mixtures(0),
    "fused_moe_w4a16": lambda: _mixtures(128),
    "fused_moe_mxfp4": _mixtures,
    "quantize_fp8": lambda: (sizes | {"group": group} for sizes in _quantised() for group in (sizes["k"], 128)),
    "fp8_gemm": lambda: (*_weight_only(None), *_weight_only(128)),
    "add_rms_norm_fp8": lambda: _in_groups(HIDDEN),
    "swiglu_fp8": lambda: _in_groups(WIDE),
    "quantize_int8": _quantised,
    "int8_gemm": _of_llama,
    "nvfp4_gemm": _fp4,
    "mxfp4_gemm": _fp4,
    "quantize_nvfp4": lambda: _of_rows("k", HIDDEN),
    "gather_columns": lambda: _of_rows("k", HIDDEN),
    "update_kv_buffer": _kv_write,
    "update_kv_buffer_fp8": _kv_write,
    "update_kv_index": _kv_index,
    "flash_decoding": _decode,
    "flashattention2_nopad": _prefill,
    "flash_decoding_fp8": _decode,
    "flashattention2_nopad_fp8": _prefill,
    "sample": _logits,
    "top_logprobs": _logits,
    "adjust_logits": _adjusted,
    "mask_logits": _masked,
}
