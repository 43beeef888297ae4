"""The tiles that a search tries, by op: declared, few, and all within the device's shared memory. Torch-free."""

from collections.abc import Callable, Iterable, Iterator
from itertools import product

from rapid_llm.kernels.device import DeviceInfo
from rapid_llm.kernels.ops.interfaces import Sizes
from rapid_llm.kernels.ops.tile_policy import Tile, choose_tiles, fits

_LEAST_PER_THREAD, _MOST_PER_THREAD = 4, 64  # elements: fewer waste instructions, more do not fit registers


def candidates(op: str, device: DeviceInfo, dtype: str, sizes: Sizes, block_k_multiple: int = 1) -> list[Tile]:
    """Tiles to try for one call of ``op``, the one that it gets without a search first.

    Args:
        op, device, dtype, sizes, block_k_multiple: as in ``resolve_tiles``.
    """
    first = choose_tiles(op, device, dtype, sizes, block_k_multiple=block_k_multiple).tile
    listed = _LISTS[op](sizes) if op in _LISTS else ()
    found = {first: None} | {tile: None for tile in listed if fits(op, tile, device, dtype, sizes)}
    return [tile for tile in found if block_k_multiple == 1 or (tile.BLOCK_K or 0) % block_k_multiple == 0]


def _power(value: int, low: int, high: int) -> int:
    """The power of two at or above ``value``, within ``low`` and ``high``."""
    return min(max(1 << max(value - 1, 0).bit_length(), low), high)


def _warps(elements: int) -> Iterator[int]:
    for warps in (1, 2, 4, 8, 16):
        if _LEAST_PER_THREAD <= elements // (32 * warps) <= _MOST_PER_THREAD:
            yield warps


def _columns(name: str) -> Callable[[Sizes], Iterator[Tile]]:
    """Column tiles of a row that is streamed."""

    def tiles(sizes: Sizes) -> Iterator[Tile]:
        row = _power(sizes[name], 128, 1 << 20)
        for width in (512, 1024, 2048, 4096, 8192):
            if width <= row:
                yield from (Tile(BLOCK_N=width, num_warps=warps) for warps in _warps(width))

    return tiles


def _rows(sizes: Sizes) -> Iterator[Tile]:
    """A whole row in registers, or walked in parts."""
    row = _power(sizes["d"], 128, 16_384)
    for width in {row, min(row, 4096)}:
        for warps in _warps(width):
            yield Tile(BLOCK_N=width, num_warps=warps)


def _head_rows(sizes: Sizes) -> Iterator[Tile]:
    """As _rows, with several narrow heads to a program."""
    for tile in _rows(sizes):
        yield Tile(BLOCK_M=1, BLOCK_N=tile.BLOCK_N, num_warps=tile.num_warps)
    heads, row = _power(sizes.get("num_heads", 1), 1, 32), _power(sizes["d"], 16, 16_384)
    for rows in (2, 4, 8, 16, 32):
        if rows <= heads:
            yield from (Tile(BLOCK_M=rows, BLOCK_N=row, num_warps=warps) for warps in _warps(rows * row))


def _rope(sizes: Sizes) -> Iterator[Tile]:
    half = _power(sizes["rotary_dim"] // 2, 16, 512)
    for rows in (1, 2, 4, 8, 16, 32):
        if rows <= _power(sizes["num_heads"], 1, 256):
            yield from (Tile(BLOCK_M=rows, BLOCK_N=half, num_warps=warps) for warps in (1, 2, 4, 8) if rows * half >= 32 * warps)


def _rope_kv_write(sizes: Sizes) -> Iterator[Tile]:
    yield from _rope({**sizes, "rotary_dim": sizes["head_dim"]})


def _splits(sizes: Sizes) -> Iterator[Tile]:
    """Splits of a row of logits. With more than 32 elements a thread, a start with empty caches waits seconds for a compiler."""
    for width in (2048, 4096, 8192, 16_384):
        yield from (Tile(BLOCK_N=width, num_warps=warps) for warps in (4, 8, 16) if width // (32 * warps) <= 32)


def _decode(sizes: Sizes) -> Iterator[Tile]:
    group = _power(sizes["num_heads"] // max(sizes["num_kv_heads"], 1), 16, 64)
    for keys in (32, 64, 128):
        for warps in (2, 4):
            for stages in (2, 3, 4):
                yield Tile(group, keys, num_warps=warps, num_stages=stages)


def _prefill(sizes: Sizes) -> Iterator[Tile]:
    most = _power(sizes["q_len"], 16, 128)
    for queries in {most, max(most // 2, 16)}:
        for keys in (32, 64, 128):
            for stages in (2, 3, 4):
                yield from (Tile(queries, keys, num_warps=warps, num_stages=stages) for warps in _attention_warps(queries))


def _attention_warps(queries: int) -> tuple[int, ...]:
    return (4, 8) if queries >= 128 else (4,)


def _gemm(sizes: Sizes) -> Iterator[Tile]:
    tokens = sizes["num_tokens"]
    if tokens <= 1:
        for rows, depth, warps in ((1, 1024, 1), (2, 512, 1), (2, 1024, 2), (2, 1024, 4), (2, 2048, 4), (4, 512, 2), (4, 1024, 2),
                                   (4, 1024, 4), (8, 512, 4), (8, 1024, 4), (16, 512, 8)):  # fmt: skip
            yield Tile(1, rows, depth, num_warps=warps)
    elif tokens <= 64:
        shared = ((16, 4, 128, 4), (16, 4, 128, 6), (16, 4, 256, 3), (16, 2, 256, 4), (32, 4, 128, 4)) if tokens <= 16 else ()
        for block_n, shares, depth, stages in shared:
            yield Tile(_power(tokens, 8, 16), block_n, shares * depth, shares, num_warps=shares, num_stages=stages)
        block_m = _power(tokens, 16, 64)
        for block_n, block_k in ((16, 128), (16, 256), (32, 128), (32, 256), (64, 64), (64, 128), (128, 64), (128, 128)):
            for stages in (3, 5):
                yield Tile(block_m, block_n, block_k, num_warps=4, num_stages=stages)
    else:
        for block_m, block_n, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8),
                                        (256, 128, 8), (64, 256, 4)):  # fmt: skip
            yield from (Tile(block_m, block_n, 64, num_warps=warps, num_stages=stages) for stages in (3, 4))
        yield Tile(128, 128, 128, num_warps=8, num_stages=2)


def _weight_only(sizes: Sizes) -> Iterator[Tile]:
    """Tiles whose BLOCK_K holds the group, where there is more than one."""
    tokens, least = sizes["num_tokens"], sizes["group"] if sizes["group"] < sizes["k"] else 1
    if tokens <= 1:
        for block_n, block_k, warps in ((2, 1024, 1), (2, 1024, 2), (4, 512, 1), (4, 1024, 1), (4, 1024, 2), (4, 2048, 1),
                                        (4, 2048, 2), (8, 512, 2), (8, 1024, 2), (8, 2048, 4)):  # fmt: skip
            yield Tile(1, block_n, max(block_k, least), num_warps=warps)
        return
    if tokens <= 64:
        block_m = _power(tokens, 16, 64)
        # Two warps have no warpgroup product: theirs takes both operands from registers.
        wide = [(32, 4)] if block_m == 16 else [(128, 4), (128, 8)] if block_m == 32 else [(64, 2), (128, 4), (128, 8), (256, 8)]
        for block_n, warps in ((32, 2), (64, 4), *wide):
            for split in (1, 2, 4):
                for stages in (2, 3) if block_m == 64 else (3, 4):
                    yield Tile(block_m, block_n, max(128, least), split, num_warps=warps, num_stages=stages)
        return
    shapes = [(64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8)]
    if sizes["group"] >= sizes["k"]:  # sums by groups would take as many registers again
        shapes.append((256, 128, 8))
    yield from _of_many_tokens(shapes, (2, 3, 4), least)


def _of_many_tokens(shapes: Iterable[tuple[int, int, int]], stages: Iterable[int], least: int = 1) -> Iterator[Tile]:
    """Tiles of (BLOCK_M, BLOCK_N, warps), each with steps of 64 and 128 of k, or ``least`` where that is more."""
    for (block_m, block_n, warps), depth in product(shapes, (64, 128)):
        for each in stages:
            yield Tile(block_m, block_n, max(depth, least), 1, num_warps=warps, num_stages=each)


def _byte_product(sizes: Sizes) -> Iterator[Tile]:
    """Of operands of a byte an element; BLOCK_K is the group where k has several."""
    tokens, grouped = sizes["num_tokens"], sizes.get("group", sizes["k"]) < sizes["k"]
    if tokens <= 64:
        block_m = _power(tokens, 16, 64)
        for block_n in (32, 64, 128):
            for block_k in (128,) if grouped else (128, 256):
                for split in (1, 2, 4) if "group" in sizes else (None,):
                    yield from (Tile(block_m, block_n, block_k, split, num_warps=4, num_stages=stages) for stages in (3, 5))
        return
    else:
        shapes = [(m, n, 128, warps) for m, n, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8), (64, 256, 8))]
        shapes += [] if "group" in sizes else [(128, 256, 128, 8), (256, 128, 128, 8)]
    for block_m, block_n, block_k, warps in shapes:
        if block_k == 128 or not grouped:
            yield from (Tile(block_m, block_n, block_k, num_warps=warps, num_stages=stages) for stages in (2, 3, 4, 5))


def _quantised(sizes: Sizes) -> Iterator[Tile]:
    """Rows as in _rows, or groups of 128."""
    width = sizes.get("k", sizes.get("d", 0))
    if sizes.get("group", width) < width:
        for groups in (4, 8, 16, 32, 64):
            yield from (Tile(BLOCK_M=groups, BLOCK_N=128, num_warps=warps) for warps in _warps(128 * groups))
        return
    for tile in _rows({"d": width}):
        yield Tile(BLOCK_M=1, BLOCK_N=tile.BLOCK_N, num_warps=tile.num_warps)


def _fp4(sizes: Sizes) -> Iterator[Tile]:
    """A warp for each 16 outputs and with twice as many; steps of 64 to 256 bytes of an output."""
    tokens = sizes["num_tokens"]
    if tokens <= 1:
        for block_n, block_k, warps in ((2, 1024, 1), (2, 2048, 1), (4, 512, 1), (4, 1024, 1), (4, 1024, 2), (4, 2048, 2),
                                        (8, 512, 1), (8, 1024, 2), (8, 2048, 4)):  # fmt: skip
            yield Tile(1, block_n, block_k, num_warps=warps)
        return
    if tokens <= 64:
        block_m = _power(tokens, 16, 64)
        for block_n, warps in ((16, 1), (32, 2), (64, 4), (128, 8)):
            for block_k in (128, 256):
                for split in (1, 2, 4):
                    yield Tile(block_m, block_n, block_k, split, num_warps=warps, num_stages=3)
        return
    shapes = ((64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 4), (128, 128, 4), (128, 128, 8), (256, 128, 8))
    yield from _of_many_tokens(shapes, (3, 4))


def _experts(sizes: Sizes) -> Iterator[Tile]:
    """As many rows as an expert may expect, or twice or half as many; BLOCK_N counts rows of gate and up together."""
    rows = _power(sizes["num_tokens"] * sizes["top_k"] // sizes["num_experts"], 16, 128)
    if rows <= 32:
        for block_m in {rows, min(2 * rows, 32)}:
            for block_n, block_k in ((32, 128), (64, 64), (64, 128), (128, 64), (128, 128)):
                yield from (Tile(block_m, block_n, block_k, num_warps=4, num_stages=stages) for stages in (3, 4, 5))
    else:
        for block_m, block_n, warps in ((32, 128, 4), (64, 64, 4), (64, 128, 4), (64, 256, 8), (128, 64, 4), (128, 128, 4),
                                        (128, 128, 8), (128, 256, 8)):  # fmt: skip
            yield from (Tile(block_m, block_n, 64, num_warps=warps, num_stages=stages) for stages in (3, 4))
            yield Tile(block_m, block_n, 128, num_warps=warps, num_stages=3)


_LISTS: dict[str, Callable[[Sizes], Iterator[Tile]]] = {
    "swiglu": _columns("d"),
    "vocab_embedding": _columns("hidden_size"),
    "gather_columns": _columns("k"),
    "rms_norm": _head_rows,
    "add_rms_norm": _rows,
    "rope": _rope,
    "rope_kv_write": _rope_kv_write,
    "qk_norm_rope_kv_write": _rope_kv_write,
    "sample": _splits,
    "top_logprobs": _splits,
    "flash_decoding": _decode,
    "flashattention2_nopad": _prefill,
    "flash_decoding_fp8": _decode,
    "flashattention2_nopad_fp8": _prefill,
    "dense_gemm": _gemm,
    "w8a16_gemm": _weight_only,
    "w4a16_gemm": _weight_only,
    "quantize_fp8": _quantised,
    "fp8_gemm": _byte_product,
    "add_rms_norm_fp8": _rows,
    "swiglu_fp8": _quantised,
    "quantize_int8": _quantised,
    "int8_gemm": _byte_product,
    "nvfp4_gemm": _fp4,
    "mxfp4_gemm": _fp4,
    "quantize_nvfp4": _columns("k"),
    "fused_moe": _experts,
    "fused_moe_fp8": _experts,
    "fused_moe_w8a16": _experts,
    "fused_moe_w4a16": _experts,
    "fused_moe_mxfp4": _experts,
}
