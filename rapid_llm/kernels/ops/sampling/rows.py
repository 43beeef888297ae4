"""Rows and contracts of the sampling family."""

from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, Family, KernelSpec, Sizes, TensorArg

FLOATS = ("float32", "bfloat16", "float16")

_MAXIMA = {"num_seqs": 1 << 16, "vocab_size": 1 << 20}
_LOGITS = TensorArg("logits", ("num_seqs", "vocab_size"), views=("row_strided", "offset"))


def _logits_cost(sizes: Sizes, itemsize: int) -> Cost:
    """One read of the logits; what is read and written beside them is nothing next to a row."""
    return Cost(read=sizes["num_seqs"] * sizes["vocab_size"] * itemsize, written=8 * sizes["num_seqs"])


SAMPLE = Contract(
    op="sample",
    summary="one token id per row by temperature, top-k, top-p, min-p and noise that depends on seed, position and id only",
    phase="both",
    tensors=(
        _LOGITS,
        TensorArg("temperature", ("num_seqs",), dtype="float32", views=("offset",)),
        TensorArg("top_k", ("num_seqs",), dtype="int32", views=("offset",)),
        TensorArg("top_p", ("num_seqs",), dtype="float32", views=("offset",)),
        TensorArg("min_p", ("num_seqs",), dtype="float32", views=("offset",)),
        TensorArg("seeds", ("num_seqs",), dtype="int64", views=("offset",)),
        TensorArg("positions", ("num_seqs",), dtype="int32", views=("offset",)),
        TensorArg("out_ids", ("num_seqs",), dtype="int32", written=True, views=("offset",)),
    ),
    dtypes=FLOATS,
    maxima=_MAXIMA,
    sweep=(
        {"num_seqs": 0, "vocab_size": 257},
        {"num_seqs": 1, "vocab_size": 257},
        {"num_seqs": 1, "vocab_size": 49152},
        {"num_seqs": 9, "vocab_size": 1025},
        {"num_seqs": 17, "vocab_size": 8193},
        {"num_seqs": 3, "vocab_size": 151936},
    ),
    defaults={"num_seqs": 1, "vocab_size": 128256},
    cost=_logits_cost,
    free="num_seqs",
    ids={
        "top_k": "any int32; <= 0 or >= vocab_size is off",
        "seeds": "any int64",
        "positions": "0 <= position",
        "out_ids": "0 <= id < vocab_size, or -1 for a row with a NaN or with nothing above -inf",
    },
    hard=("nan_row", "all_minus_inf", "all_negative", "plus_inf", "ties", "banned_tokens", "tiny_temperature", "mixed_top_k"),
)

TOP_LOGPROBS = Contract(
    op="top_logprobs",
    summary="log-probability of the given token and of the n largest of each row, from the raw logits",
    phase="both",
    tensors=(
        _LOGITS,
        TensorArg("token_ids", ("num_seqs",), dtype="int32", views=("offset",)),
        TensorArg("out_ids", ("num_seqs", "n+1"), dtype="int32", written=True, views=("row_strided", "offset")),
        TensorArg("out_logprobs", ("num_seqs", "n+1"), dtype="float32", written=True, views=("row_strided", "offset")),
    ),
    dtypes=FLOATS,
    maxima=_MAXIMA,
    sweep=(
        {"num_seqs": 0, "vocab_size": 257},
        {"num_seqs": 1, "vocab_size": 257},
        {"num_seqs": 2, "vocab_size": 49152},
        {"num_seqs": 7, "vocab_size": 1025},
        {"num_seqs": 4, "vocab_size": 8193},
        {"num_seqs": 3, "vocab_size": 151936},
    ),
    defaults={"num_seqs": 1, "vocab_size": 128256},
    cost=_logits_cost,
    free="num_seqs",
    ids={
        "token_ids": "-1 <= id < vocab_size; -1 gives (-1, nan) in column 0",
        "out_ids": "0 <= id < vocab_size, or -1 with nan in every column of a row with a NaN or with nothing above -inf",
    },
    hard=("nan_row", "all_minus_inf", "all_negative", "plus_inf", "ties", "banned_tokens"),
)


def _adjust_cost(sizes: Sizes, itemsize: int) -> Cost:
    """The logits and their counts in, fp32 logits out; an edit touches one of them again."""
    elements = sizes["num_seqs"] * sizes["vocab_size"]
    edits = 12 * sizes["num_edits"]
    return Cost(read=elements * (itemsize + 4) + edits, written=4 * elements)


ADJUST_LOGITS = Contract(
    op="adjust_logits",
    summary="fp32 logits after penalties by the tokens that each row has had, with single tokens raised or banned",
    phase="both",
    tensors=(
        _LOGITS,
        TensorArg("counts", ("table_rows", "vocab_size"), dtype="int32", views=("row_strided", "offset")),
        TensorArg("count_rows", ("num_seqs",), dtype="int32", views=("offset",)),
        TensorArg("repetition", ("num_seqs",), dtype="float32", views=("offset",)),
        TensorArg("presence", ("num_seqs",), dtype="float32", views=("offset",)),
        TensorArg("frequency", ("num_seqs",), dtype="float32", views=("offset",)),
        TensorArg("edit_rows", ("num_edits",), dtype="int32", views=("offset",)),
        TensorArg("edit_ids", ("num_edits",), dtype="int32", views=("offset",)),
        TensorArg("edit_values", ("num_edits",), dtype="float32", views=("offset",)),
        TensorArg("out", ("num_seqs", "vocab_size"), dtype="float32", written=True, views=("row_strided", "offset")),
    ),
    dtypes=FLOATS,
    maxima={**_MAXIMA, "table_rows": 1 << 16, "num_edits": 1 << 20},
    sweep=(
        {"num_seqs": 0, "vocab_size": 257, "table_rows": 3, "num_edits": 0},
        {"num_seqs": 1, "vocab_size": 257, "table_rows": 1, "num_edits": 1},
        {"num_seqs": 2, "vocab_size": 49152, "table_rows": 4, "num_edits": 300},
        {"num_seqs": 9, "vocab_size": 1025, "table_rows": 5, "num_edits": 257},
        {"num_seqs": 17, "vocab_size": 2049, "table_rows": 17, "num_edits": 0},
        {"num_seqs": 3, "vocab_size": 1000, "table_rows": 0, "num_edits": 40},
    ),
    defaults={"num_seqs": 1, "vocab_size": 128256, "table_rows": 1, "num_edits": 8},
    cost=_adjust_cost,
    free="num_seqs",
    ids={
        "counts": "times a token was put out, from 0, plus 2**30 where the prompt holds it",
        "count_rows": "-1 <= row < table_rows; -1 has no penalties",
        "edit_rows": "0 <= row < num_seqs",
        "edit_ids": "0 <= id < vocab_size",
    },
    hard=("nan_row", "all_minus_inf", "all_negative", "plus_inf", "ties", "banned_tokens", "doubled_edits"),
)


def _mask_cost(sizes: Sizes, itemsize: int) -> Cost:
    """The logits in, fp32 logits out, a bit of mask for each."""
    elements = sizes["num_seqs"] * sizes["vocab_size"]
    return Cost(read=elements * itemsize + sizes["num_masks"] * sizes["vocab_size"] // 8, written=4 * elements)


MASK_LOGITS = Contract(
    op="mask_logits",
    summary="fp32 logits in which only the tokens that a row's bit mask allows are left",
    phase="both",
    tensors=(
        _LOGITS,
        TensorArg("masks", ("num_masks", "vocab_words"), dtype="int32", views=("row_strided", "offset")),
        TensorArg("mask_rows", ("num_seqs",), dtype="int32", views=("offset",)),
        TensorArg("out", ("num_seqs", "vocab_size"), dtype="float32", written=True, views=("row_strided", "offset")),
    ),
    dtypes=FLOATS,
    maxima={**_MAXIMA, "num_masks": 1 << 16},
    sweep=(
        {"num_seqs": 0, "vocab_size": 257, "num_masks": 0},
        {"num_seqs": 1, "vocab_size": 257, "num_masks": 1},
        {"num_seqs": 2, "vocab_size": 49152, "num_masks": 2},
        {"num_seqs": 9, "vocab_size": 1025, "num_masks": 4},
        {"num_seqs": 17, "vocab_size": 2049, "num_masks": 17},
        {"num_seqs": 3, "vocab_size": 151936, "num_masks": 1},
    ),
    defaults={"num_seqs": 1, "vocab_size": 128256, "num_masks": 1},
    cost=_mask_cost,
    free="num_seqs",
    ids={
        "masks": "any int32; bit id % 32 of word id // 32 allows the token, bits past the vocabulary say nothing",
        "mask_rows": "-1 <= row < num_masks; -1 allows every token",
    },
    hard=("nan_row", "all_minus_inf", "plus_inf", "banned_tokens", "nothing_allowed"),
)

_TRITON = CapabilityRequirement(device_types=("cuda",), min_sm=80, packages=("triton",), min_triton=(3, 6))

FAMILY = Family(
    name="sampling",
    contracts=(SAMPLE, TOP_LOGPROBS, ADJUST_LOGITS, MASK_LOGITS),
    rows=(
        KernelSpec(
            op="sample",
            name="torch.sample",
            target="rapid_llm.kernels.ops.fallback.sampling:sample",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="top_logprobs",
            name="torch.top_logprobs",
            target="rapid_llm.kernels.ops.fallback.sampling:top_logprobs",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="sample",
            name="triton.sample",
            target="rapid_llm.kernels.ops.sampling.sample:sample",
            requires=_TRITON,
            dtypes=FLOATS,
            priority=10,
        ),
        KernelSpec(
            op="top_logprobs",
            name="triton.top_logprobs",
            target="rapid_llm.kernels.ops.sampling.top_logprobs:top_logprobs",
            requires=_TRITON,
            dtypes=FLOATS,
            priority=10,
        ),
        KernelSpec(
            op="adjust_logits",
            name="torch.adjust_logits",
            target="rapid_llm.kernels.ops.fallback.sampling:adjust_logits",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="adjust_logits",
            name="triton.adjust_logits",
            target="rapid_llm.kernels.ops.sampling.adjust_logits:adjust_logits",
            requires=_TRITON,
            dtypes=FLOATS,
            priority=10,
        ),
        KernelSpec(
            op="mask_logits",
            name="torch.mask_logits",
            target="rapid_llm.kernels.ops.fallback.sampling:mask_logits",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="mask_logits",
            name="triton.mask_logits",
            target="rapid_llm.kernels.ops.sampling.mask_logits:mask_logits",
            requires=_TRITON,
            dtypes=FLOATS,
            priority=10,
        ),
    ),
)
