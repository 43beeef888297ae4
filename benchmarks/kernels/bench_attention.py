"""How near are decode to one read of K and V, and prefill to the card's arithmetic, over paged keys?

    python -m benchmarks.kernels.bench_attention [--quick] [--op OP] [--peers FOLDER] [--compile]

Decode sweeps batch and context at several head counts, pages of 16, of 1 and of 64, and a fragmented pool; prefill sweeps prompts
alone, packed, and chunks behind a cached prefix; some of each over pools of e4m3. torch's own kernels get K and V packed in
advance, which spares them the page table.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels import kv_pool
from benchmarks.kernels.cells import Cell, Skipped
from benchmarks.kernels.microbench import Bench, build, main
from benchmarks.kernels.peers import Peer, attention_sizes, packed_keys
from rapid_llm.kernels.measure.workloads import Workload

DECODE, PREFILL = "flash_decoding", "flashattention2_nopad"
DECODE_FP8, PREFILL_FP8 = f"{DECODE}_fp8", f"{PREFILL}_fp8"
FRAGMENTED = "fragmented"
_MOST_DENSE_KEYS = 1 << 20  # of all sequences: a second copy of more would not fit beside the pool
_LONGEST_MASK = 8192  # of flex_attention: building a longer mask takes longer than the bench


def _cells() -> list[Cell]:
    decode = [(32, 8, 128, batch, keys, 16) for batch in (1, 8, 64, 256) for keys in (128, 1024, 8192, 32_768)]
    decode += [(32, 8, 128, batch, keys, page) for page in (1, 64) for batch in (1, 64, 256) for keys in (1024, 8192)]
    few_kv, few_heads = (32, 4, 128), (16, 8, 128)
    decode += [(*heads, batch, keys, 16) for heads in (few_heads, few_kv) for batch in (1, 64) for keys in (1024, 8192)]
    decode += [(*heads, batch, 1024, 16) for heads in ((64, 8, 128), (9, 3, 64)) for batch in (1, 64)]
    cells = [
        Cell(DECODE, attention_sizes(heads, kv_heads, dim, batch, 1, keys, page))
        for heads, kv_heads, dim, batch, keys, page in decode
    ]
    cells += [Cell(DECODE, attention_sizes(32, 8, 128, batch, 1, 1024), variant=FRAGMENTED) for batch in (8, 64)]
    alone = [(32, 8, 1, 512), (32, 8, 64, 512), (32, 8, 1, 2048), (32, 8, 16, 2048), (32, 8, 1, 8192), (32, 8, 4, 8192),
             (32, 8, 1, 32_768), (16, 8, 16, 2048), (16, 8, 1, 8192), (32, 4, 1, 8192), (64, 8, 1, 2048)]  # fmt: skip
    cells += [Cell(PREFILL, attention_sizes(h, kv, 128, n, length, length)) for h, kv, n, length in alone]
    cells.append(Cell(PREFILL, attention_sizes(9, 3, 64, 1, 2048, 2048)))
    cached = [(1, 512, 8192), (8, 256, 4096), (1, 2048, 32_768), (1, 32, 1024)]  # sequences, new tokens, prefix
    cells += [Cell(PREFILL, attention_sizes(32, 8, 128, n, new, new + prefix)) for n, new, prefix in cached]
    cells.append(Cell(PREFILL, attention_sizes(32, 8, 128, 1, 2048, 2048), variant=FRAGMENTED))
    lengths = [(batch, keys) for batch in (1, 8, 64, 256) for keys in (1024, 8192, 32_768)]
    cells += [Cell(DECODE_FP8, attention_sizes(32, 8, 128, batch, 1, keys)) for batch, keys in lengths]
    cells += [Cell(DECODE_FP8, attention_sizes(16, 8, 128, batch, 1, 8192)) for batch in (1, 64)]
    cells += [Cell(PREFILL_FP8, attention_sizes(32, 8, 128, 1, length, length)) for length in (512, 2048, 8192)]
    cells.append(Cell(PREFILL_FP8, attention_sizes(32, 8, 128, 1, 512, 8704)))
    return cells


def _build(cell: Cell, device: str) -> Workload:
    if cell.variant != FRAGMENTED:
        return build(cell, device)
    return kv_pool.fragmented(build(Cell(cell.op, cell.sizes, cell.dtype), device))


def _dense(cell: Cell, each: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as [num_seqs, num_kv_heads, kv_len, head_dim], packed."""
    shape = (cell.sizes["num_seqs"], cell.sizes["kv_len"], cell.sizes["num_kv_heads"], cell.sizes["head_dim"])
    k, v = (part.view(shape).transpose(1, 2) for part in packed_keys(each))
    return k, v


def _decode_dense(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
    if cell.sizes["num_seqs"] * cell.sizes["kv_len"] > _MOST_DENSE_KEYS:
        raise Skipped("a packed copy of the keys would not fit")

    def of_set(each: dict[str, Any]) -> Callable[[], Any]:
        # One head's keys in a row, the layout that suits torch's kernels best.
        k, v = (part.contiguous() for part in _dense(cell, each))
        q = each["q"].unsqueeze(2)
        return lambda: scaled_dot_product_attention(q, k, v, scale=each["sm_scale"], enable_gqa=True)

    return [of_set(each) for each in work.sets]


def _prefill(backend: SDPBackend) -> Peer:
    """Prompts of one length without a prefix: torch's causal mask starts at the first key, so it cannot serve a chunk."""

    def prepare(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
        def of_set(each: dict[str, Any]) -> Callable[[], Any]:
            q, (k, v) = _queries(cell, each), _dense(cell, each)

            def call() -> torch.Tensor:
                with sdpa_kernel(backend):
                    found = scaled_dot_product_attention(q, k, v, is_causal=True, scale=each["sm_scale"], enable_gqa=True)
                return found.transpose(1, 2)

            return call

        return [of_set(each) for each in work.sets]

    return prepare


def _queries(cell: Cell, each: dict[str, Any]) -> torch.Tensor:
    """Queries as [num_seqs, num_heads, q_len, head_dim]. Raises: Skipped on a chunk behind a prefix."""
    s = cell.sizes
    if s["q_len"] != s["kv_len"]:
        raise Skipped("torch's causal mask starts at the first key")
    return each["q"].view(s["num_seqs"], s["q_len"], s["num_heads"], s["head_dim"]).transpose(1, 2)


def _flex(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = cell.sizes["q_len"]
    if length > _LONGEST_MASK:
        raise Skipped("building the mask takes too long")
    _queries(cell, work.sets[0])
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=work.sets[0]["q"].device)
    attend = torch.compile(flex_attention, dynamic=False)

    def of_set(each: dict[str, Any]) -> Callable[[], Any]:
        q, (k, v) = _queries(cell, each), _dense(cell, each)
        return lambda: attend(q, k, v, block_mask=mask, scale=each["sm_scale"], enable_gqa=True).transpose(1, 2)

    return [of_set(each) for each in work.sets]


BENCH = Bench(
    name="bench_attention",
    cells=_cells(),
    peers={
        DECODE: {"torch_sdpa_dense": _decode_dense},
        PREFILL: {
            "torch_sdpa_flash": _prefill(SDPBackend.FLASH_ATTENTION),
            "torch_sdpa_cudnn": _prefill(SDPBackend.CUDNN_ATTENTION),
        },
    },
    compiled={PREFILL: {"torch_flex_attention": _flex}},
    build=_build,
)

if __name__ == "__main__":
    main(__doc__, BENCH)
