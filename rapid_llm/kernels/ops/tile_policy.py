"""Tile knobs of a launch: the user's store, then the shipped one, then a heuristic by device tier. Torch-free.

A tier is a shape of tile, a device is a number of stages. HOPPER_UP tiles are wide (128 x 256 products fed by TMA and warpgroup
instructions): they want at least 160 KiB of shared memory *and* those features. So

- sm120 has the features' number but 101,376 bytes: PRE_HOPPER, as sm86 and sm89, whose memory it shares;
- the A100 has 166,912 bytes but moves tiles with cp.async and multiplies per warp, where 128 x 256 spills: PRE_HOPPER tiles too,
  and its bytes buy what cp.async does profit from, more stages (a 128 x 128 x 64 bf16 product: 5 against 3 on sm86);
- the CPU, where kernels run in the interpreter, takes PRE_HOPPER tiles with the stages of the smallest card.

Every tile that leaves here fits its device: stages are counted from its shared memory, with each stage holding whole operands.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from functools import cache, lru_cache
from typing import Any

from rapid_llm.envs import nearest
from rapid_llm.errors import ConfigError
from rapid_llm.kernels.device import DeviceInfo, current_device
from rapid_llm.kernels.ops.interfaces import ITEMSIZE, Sizes
from rapid_llm.kernels.provenance import source_hash, triton_minor
from rapid_llm.kernels.store import StoreFile, read_stores, warn_once

_WIDE_SMEM = 160 * 1024  # two stages of a 128 x 256 x 64 bf16 product and its accumulator's way out
_SMALLEST_SMEM = 65_536
_SMALLEST_BLOCK = 16  # the least side of a tensor-core product in Triton
_MOST_STEP = 128  # elements of k that weight-only products load at a time; a longer BLOCK_K holds a longer group
_CODE_BITS = {  # of an element of the weight
    "w8a16_gemm": 8,
    "w4a16_gemm": 4,
    "fused_moe_w8a16": 8,
    "fused_moe_w4a16": 4,
    "fused_moe_mxfp4": 4,
}
_BYTE_PRODUCTS = ("fp8_gemm", "int8_gemm")  # both operands take a byte an element
_GROUP = 128  # elements along k that share a scale, in formats that group them
_FP4_GROUP = {"nvfp4_gemm": 16, "mxfp4_gemm": 32}  # elements of k that share a scale byte
_FEW_PROGRAMS = 96  # of a matrix product: fewer leave multiprocessors of a large card idle
_MANY_PROGRAMS = 384  # of a product that streams its weight: fewer have too few bytes on their way
_LEAST_SHARE = 512  # elements of k: a shorter share is not worth the sum of the shares


class TileTier(Enum):
    """The shapes of tile that a device is given."""

    PRE_HOPPER = "PRE_HOPPER"
    HOPPER_UP = "HOPPER_UP"


def tile_tier(device: DeviceInfo) -> TileTier:
    """The tier of a device, by its shared memory and its matrix instructions together."""
    wide = device.smem is not None and device.smem >= _WIDE_SMEM and device.sm is not None and device.sm >= 90
    return TileTier.HOPPER_UP if wide else TileTier.PRE_HOPPER


@dataclass(frozen=True)
class Tile:
    """What one program covers and how it is launched. An axis that the kernel has no knob for is None.

    SPLIT_K programs share the sum over k of one output tile; in dense_gemm, as many warps of one program.
    """

    BLOCK_M: int | None = None
    BLOCK_N: int | None = None
    BLOCK_K: int | None = None
    SPLIT_K: int | None = None
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self) -> None:
        for name, value in self.launch().items():
            power_of_two = isinstance(value, int) and value > 0 and value & (value - 1) == 0
            if not power_of_two and not (name == "num_stages" and isinstance(value, int) and value > 0):
                wanted = "1 or more" if name == "num_stages" else "a power of two"
                raise ConfigError(f"bad {name} of a tile", got=repr(value), wanted=wanted, change="correct the tile")

    def launch(self) -> dict[str, int]:
        """Keyword arguments of the kernel launch, without the axes that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class TileChoice:
    """A tile and where it came from: "store:user", "store:shipped" or "heuristic:<tier>"."""

    tile: Tile
    source: str


def shape_bucket(sizes: Sizes) -> str:
    """The key of a measured shape: every size rounded up to a power of two, by name. Neighbours share a measurement."""
    return ",".join(f"{name}={_ceil_power(value)}" for name, value in sorted(sizes.items()))


def stored_sizes(op: str, sizes: Sizes) -> Sizes:
    """The sizes that a stored tile of ``op`` is found by: those that its row asks with. One that is absent counts as 1."""
    return {name: sizes.get(name, 1) for name in _STORED_BY[op]}


def resolve_tiles(op: str, *, device: DeviceInfo | None = None, dtype: object, block_k_multiple: int = 1, **sizes: int) -> Tile:
    """The tile for one call of ``op``. All calls of one shape bucket get the same one, so they compile to the same kernel.

    Args:
        op: a name of ``tiled_ops()``.
        device: where it will run; None is the current device.
        dtype: compute dtype, as a torch dtype or its name.
        block_k_multiple: BLOCK_K comes out as a multiple of this (groups of a quantised weight stay whole).
        sizes: sizes of the call, by the names of the op's contract.
    Raises: ConfigError on an unknown op, size or dtype, and where no BLOCK_K can be such a multiple.
    """
    name = str(dtype).removeprefix("torch.")
    if _of_one_batch.get():
        sizes = {size: ONE_BATCH.get(size, value) for size, value in sizes.items()}
    if _trial is not None:
        return _trial(op, name, sizes)
    return choose_tiles(op, device or current_device(None), name, sizes, block_k_multiple=block_k_multiple).tile


ONE_BATCH = {"num_tokens": 64, "num_seqs": 64, "q_len": 64}
"""The batch whose tiles serve all inside ``tiles_of_one_batch``: short chunks waste little of them, long ones fill them."""
_of_one_batch = ContextVar("of_one_batch", default=False)  # another thread may run another engine


@contextmanager
def tiles_of_one_batch() -> Iterator[None]:
    """Inside, a tile hangs on no size that a batch decides, and so neither does the order in which a row's numbers are summed."""
    token = _of_one_batch.set(True)
    try:
        yield
    finally:
        _of_one_batch.reset(token)


def is_of_one_batch() -> bool:
    """Whether this is inside ``tiles_of_one_batch``: nothing may hang on the batch that decides an order of sums."""
    return _of_one_batch.get()


Trial = Callable[[str, str, Sizes], Tile]
_trial: Trial | None = None


@contextmanager
def tiles_by(trial: Trial) -> Iterator[None]:
    """Inside, ``resolve_tiles`` answers what ``trial`` says of (op, dtype, sizes): how a search tries its candidates."""
    global _trial
    before, _trial = _trial, trial
    try:
        yield
    finally:
        _trial = before


def choose_tiles(
    op: str, device: DeviceInfo, dtype: str, sizes: Sizes, *, block_k_multiple: int = 1, any_triton: bool = False
) -> TileChoice:
    """``resolve_tiles`` that also tells where the tile came from.

    Args:
        op, device, dtype, sizes, block_k_multiple: as there.
        any_triton: take stored tiles whatever Triton they are of: for a device whose Triton is not the one installed here.
    """
    rounded = tuple(sorted((name, _ceil_power(value)) for name, value in sizes.items()))
    return _choose(op, device, dtype, rounded, block_k_multiple, None if any_triton else triton_minor_here())


@cache
def triton_minor_here() -> str | None:
    """``triton_minor()``, looked up once: reading a distribution's metadata is too slow for a launch."""
    return triton_minor()


@lru_cache(maxsize=8192)
def _choose(
    op: str, device: DeviceInfo, dtype: str, items: tuple[tuple[str, int], ...], block_k_multiple: int, triton: str | None
) -> TileChoice:
    sizes = dict(items)
    heuristic = _checked(op, dtype, sizes, block_k_multiple)
    stored = _stored(op, device, dtype, sizes, block_k_multiple, triton)
    if stored is not None:
        return stored
    tier = tile_tier(device)
    room = _Room(tier, device.smem or _SMALLEST_SMEM, ITEMSIZE[dtype], block_k_multiple)
    return TileChoice(heuristic(room, sizes), f"heuristic:{tier.value}")


def kept_tiles(op: str, device: str, dtype: str, bucket: str) -> list[Tile]:
    """Tiles that the stores hold for a bucket, of whatever version of the kernel and of Triton: where a search may begin."""
    tiles = []
    for _, entry in _entries(op, device, dtype, bucket):
        with suppress(KeyError, TypeError, AttributeError, ConfigError):  # malformed: it is warned of where it would be served
            tiles.append(_read_tile(entry["tile"]))
    return tiles


def forget_tiles() -> None:
    """Drop what is cached of the stores; call it after writing one."""
    _choose.cache_clear()


def tiled_ops() -> tuple[str, ...]:
    """The ops that take their knobs from here."""
    return tuple(_HEURISTICS)


def _checked(op: str, dtype: str, sizes: Sizes, block_k_multiple: int) -> "_Heuristic":
    """The heuristic of an op whose arguments are all known and all there."""
    if op not in _HEURISTICS:
        wanted = nearest(op, _HEURISTICS)
        raise ConfigError("no tiles for this op", got=repr(op), wanted=wanted, change="add its heuristic to tile_policy.py")
    if dtype not in ITEMSIZE:
        raise ConfigError(
            f"no tiles of {op} in this dtype", got=repr(dtype), wanted=nearest(dtype, ITEMSIZE), change="name another"
        )
    heuristic, needed, others = _HEURISTICS[op]
    for name in sizes:
        if name not in (*needed, *others):
            raise ConfigError(
                f"unknown size of {op}", got=name, wanted=nearest(name, (*needed, *others)), change="correct its name"
            )
    missing = [name for name in needed if name not in sizes]
    if missing:
        raise ConfigError(
            f"sizes of {op} are missing", got=", ".join(sizes) or "none", wanted=", ".join(missing), change="pass them"
        )
    if block_k_multiple < 1 or (block_k_multiple > 1 and op not in _OPS_WITH_K):
        wanted = "1 or more" if op in _OPS_WITH_K else "1, since the op has no BLOCK_K"
        raise ConfigError(f"bad block_k_multiple of {op}", got=str(block_k_multiple), wanted=wanted, change="correct it")
    return heuristic


# Stores. An entry: op, bucket, dtype, target and source_hash of the kernel it was tuned on, triton (minor), tile; for readers,
# its time and that of the heuristic's tile. A field beside them may be a condition that this version cannot check.
ENTRY_FIELDS = frozenset(("op", "bucket", "dtype", "target", "source_hash", "triton", "tile", "us", "heuristic_us"))


def _stored(
    op: str, device: DeviceInfo, dtype: str, sizes: Sizes, block_k_multiple: int, triton: str | None
) -> TileChoice | None:
    for store, entry in _entries(op, device.name, dtype, shape_bucket(stored_sizes(op, sizes))):
        tile = _usable(entry, store, triton)
        if tile is None or not _is_multiple(tile, block_k_multiple):
            continue
        if not fits(op, tile, device, dtype, sizes):
            _ignore(store, op, f"too large for the shared memory of {device.name}")
            continue
        return TileChoice(tile, f"store:{store.origin}")
    return None


def _entries(op: str, device: str, dtype: str, bucket: str) -> Iterator[tuple[StoreFile, Mapping[str, Any]]]:
    """The entries of a bucket, the user's first, each with its store; what else they hold is not looked at."""
    wanted = {"op": op, "dtype": dtype, "bucket": bucket}
    for store in read_stores("tuned"):
        if store.device == device:
            yield from ((store, entry) for entry in store.entries if all(entry.get(name) == wanted[name] for name in wanted))


def _usable(entry: Mapping[str, Any], store: StoreFile, triton: str | None) -> Tile | None:
    """The tile of an entry, or None and a warning when it is malformed or was tuned on another kernel or Triton."""
    unknown = sorted(set(entry) - ENTRY_FIELDS)
    if unknown:
        _ignore(store, entry["op"], f"malformed (unknown fields: {', '.join(unknown)})")
        return None
    try:
        tile = _read_tile(entry["tile"])
        found = source_hash(entry["target"])
        recorded, tuned_triton = entry["source_hash"], entry["triton"]
    except (KeyError, TypeError, ValueError, AttributeError, SyntaxError, ConfigError) as error:
        _ignore(store, str(entry.get("op")), f"malformed ({error})")
        return None
    if found != recorded:
        _ignore(store, entry["op"], f"stale: tuned on source {str(recorded)[:12]}, the kernel is now {found[:12]}")
        return None
    if triton is not None and tuned_triton != triton:
        if store.origin == "user":  # what ships is tuned with one Triton, whatever is installed
            _ignore(store, entry["op"], f"stale: tuned with Triton {tuned_triton}, {triton} is installed")
        return None
    return tile


def _read_tile(content: Mapping[str, Any]) -> Tile:
    unknown = set(content) - {entry.name for entry in fields(Tile)}
    if unknown:
        raise ConfigError("unknown knob in a tile", got=", ".join(sorted(unknown)))
    return Tile(**content)


def _ignore(store: StoreFile, op: str, why: str) -> None:
    warn_once(f"{store.path}: tiles of {op} are {why}; they are ignored")


def smem_bytes(op: str, tile: Tile, dtype: str, sizes: Sizes) -> int:
    """Shared memory that the operands of a tile's stages take; 0 for ops that keep everything in registers."""
    itemsize = ITEMSIZE[dtype]
    block_m, block_n, block_k = tile.BLOCK_M or 1, tile.BLOCK_N or 1, tile.BLOCK_K or 1
    if op in ("dense_gemm", "fused_moe", "fused_moe_fp8") and block_m > 1:
        return tile.num_stages * (block_m + block_n) * block_k * (1 if op == "fused_moe_fp8" else itemsize)
    if op in _BYTE_PRODUCTS:
        return tile.num_stages * (block_m + block_n) * block_k
    if op in _CODE_BITS:
        return _weight_only_bytes(_CODE_BITS[op], itemsize, block_m, block_n, block_k, tile.num_stages)
    if op in _FP4_GROUP:
        return _fp4_bytes(_FP4_GROUP[op], itemsize, block_m, block_n, block_k, tile.num_stages)
    if op in ("flash_decoding", "flashattention2_nopad"):
        dim = max(_ceil_power(sizes["head_dim"]), _SMALLEST_BLOCK)
        return (block_m + 2 * tile.num_stages * block_n) * dim * itemsize
    if op in ("flash_decoding_fp8", "flashattention2_nopad_fp8"):  # and one tile of K and of V as numbers
        dim = max(_ceil_power(sizes["head_dim"]), _SMALLEST_BLOCK)
        return (block_m * itemsize + 2 * block_n * (tile.num_stages + itemsize)) * dim
    return 0


def fits(op: str, tile: Tile, device: DeviceInfo, dtype: str, sizes: Sizes) -> bool:
    """Whether the stages of a tile fit the device's shared memory."""
    return smem_bytes(op, tile, dtype, sizes) <= (device.smem or _SMALLEST_SMEM)


def _is_multiple(tile: Tile, block_k_multiple: int) -> bool:
    return block_k_multiple == 1 or (tile.BLOCK_K is not None and tile.BLOCK_K % block_k_multiple == 0)


# Heuristics: sizes, rounded up to powers of two, to a tile.


@dataclass(frozen=True)
class _Room:
    """What a heuristic may use: the tier's shapes, bytes of shared memory, bytes of an element, and the grouping along K."""

    tier: TileTier
    smem: int
    itemsize: int
    block_k_multiple: int

    def pick(self, *, pre_hopper: int, hopper_up: int) -> int:
        """The value for this tier."""
        return hopper_up if self.tier is TileTier.HOPPER_UP else pre_hopper


_Heuristic = Callable[[_Room, Sizes], Tile]


def _ceil_power(value: int) -> int:
    """The power of two at or above ``value``; 0 for 0."""
    return 1 << (value - 1).bit_length() if value > 0 else 0


def _programs(tokens: int, n: int, block_m: int, block_n: int) -> int:
    """Tiles of a product's result."""
    return -(-tokens // block_m) * -(-n // block_n)


def _warps(elements: int, per_thread: int, most: int = 16) -> int:
    """Warps that give each of their threads about ``per_thread`` elements, 1 to ``most``."""
    return min(max(elements // (32 * per_thread), 1), most)


def _swiglu(room: _Room, sizes: Sizes) -> Tile:
    """Streams two inputs and an output: a column tile wide enough for 128-bit accesses, and many programs."""
    width = min(max(sizes["d"], 128), room.pick(pre_hopper=1024, hopper_up=2048))
    return Tile(BLOCK_N=width, num_warps=_warps(width, 8, most=8))


def _rms_norm(room: _Room, sizes: Sizes) -> Tile:
    """A row, or BLOCK_M narrow heads of one token, in registers where it fits; a wider one is walked in tiles of BLOCK_N."""
    width = _row_width(room, sizes["d"])
    rows = min(max(sizes.get("num_heads", 1), 1), max(room.pick(pre_hopper=1024, hopper_up=2048) // width, 1))
    return Tile(BLOCK_M=rows, BLOCK_N=width, num_warps=_warps(rows * width, 16))


def _add_rms_norm(room: _Room, sizes: Sizes) -> Tile:
    """As rms_norm, whose rows are whole tokens."""
    width = _row_width(room, sizes["d"])
    return Tile(BLOCK_N=width, num_warps=_warps(width, 16))


def _row_width(room: _Room, d: int) -> int:
    return min(max(d, 16), room.pick(pre_hopper=8192, hopper_up=16384))


def _vocab_embedding(room: _Room, sizes: Sizes) -> Tile:
    """A copy of rows: as swiglu, without arithmetic to hide."""
    width = min(max(sizes["hidden_size"], 128), room.pick(pre_hopper=1024, hopper_up=2048))
    return Tile(BLOCK_N=width, num_warps=_warps(width, 8, most=8))


def _gather_columns(room: _Room, sizes: Sizes) -> Tile:
    """As vocab_embedding, with loads that are not side by side."""
    width = min(max(sizes["k"], 128), room.pick(pre_hopper=1024, hopper_up=2048))
    return Tile(BLOCK_N=width, num_warps=_warps(width, 8, most=8))


def _sample(room: _Room, sizes: Sizes) -> Tile:
    """A split of a row in registers, as int64 keys where it is ordered: narrow ones while few rows would leave the card idle."""
    width = min(max(sizes["vocab_size"], 128), 4096 if sizes["num_seqs"] <= 16 else 8192)
    return Tile(BLOCK_N=width, num_warps=_warps(width, 16))


def _top_logprobs(room: _Room, sizes: Sizes) -> Tile:
    """One width whatever the batch: sums of exp are rounded, and a row must give the same bits alone and in a crowd."""
    width = min(max(sizes["vocab_size"], 128), 4096)
    return Tile(BLOCK_N=width, num_warps=_warps(width, 16))


def _rope(room: _Room, sizes: Sizes) -> Tile:
    """BLOCK_M heads by BLOCK_N of the half rotary width, so that one load of the cos-sin row turns several heads."""
    half = max(sizes["rotary_dim"] // 2, 1)
    heads = max(sizes["num_heads"], sizes["num_kv_heads"], 1)  # q and k are turned by programs of their own
    rows = min(heads, max(room.pick(pre_hopper=1024, hopper_up=2048) // half, 1))
    return Tile(BLOCK_M=rows, BLOCK_N=half, num_warps=_warps(rows * half, 8, most=8))


def _rope_kv_write(room: _Room, sizes: Sizes) -> Tile:
    """As rope over whole heads."""
    return _rope(room, {**sizes, "rotary_dim": sizes["head_dim"]})


def _flashattention2_nopad(room: _Room, sizes: Sizes) -> Tile:
    """Query tiles as long as registers hold the accumulator, fewer for a short chunk; K and V in as many stages as fit.

    fp32 has no exact matrix instruction: its operands pass through registers, so its tiles are small.
    """
    dim = max(sizes["head_dim"], _SMALLEST_BLOCK)
    wide = room.tier is TileTier.HOPPER_UP
    if room.itemsize == 4:
        block_m, block_n = (32, 32) if dim <= 64 else (16, 16)
    elif dim > 128:
        block_m, block_n = (128, 32) if wide else (64, 32)
    else:
        block_m, block_n = 128, 64 if wide or dim <= 64 else 32
    warps = 8 if block_m * dim >= 128 * 64 else 4
    if sizes["q_len"] <= 64 and sizes["q_len"] < block_m:
        block_m, warps = max(sizes["q_len"], _SMALLEST_BLOCK), 4
    key_bytes, query_bytes = 2 * block_n * dim * room.itemsize, block_m * dim * room.itemsize
    stages = min(max((room.smem - query_bytes) // key_bytes, 1), 3 if wide else 2)
    return Tile(block_m, block_n, num_warps=warps, num_stages=stages)


def _flash_decoding(room: _Room, sizes: Sizes) -> Tile:
    """BLOCK_M query heads of one KV head, BLOCK_N keys: bytes in flight, and room for three programs on a multiprocessor."""
    dim = max(sizes["head_dim"], _SMALLEST_BLOCK)
    group = sizes["num_heads"] // max(sizes["num_kv_heads"], 1)
    row_bytes = 2 * dim * room.itemsize
    if room.itemsize == 4:  # passes through registers
        block_m, block_n = _SMALLEST_BLOCK, 32 if dim <= 64 else 16
    else:
        block_m = min(max(_ceil_power(group), _SMALLEST_BLOCK), 64)
        block_n = min(max(room.pick(pre_hopper=16, hopper_up=32) * 1024 // row_bytes, _SMALLEST_BLOCK), 64)
    key_room = min(64 * 1024, room.smem - block_m * row_bytes // 2)
    stages = min(max(key_room // (block_n * row_bytes), 1), 3)
    return Tile(block_m, block_n, num_warps=4, num_stages=stages)


def _flashattention2_nopad_fp8(room: _Room, sizes: Sizes) -> Tile:
    """As over plain pools."""
    return _over_e4m3(room, _flashattention2_nopad(room, sizes), sizes, 3 if room.tier is TileTier.HOPPER_UP else 2)


def _flash_decoding_fp8(room: _Room, sizes: Sizes) -> Tile:
    """As over plain pools, with more stages of as many keys."""
    return _over_e4m3(room, _flash_decoding(room, sizes), sizes, 4)


def _over_e4m3(room: _Room, tile: Tile, sizes: Sizes, most: int) -> Tile:
    """A tile over plain pools with stages of bytes, beside the queries and one tile of K and of V as numbers.

    fp32 numbers of wide heads, or of as many queries as keys, take the registers of more warps.
    """
    dim, block_m, block_n = max(sizes["head_dim"], _SMALLEST_BLOCK), tile.BLOCK_M or 1, tile.BLOCK_N or 1
    while (block_m * room.itemsize + 2 * block_n * (1 + room.itemsize)) * dim > room.smem and block_n > _SMALLEST_BLOCK:
        block_n //= 2
    left = room.smem - (block_m + 2 * block_n) * dim * room.itemsize
    warps = 8 if room.itemsize == 4 and (dim > 128 or min(block_m, block_n) >= 32) else tile.num_warps
    return replace(tile, BLOCK_N=block_n, num_warps=warps, num_stages=min(max(left // (2 * block_n * dim), 1), most))


def _dense_gemm(room: _Room, sizes: Sizes) -> Tile:
    """One row: BLOCK_M is 1, which stands for a product without matrix instructions (ungrouped weights only). Few rows: the
    weight is streamed, BLOCK_M at its least and BLOCK_K long. Many rows: square tiles, wide ones on Hopper."""
    if sizes["num_tokens"] <= 1 and room.block_k_multiple == 1:
        return _dense_gemv(room, sizes)
    # Sixteen rows of many outputs have work for wide tiles already.
    is_few = sizes["num_tokens"] <= 8 or (sizes["num_tokens"] <= 16 and sizes["n"] <= 4 * sizes["k"])
    if is_few and room.itemsize == 2 and room.block_k_multiple == 1:
        return _dense_few(room, sizes)
    tokens, n = max(sizes["num_tokens"], _SMALLEST_BLOCK), max(sizes["n"], _SMALLEST_BLOCK)
    if tokens <= 64:
        narrow = n <= 4096  # more programs, each with as many bytes of the weight in flight
        block_m, block_n = tokens, 32 if narrow else 64
        block_k = 256 if narrow and tokens == _SMALLEST_BLOCK and room.itemsize == 2 else 128
    else:
        block_m, block_n, block_k = _many_rows(room, tokens, n)
    block_n = min(block_n, n)
    block_k = _block_k(room, min(block_k * 2 // room.itemsize, max(sizes["k"], _SMALLEST_BLOCK)))
    block_m, block_n = _shrunk_to_fit(room, block_m, block_n, block_k)
    stages = min(room.smem // _stage_bytes(room, block_m, block_n, block_k), 5)
    return Tile(block_m, block_n, block_k, num_warps=8 if block_m * block_n >= 128 * 64 else 4, num_stages=stages)


def _many_rows(room: _Room, tokens: int, n: int) -> tuple[int, int, int]:
    """The widest of the tier's tiles of which there are enough to keep a card busy."""
    wide = room.tier is TileTier.HOPPER_UP and room.itemsize == 2 and tokens >= 256
    for block_m, block_n in ((256, 128), (128, 128)) if wide else ((128, 128),):
        if _programs(tokens, n, block_m, block_n) >= _FEW_PROGRAMS:
            return block_m, block_n, 64
    return 128, 64, 64


def _dense_gemv(room: _Room, sizes: Sizes) -> Tile:
    """4 KiB of the weight a program and step: of few rows where there are few, so that every multiprocessor has several."""
    block_n, step, warps = (2, 2048, 4) if sizes["n"] <= 1024 else (4, 1024, 2)
    return Tile(1, block_n, min(step // room.itemsize, max(sizes["k"], _SMALLEST_BLOCK)), num_warps=warps)


def _dense_few(room: _Room, sizes: Sizes) -> Tile:
    """Four warps of 128 of k each. Of few outputs as many bytes as there is room for are on their way, elsewhere half of them."""
    block_m = max(sizes["num_tokens"], _SMALLEST_BLOCK // 2)
    block_n = 32 if 1024 < sizes["n"] <= 4096 else 16
    block_k = min(512, max(sizes["k"], 4 * _SMALLEST_BLOCK))
    stages = min(room.smem // _stage_bytes(room, block_m, block_n, block_k), 6 if sizes["n"] <= 1024 else 4)
    return Tile(block_m, block_n, block_k, 4, num_warps=4, num_stages=stages)


def _fp8_gemm(room: _Room, sizes: Sizes) -> Tile:
    """See _byte_product. Two sets of sums in registers, those of the last 128 of k and those before: 128 x 128 is the widest.

    Few rows: k is shared out among programs until there are many.
    """
    tile = _byte_product(room, sizes, widest=128, step=128)
    programs = -(-sizes["num_tokens"] // (tile.BLOCK_M or 1)) * -(-sizes["n"] // (tile.BLOCK_N or 1))
    return replace(tile, SPLIT_K=_splits(sizes["num_tokens"], programs, sizes["k"], tile.BLOCK_K or 1))


def _int8_gemm(room: _Room, sizes: Sizes) -> Tile:
    """See _byte_product."""
    return _byte_product(room, sizes, widest=256, step=256)


def _byte_product(room: _Room, sizes: Sizes, widest: int, step: int) -> Tile:
    """Few rows: the weight is streamed, BLOCK_M at its least, BLOCK_N the least of a warpgroup product, BLOCK_K ``step`` on a
    Hopper. Many rows: square tiles, up to ``widest`` outputs there. BLOCK_K is the group where k has several."""
    tokens, n, k = (max(sizes[name], low) for name, low in (("num_tokens", _SMALLEST_BLOCK), ("n", _SMALLEST_BLOCK), ("k", 32)))
    wide = room.tier is TileTier.HOPPER_UP
    grouped = sizes.get("group", k) < k
    if tokens <= 64:
        block_m, block_n, block_k = tokens, 64 if wide or n > 4096 else 32, step if wide and not grouped else 128
    else:
        shapes = ((128, widest), (128, 128)) if wide else ((128, 128),)
        enough = (shape for shape in shapes if _programs(tokens, n, shape[0], shape[1]) >= _FEW_PROGRAMS)
        (block_m, block_n), block_k = next(enough, (128, 64)), 128
    block_n, block_k = min(block_n, n), _GROUP if grouped else min(block_k, k)
    while 2 * (block_m + block_n) * block_k > room.smem:
        block_m, block_n = (block_m // 2, block_n) if block_m >= block_n else (block_m, block_n // 2)
    stages = min(room.smem // ((block_m + block_n) * block_k), 5 if block_m <= 64 else 4)
    return Tile(block_m, block_n, block_k, num_warps=8 if block_m * block_n >= 128 * 64 else 4, num_stages=stages)


def _quantize_fp8(room: _Room, sizes: Sizes) -> Tile:
    """A scale a token: rows, as _quantised_rows. A scale for each 128 of k: BLOCK_M of those groups."""
    if sizes["group"] < sizes["k"] or sizes["group"] == _GROUP:
        return Tile(BLOCK_M=16, BLOCK_N=_GROUP, num_warps=4)
    return _quantised_rows(room, sizes)


def _add_rms_norm_fp8(room: _Room, sizes: Sizes) -> Tile:
    """A row in registers where it fits; two sums an element are walked with beside it. A tile holds whole groups of 128."""
    width = _row_width(room, max(sizes["d"], _GROUP))
    return _add_rms_norm(room, {"d": width if width >= sizes["d"] else 4096})


def _swiglu_fp8(room: _Room, sizes: Sizes) -> Tile:
    """A scale a token: a row in registers where it fits, else walked. A scale for each 128 of d: BLOCK_M of those groups."""
    if sizes["group"] < sizes["d"]:
        return Tile(BLOCK_M=16, BLOCK_N=_GROUP, num_warps=4)
    return _add_rms_norm(room, sizes)


def _quantised_rows(room: _Room, sizes: Sizes) -> Tile:
    """A row, or BLOCK_M narrow ones, in registers where it fits; a wider one is walked in tiles of BLOCK_N."""
    width = _row_width(room, sizes["k"])
    rows = max(room.pick(pre_hopper=1024, hopper_up=2048) // width, 1)
    return Tile(BLOCK_M=rows, BLOCK_N=width, num_warps=_warps(rows * width, 16))


def _w8a16_gemm(room: _Room, sizes: Sizes) -> Tile:
    """A byte an element: see _weight_only."""
    return _weight_only(room, sizes, _CODE_BITS["w8a16_gemm"])


def _w4a16_gemm(room: _Room, sizes: Sizes) -> Tile:
    """Half a byte an element: see _weight_only."""
    return _weight_only(room, sizes, _CODE_BITS["w4a16_gemm"])


def _weight_only(room: _Room, sizes: Sizes, bits: int) -> Tile:
    """One row: BLOCK_M is 1, which stands for a product without matrix instructions. Few rows: the weight is streamed, BLOCK_M at
    its least, k shared out among programs until there are many. Many: square tiles. BLOCK_K covers a group.

    fp32 has no exact matrix instruction: its operands pass through registers, so its tiles are small.
    """
    # Groups that are known by their size are whole also where nobody asked for a multiple: when a tile is explained or searched.
    group = sizes.get("group", 1)
    least_k = group if group < sizes["k"] else 1
    tokens, n, k = (max(sizes[name], _SMALLEST_BLOCK) for name in ("num_tokens", "n", "k"))
    if sizes["num_tokens"] <= 1:
        block_n, block_k = (2, 1024) if bits == 8 else (4, 2048)
        return Tile(1, block_n, max(_block_k(room, min(block_k, k)), least_k), num_warps=1)
    if room.itemsize == 4:
        block_m, block_n, block_k = min(tokens, 32), 32, 64
    elif tokens <= 64:
        block_m, block_n, block_k = tokens, 32 if tokens == _SMALLEST_BLOCK else 64, 128
    elif bits == 8 and group >= sizes["k"]:  # sums by groups would take as many registers again
        block_m, block_n, block_k = _many_rows(room, tokens, n)
    else:
        block_m, block_k = room.pick(pre_hopper=64, hopper_up=128) if bits == 4 else 128, 64  # codes of both halves in registers
        block_n = 128 if _programs(tokens, n, block_m, 128) >= _FEW_PROGRAMS else 64
    block_n = min(block_n, n)
    block_k = max(_block_k(room, min(block_k, k)), least_k)
    while True:
        stages = min(_stages_that_fit(room, bits, block_m, block_n, block_k), 4)
        if stages >= 2 or max(block_m, block_n) <= _SMALLEST_BLOCK:
            break
        block_m, block_n = (block_m // 2, block_n) if block_m >= block_n else (block_m, block_n // 2)
    warps = 8 if block_m * block_n >= 128 * 64 else 2 if block_n <= 32 and room.itemsize == 2 else 4
    splits = _splits(tokens, _programs(tokens, n, block_m, block_n), k, block_k)
    return Tile(block_m, block_n, block_k, splits, num_warps=warps, num_stages=max(stages, 1))


def _splits(tokens: int, programs: int, k: int, block_k: int) -> int:
    """Programs that share the sum of an output tile: more than one where few rows make few tiles and k is long."""
    splits = 1
    while tokens <= 64 and splits < 4 and splits * programs < _MANY_PROGRAMS and k >= 2 * splits * max(_LEAST_SHARE, block_k):
        splits *= 2
    return splits


def _stages_that_fit(room: _Room, bits: int, block_m: int, block_n: int, block_k: int) -> int:
    none, one = (_weight_only_bytes(bits, room.itemsize, block_m, block_n, block_k, stages) for stages in (0, 1))
    return (room.smem - none) // (one - none)


def _weight_only_bytes(bits: int, itemsize: int, block_m: int, block_n: int, block_k: int, stages: int) -> int:
    """Stages of x and of the codes, and the codes once more as numbers, on their way to the matrix instruction."""
    step = min(block_k, _MOST_STEP)
    return stages * (block_m * itemsize * 8 + block_n * bits) * step // 8 + block_n * step * itemsize


def _nvfp4_gemm(room: _Room, sizes: Sizes) -> Tile:
    """A scale for each 16: see _fp4."""
    return _fp4(room, sizes, _FP4_GROUP["nvfp4_gemm"])


def _mxfp4_gemm(room: _Room, sizes: Sizes) -> Tile:
    """A scale for each 32: see _fp4."""
    return _fp4(room, sizes, _FP4_GROUP["mxfp4_gemm"])


def _fp4(room: _Room, sizes: Sizes, group: int) -> Tile:
    """One row: BLOCK_M is 1, which stands for a product without matrix instructions. Few rows: the weight is streamed, BLOCK_K so
    long that a step reads 128 bytes of each output, k shared out among programs. Many rows: square tiles.

    A warp for each 16 outputs, so that no two decode the same ones. fp32 passes through registers: its tiles are small.
    """
    tokens, n, k = (max(sizes[name], _SMALLEST_BLOCK) for name in ("num_tokens", "n", "k"))
    if sizes["num_tokens"] <= 1:
        few = n <= 8192 and room.itemsize < 4  # then more of each is in flight
        block_n, block_k, warps = (8, 2048, 4) if few else (4, 1024, 1)
        return Tile(1, block_n, max(min(block_k, k), group, room.block_k_multiple), num_warps=warps)
    if room.itemsize == 4:
        block_m, block_n, block_k = min(tokens, 32), 32, 64
    elif tokens <= 64:
        block_m, block_n, block_k = (tokens, 64, 256) if tokens <= 32 else (tokens, room.pick(pre_hopper=32, hopper_up=128), 128)
    else:
        block_m, block_k = room.pick(pre_hopper=64, hopper_up=128), room.pick(pre_hopper=128, hopper_up=64)
        block_n = 128 if _programs(tokens, n, block_m, 128) >= _FEW_PROGRAMS else 64
    block_n, block_k = min(block_n, n), max(min(block_k, k), group, room.block_k_multiple)
    while True:
        none, one = (_fp4_bytes(group, room.itemsize, block_m, block_n, block_k, stages) for stages in (0, 1))
        stages = min((room.smem - none) // (one - none), 4)
        if stages >= 2 or max(block_m, block_n) <= _SMALLEST_BLOCK:
            break
        block_m, block_n = (block_m // 2, block_n) if block_m >= block_n else (block_m, block_n // 2)
    large = block_m * block_n >= room.pick(pre_hopper=64, hopper_up=128) * 64  # before Hopper x, too, lies in registers
    warps = 8 if large else 4 if room.itemsize == 4 else min(block_n // 16, 8)
    splits = _splits(tokens, _programs(tokens, n, block_m, block_n), k, block_k)
    return Tile(block_m, block_n, block_k, splits, num_warps=warps, num_stages=max(stages, 1))


def _fp4_bytes(group: int, itemsize: int, block_m: int, block_n: int, block_k: int, stages: int) -> int:
    """Stages of x, of the codes and of their scales, and x in another order and the weight as numbers, both on their way to the
    matrix instruction; fp16 x in the order of powers of two is two bf16 numbers."""
    stage = block_m * block_k * itemsize + block_n * block_k // 2 + block_n * block_k // group
    return stages * stage + ((2 * block_m if group == 32 else block_m) + block_n) * block_k * itemsize


def _quantize_nvfp4(room: _Room, sizes: Sizes) -> Tile:
    """Streams a token's groups, as swiglu its columns."""
    width = min(max(sizes["k"], 128), room.pick(pre_hopper=1024, hopper_up=2048))
    return Tile(BLOCK_N=width, num_warps=_warps(width, 8, most=8))


def _fused_moe(room: _Room, sizes: Sizes) -> Tile:
    """Dense experts: see _moe."""
    return _moe(room, sizes, 8 * room.itemsize)


def _fused_moe_fp8(room: _Room, sizes: Sizes) -> Tile:
    """A byte an element on both sides: see _moe. Rounded activations keep no trace of their dtype."""
    return _moe(replace(room, itemsize=1), sizes, 8)


def _fused_moe_w8a16(room: _Room, sizes: Sizes) -> Tile:
    """A byte an element: see _moe."""
    return _moe(room, sizes, 8, decoded=True)


def _fused_moe_w4a16(room: _Room, sizes: Sizes) -> Tile:
    """Half a byte an element: see _moe."""
    return _moe(room, sizes, 4, decoded=True)


def _fused_moe_mxfp4(room: _Room, sizes: Sizes) -> Tile:
    """Half a byte an element, and sums by groups where x is fp16: see _moe."""
    return _moe(room, {**sizes, "group": 32}, 4, decoded=True)


def _moe(room: _Room, sizes: Sizes, bits: int, *, decoded: bool = False) -> Tile:
    """BLOCK_M by the rows that an expert may expect. Few: weights are streamed, BLOCK_K long. Many: square tiles, wide on Hopper.

    BLOCK_N counts rows of the weight; the gated product has gate and up among them.
    """
    rows = _ceil_power(sizes["num_tokens"] * sizes["top_k"] // max(sizes["num_experts"], 1))
    hidden, inner = (max(sizes[name], _SMALLEST_BLOCK) for name in ("hidden_size", "intermediate_size"))
    by_groups = sizes.get("group", 0) > 0  # whose sums take a second accumulator
    block_m = min(max(rows, _SMALLEST_BLOCK), 64 if by_groups else 128)
    if room.itemsize == 4:
        block_m, block_n = min(block_m, 32), 32
    elif block_m <= 32:
        block_n = 64
    else:
        block_n = room.pick(pre_hopper=128, hopper_up=256) if block_m == 128 and bits == 16 else 128
    block_n = min(block_n, max(hidden, 2 * inner))
    streamed = room.itemsize == 1 or (room.itemsize == 2 and block_m <= 32)
    block_k = _block_k(room, min(_MOST_STEP if streamed else 64, hidden, inner))
    while True:
        none, one = (_moe_bytes(room, bits, decoded, block_m, block_n, block_k, stages) for stages in (0, 1))
        stages = min((room.smem - none) // (one - none), 4)
        if stages >= 2 or max(block_m, block_n) <= _SMALLEST_BLOCK:
            break
        block_m, block_n = (block_m // 2, block_n) if block_m >= block_n else (block_m, block_n // 2)
    warps = 8 if block_m * block_n > (64 if by_groups else 128) * 64 else 4
    return Tile(block_m, block_n, block_k, num_warps=warps, num_stages=max(stages, 1))


def _moe_bytes(room: _Room, bits: int, decoded: bool, block_m: int, block_n: int, block_k: int, stages: int) -> int:
    if decoded:
        return _weight_only_bytes(bits, room.itemsize, block_m, block_n, block_k, stages)
    return stages * _stage_bytes(room, block_m, block_n, block_k)


def _block_k(room: _Room, wanted: int) -> int:
    """``wanted``, grown to cover whole groups. Blocks are powers of two, so only such groups can be covered."""
    multiple = room.block_k_multiple
    if multiple & (multiple - 1):
        change = "pad the groups or use a row that unpacks them otherwise"
        raise ConfigError(
            "no BLOCK_K covers whole groups", got=f"block_k_multiple {multiple}", wanted="a power of two", change=change
        )
    return max(wanted, multiple)


def _stage_bytes(room: _Room, block_m: int, block_n: int, block_k: int) -> int:
    return (block_m + block_n) * block_k * room.itemsize


def _shrunk_to_fit(room: _Room, block_m: int, block_n: int, block_k: int) -> tuple[int, int]:
    """Halve the longer of M and N until two stages fit."""
    while 2 * _stage_bytes(room, block_m, block_n, block_k) > room.smem:
        if max(block_m, block_n) <= _SMALLEST_BLOCK:
            got = f"block_k_multiple {room.block_k_multiple}, {room.smem:,} bytes of shared memory"
            wanted = f"at most {room.smem // (4 * _SMALLEST_BLOCK * room.itemsize)}"
            raise ConfigError("no tile fits whole groups along K", got=got, wanted=wanted, change="use smaller groups")
        if block_n >= block_m:
            block_n //= 2
        else:
            block_m //= 2
    return block_m, block_n


_MOE_SIZES = ("num_tokens", "num_experts", "top_k", "hidden_size", "intermediate_size")
# op -> heuristic, the sizes it needs, other sizes of the contract (they are in the bucket of a stored tile).
_HEURISTICS: Mapping[str, tuple[_Heuristic, tuple[str, ...], tuple[str, ...]]] = {
    "swiglu": (_swiglu, ("d",), ("num_tokens",)),
    "rms_norm": (_rms_norm, ("d",), ("num_tokens", "num_heads")),
    "add_rms_norm": (_add_rms_norm, ("d",), ("num_tokens",)),
    "gather_columns": (_gather_columns, ("k",), ("num_tokens",)),
    "vocab_embedding": (_vocab_embedding, ("hidden_size",), ("num_tokens", "vocab_size")),
    "rope": (_rope, ("num_heads", "num_kv_heads", "rotary_dim"), ("num_tokens", "head_dim")),
    "rope_kv_write": (_rope_kv_write, ("num_heads", "num_kv_heads", "head_dim"), ("num_tokens", "num_rows")),
    "qk_norm_rope_kv_write": (_rope_kv_write, ("num_heads", "num_kv_heads", "head_dim"), ("num_tokens", "num_rows")),
    "flashattention2_nopad": (
        _flashattention2_nopad,
        ("head_dim", "q_len"),
        ("num_heads", "num_kv_heads", "page_size", "num_seqs", "kv_len"),
    ),
    "flash_decoding": (
        _flash_decoding,
        ("num_heads", "num_kv_heads", "head_dim"),
        ("page_size", "num_seqs", "q_len", "kv_len"),
    ),
    "flashattention2_nopad_fp8": (
        _flashattention2_nopad_fp8,
        ("head_dim", "q_len"),
        ("num_heads", "num_kv_heads", "page_size", "num_seqs", "kv_len"),
    ),
    "flash_decoding_fp8": (
        _flash_decoding_fp8,
        ("num_heads", "num_kv_heads", "head_dim"),
        ("page_size", "num_seqs", "q_len", "kv_len"),
    ),
    "sample": (_sample, ("num_seqs", "vocab_size"), ()),
    "top_logprobs": (_top_logprobs, ("vocab_size",), ("num_seqs",)),
    "dense_gemm": (_dense_gemm, ("num_tokens", "n", "k"), ()),
    "w8a16_gemm": (_w8a16_gemm, ("num_tokens", "n", "k"), ("group",)),
    "w4a16_gemm": (_w4a16_gemm, ("num_tokens", "n", "k"), ("group",)),
    "quantize_fp8": (_quantize_fp8, ("k", "group"), ("num_tokens",)),
    "fp8_gemm": (_fp8_gemm, ("num_tokens", "n", "k"), ("group",)),
    "add_rms_norm_fp8": (_add_rms_norm_fp8, ("d",), ("num_tokens", "group")),
    "swiglu_fp8": (_swiglu_fp8, ("d", "group"), ("num_tokens",)),
    "quantize_int8": (_quantised_rows, ("k",), ("num_tokens",)),
    "int8_gemm": (_int8_gemm, ("num_tokens", "n", "k"), ()),
    "nvfp4_gemm": (_nvfp4_gemm, ("num_tokens", "n", "k"), ()),
    "mxfp4_gemm": (_mxfp4_gemm, ("num_tokens", "n", "k"), ()),
    "quantize_nvfp4": (_quantize_nvfp4, ("k",), ("num_tokens",)),
    "fused_moe": (_fused_moe, _MOE_SIZES, ()),
    "fused_moe_fp8": (_fused_moe_fp8, _MOE_SIZES, ("group",)),
    "fused_moe_w8a16": (_fused_moe_w8a16, _MOE_SIZES, ("group",)),
    "fused_moe_w4a16": (_fused_moe_w4a16, _MOE_SIZES, ("group",)),
    "fused_moe_mxfp4": (_fused_moe_mxfp4, _MOE_SIZES, ()),
}
_STORED_BY: Mapping[str, tuple[str, ...]] = {
    "swiglu": ("num_tokens", "d"),
    "rms_norm": ("num_tokens", "num_heads", "d"),
    "add_rms_norm": ("num_tokens", "d"),
    "gather_columns": ("num_tokens", "k"),
    "vocab_embedding": ("num_tokens", "vocab_size", "hidden_size"),
    "rope": ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    "rope_kv_write": ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    "qk_norm_rope_kv_write": ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    "flashattention2_nopad": ("num_heads", "num_kv_heads", "head_dim", "page_size", "q_len"),
    "flash_decoding": ("num_heads", "num_kv_heads", "head_dim", "page_size"),
    "flashattention2_nopad_fp8": ("num_heads", "num_kv_heads", "head_dim", "page_size", "q_len"),
    "flash_decoding_fp8": ("num_heads", "num_kv_heads", "head_dim", "page_size"),
    "sample": ("num_seqs", "vocab_size"),
    "top_logprobs": ("vocab_size",),
    "dense_gemm": ("num_tokens", "n", "k"),
    "w8a16_gemm": ("num_tokens", "n", "k", "group"),
    "w4a16_gemm": ("num_tokens", "n", "k", "group"),
    "quantize_fp8": ("num_tokens", "k", "group"),
    "fp8_gemm": ("num_tokens", "n", "k", "group"),
    "add_rms_norm_fp8": ("num_tokens", "d", "group"),
    "swiglu_fp8": ("num_tokens", "d", "group"),
    "quantize_int8": ("num_tokens", "k"),
    "int8_gemm": ("num_tokens", "n", "k"),
    "nvfp4_gemm": ("num_tokens", "n", "k"),
    "mxfp4_gemm": ("num_tokens", "n", "k"),
    "quantize_nvfp4": ("num_tokens", "k"),
    "fused_moe": _MOE_SIZES,
    "fused_moe_fp8": (*_MOE_SIZES, "group"),
    "fused_moe_w8a16": (*_MOE_SIZES, "group"),
    "fused_moe_w4a16": (*_MOE_SIZES, "group"),
    "fused_moe_mxfp4": _MOE_SIZES,
}
_OPS_WITH_K = frozenset(
    {
        "dense_gemm",
        "w8a16_gemm",
        "w4a16_gemm",
        *_BYTE_PRODUCTS,
        *_FP4_GROUP,
        *(op for op in _HEURISTICS if op.startswith("fused_moe")),
    }
)
