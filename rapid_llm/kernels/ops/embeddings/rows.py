"""Row and contract of the embeddings family."""

from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, Family, KernelSpec, Sizes, TensorArg

FLOATS = ("float32", "bfloat16", "float16")


def _vocab_embedding_cost(sizes: Sizes, itemsize: int) -> Cost:
    rows = sizes["num_tokens"] * sizes["hidden_size"] * itemsize
    return Cost(read=rows + 4 * sizes["num_tokens"], written=rows)


VOCAB_EMBEDDING = Contract(
    op="vocab_embedding",
    summary="one row of the embedding table per token id; id -1 gives zeros",
    phase="both",
    tensors=(
        TensorArg("ids", ("num_tokens",), dtype="int32", views=("offset",)),
        TensorArg("weight", ("vocab_size", "hidden_size"), views=("row_strided", "transposed", "offset")),
        TensorArg("out", ("num_tokens", "hidden_size"), written=True, views=("row_strided", "offset")),
    ),
    dtypes=FLOATS,
    maxima={"num_tokens": 1 << 20, "vocab_size": 1 << 19, "hidden_size": 1 << 15},
    sweep=(
        {"num_tokens": 0, "vocab_size": 257, "hidden_size": 64},
        {"num_tokens": 1, "vocab_size": 257, "hidden_size": 576},
        {"num_tokens": 7, "vocab_size": 1000, "hidden_size": 1000},
        {"num_tokens": 3, "vocab_size": 513, "hidden_size": 1025},
        {"num_tokens": 64, "vocab_size": 1024, "hidden_size": 128},
        {"num_tokens": 130, "vocab_size": 2048, "hidden_size": 1536},
    ),
    defaults={"num_tokens": 1, "vocab_size": 128256, "hidden_size": 4096},
    cost=_vocab_embedding_cost,
    free="num_tokens",
    ids={"ids": "-1 <= id < vocab_size"},
    hard=("padding_ids",),
)

_TRITON = CapabilityRequirement(device_types=("cuda",), min_sm=80, packages=("triton",), min_triton=(3, 6))

FAMILY = Family(
    name="embeddings",
    contracts=(VOCAB_EMBEDDING,),
    rows=(
        KernelSpec(
            op="vocab_embedding",
            name="torch.vocab_embedding",
            target="rapid_llm.kernels.ops.fallback.embeddings:vocab_embedding",
            requires=CapabilityRequirement(device_types=("cuda", "cpu")),
            dtypes=FLOATS,
            fallback=True,
        ),
        KernelSpec(
            op="vocab_embedding",
            name="triton.vocab_embedding",
            target="rapid_llm.kernels.ops.embeddings.vocab_embedding:vocab_embedding",
            requires=_TRITON,
            dtypes=FLOATS,
            priority=10,
        ),
    ),
)
