"""Stores of evidence and of tiles: what is wrong with one costs a warning and never a result; what ships is sound."""

import json
import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rapid_llm.errors import ConfigError, NoKernelError
from rapid_llm.kernels import store as stores
from rapid_llm.kernels.device import device_info, known_devices
from rapid_llm.kernels.dispatcher import ranking
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.dispatcher.dispatch import choose, dispatch, forget_choices, load_target
from rapid_llm.kernels.dispatcher.evidence import EvidenceRecord, _read_record, latency_key, load_records, record_run
from rapid_llm.kernels.dispatcher.explain import explain
from rapid_llm.kernels.measure.serving import serving_sizes
from rapid_llm.kernels.ops import tile_policy
from rapid_llm.kernels.ops.interfaces import CapabilityRequirement
from rapid_llm.kernels.ops.tile_policy import (
    Tile,
    choose_tiles,
    fits,
    forget_tiles,
    resolve_tiles,
    shape_bucket,
    smem_bytes,
    tiled_ops,
)
from rapid_llm.kernels.provenance import is_installed, source_hash
from rapid_llm.kernels.store import StoreWarning, read_entries, read_stores, user_folder, warn_once
from tests.kernels.synthetic import CONTRACT

CPU, H200, T4 = device_info("cpu"), device_info("h200"), device_info("t4")
SHIPPED = Path(stores.__file__).parent  # the fixture of this folder points shipped_folder elsewhere
GEMM = {"num_tokens": 512, "n": 4096, "k": 4096}
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def _nothing_is_remembered():
    for forget in (forget_tiles, forget_choices, warn_once.cache_clear):
        forget()
    yield
    for forget in (forget_tiles, forget_choices, warn_once.cache_clear):
        forget()


def folder_of(origin, kind):
    """Where the store reads files of this origin from; made if need be."""
    folder = user_folder(kind) if origin == "user" else stores.shipped_folder(kind)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def store_text(device, entries, **fields):
    return json.dumps({"format": 1, "device": device, "entries": entries, **fields})


def tile_entry(op="dense_gemm", sizes=GEMM, tile=None, **fields):
    """An entry for the row of ``op`` as its source is now."""
    row = next(row for row in catalog().rows[op] if "triton" in row.requires.packages)
    tile = tile or {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 2, "num_stages": 4}
    entry = {"op": op, "bucket": shape_bucket(sizes), "dtype": "bfloat16", "target": row.target, "triton": "3.6", "tile": tile}
    return {**entry, "source_hash": source_hash(row.target), "us": 1.0, "heuristic_us": 2.0, **fields}


# ---- files that cannot be read as what they should be

WRONG_FILES = {
    "cut-short": store_text("h200", [tile_entry()])[:-20],
    "binary": bytes(range(256)),
    "nested-too-deep": "[" * 100_000,
    "list": "[]",
    "text": '"tiles"',
    "foreign-object": '{"name": "left-pad", "version": "1.0"}',
    "another-device": store_text("l40s", [tile_entry()]),
    "no-entries": json.dumps({"format": 1, "device": "h200"}),
    "entries-as-an-object": store_text("h200", {"dense_gemm": tile_entry()}),
    "entry-as-a-list": store_text("h200", [[1, 2]]),
    "later-format": store_text("h200", [tile_entry()], format=2),
    "field-of-a-later-version": store_text("h200", [tile_entry()], requires=["clusters"]),
}
each_origin = pytest.mark.parametrize("origin", ["user", "shipped"])
each_wrong_file = pytest.mark.parametrize("content", WRONG_FILES.values(), ids=WRONG_FILES.keys())


@each_origin
@each_wrong_file
def test_a_wrong_file_of_tiles_costs_one_warning_and_leaves_the_heuristic(content, origin):
    before = choose_tiles("dense_gemm", H200, "bfloat16", GEMM, any_triton=True)
    path = write(folder_of(origin, "tuned") / "h200.json", content)
    forget_tiles()

    with pytest.warns(StoreWarning) as caught:
        assert choose_tiles("dense_gemm", H200, "bfloat16", GEMM, any_triton=True) == before
    forget_tiles()
    assert choose_tiles("dense_gemm", H200, "bfloat16", GEMM, any_triton=True) == before  # a second warning is an error

    assert [str(path) in str(warning.message) for warning in caught] == [True]
    assert before.source.startswith("heuristic:")


@each_origin
@each_wrong_file
def test_a_wrong_file_of_evidence_costs_one_warning_and_verifies_nothing(content, origin, world):
    world.passed(world.row("native.double"))
    world.row("torch.double", fallback=True)
    path = write(folder_of(origin, "evidence") / "h200.json", content)

    with pytest.warns(StoreWarning) as caught:
        assert choose("double", device=CPU, dtype="float32").name == "native.double"  # the good file beside it still counts
    forget_choices()
    assert choose("double", device=H200, dtype="float32").name == "native.double"

    assert [str(path) in str(warning.message) for warning in caught] == [True]


@pytest.mark.parametrize("kind", ["tuned", "evidence"])
def test_a_file_of_the_other_kind_is_ignored_with_one_warning(kind, world):
    record = world.passed(world.row("native.double"), device="h200")
    (user_folder("evidence") / "h200.json").unlink()
    question = {"op": "dense_gemm", "bucket": shape_bucket(GEMM), "dtype": "bfloat16"}
    entry = asdict(record) | question if kind == "tuned" else question | {"tile": {"BLOCK_N": 64}}
    write(folder_of("user", kind) / "h200.json", store_text("h200", [entry]))

    def found():
        return load_records(), choose_tiles("dense_gemm", H200, "bfloat16", GEMM, any_triton=True).source

    with pytest.warns(StoreWarning, match="malformed") as caught:
        assert found() == ((), "heuristic:HOPPER_UP")
    forget_tiles()
    assert found() == ((), "heuristic:HOPPER_UP")

    assert len(caught) == 1


@pytest.mark.parametrize("kind", ["tuned", "evidence"])
@each_origin
def test_what_cannot_even_be_looked_at_costs_one_warning(kind, origin):
    folder = folder_of(origin, kind)
    loop, directory = folder / "a100.json", folder / "h200.json"
    loop.symlink_to(loop)
    directory.mkdir()

    with pytest.warns(StoreWarning) as caught:
        assert read_stores(kind) == ()
    assert read_stores(kind) == ()

    told = sorted(str(warning.message).split(" ")[0] for warning in caught)
    assert told == [str(loop), str(directory)]


def test_a_file_that_is_not_there_is_no_reason_to_warn(tmp_path):
    assert read_entries(tmp_path / "h200.json") is None


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"target": 7}, id="number-as-target"),
        pytest.param({"target": "kernel_specless:f"}, id="target-made-by-hand"),
        pytest.param({"target": "kernel_broken:double"}, id="source-that-does-not-parse"),
        pytest.param({"tile": []}, id="list-as-tile"),
        pytest.param({"tile": {"BLOCK_N": [64]}}, id="list-as-knob"),
        pytest.param({"clusters": 2}, id="field-of-a-later-version"),
        pytest.param({"source_hash": None, "target": None}, id="nothing-as-target"),
    ],
)
def test_a_malformed_entry_of_tiles_costs_one_warning_that_names_the_file(fields, world):
    world.module("kernel_broken", "def double(x:\n")
    world.monkeypatch.setitem(sys.modules, "kernel_specless", ModuleType("kernel_specless"))
    entry = {"op": "dense_gemm", "bucket": shape_bucket(GEMM), "dtype": "bfloat16", "target": world.module("kernel_sound")}
    entry |= {"source_hash": source_hash(entry["target"]), "triton": "3.6", "tile": {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}}
    path = folder_of("user", "tuned") / "h200.json"
    write(path, store_text("h200", [entry]))
    assert choose_tiles("dense_gemm", H200, "bfloat16", GEMM, any_triton=True).source == "store:user"
    write(path, store_text("h200", [{**entry, **fields}]))
    forget_tiles()

    with pytest.warns(StoreWarning, match="tiles of dense_gemm are malformed") as caught:
        assert choose_tiles("dense_gemm", H200, "bfloat16", GEMM, any_triton=True).source == "heuristic:HOPPER_UP"
    assert [str(path) in str(warning.message) for warning in caught] == [True]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0], ids=str)
@pytest.mark.parametrize("field", ["seconds", "latencies_us"])
def test_a_record_with_a_time_that_cannot_be_is_malformed(field, value, world):
    # Such a latency sorts first, or anywhere.
    bucket = latency_key(CONTRACT, "float32", {"num_tokens": 1, "d": 4096})
    world.passed(world.row("native.double"), **{field: {bucket: value} if field == "latencies_us" else value})

    with pytest.warns(StoreWarning, match="1 of 1 records are malformed"):
        assert load_records() == ()


@pytest.mark.skipif(
    not is_installed("triton") or os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available(),
    reason="runs kernels in Triton's interpreter",
)
@each_origin
@each_wrong_file
def test_outputs_are_the_same_bits_beside_a_wrong_file(content, origin):
    row = next(row for row in catalog().rows["swiglu"] if "triton" in row.requires.packages)
    gate_up = torch.randn(3, 600)
    before = load_target(row)(gate_up, out=torch.empty(3, 300)).clone()
    write(folder_of(origin, "tuned") / "h200.json", content)
    forget_tiles()

    with pytest.warns(StoreWarning):
        after = load_target(row)(gate_up, out=torch.empty(3, 300))

    assert torch.equal(before, after)


# ---- groups of scales


@each_origin
def test_a_stored_tile_that_cuts_a_group_is_refused_wherever_it_lies(origin):
    write(folder_of(origin, "tuned") / "h200.json", store_text("h200", [tile_entry()]))

    def asked(multiple):
        return choose_tiles("dense_gemm", H200, "bfloat16", GEMM, block_k_multiple=multiple, any_triton=True)

    assert (asked(1).source, asked(32).source) == (f"store:{origin}", f"store:{origin}")
    assert asked(64).source == "heuristic:HOPPER_UP"
    assert asked(64).tile.BLOCK_K % 64 == 0


def test_a_shipped_tile_serves_where_the_users_would_cut_a_group():
    whole = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 128}
    write(folder_of("user", "tuned") / "h200.json", store_text("h200", [tile_entry()]))
    write(folder_of("shipped", "tuned") / "h200.json", store_text("h200", [tile_entry(tile=whole)]))

    choices = {
        multiple: choose_tiles("dense_gemm", H200, "bfloat16", GEMM, block_k_multiple=multiple, any_triton=True).source
        for multiple in (32, 128, 256)
    }

    assert choices == {32: "store:user", 128: "store:shipped", 256: "heuristic:HOPPER_UP"}


def test_a_stored_product_without_a_block_k_serves_no_groups():
    vector = {"BLOCK_M": 1, "BLOCK_N": 4}
    write(folder_of("user", "tuned") / "h200.json", store_text("h200", [tile_entry(tile=vector)]))

    assert choose_tiles("dense_gemm", H200, "bfloat16", GEMM, any_triton=True).source == "store:user"
    grouped = choose_tiles("dense_gemm", H200, "bfloat16", GEMM, block_k_multiple=16, any_triton=True)
    assert grouped.source == "heuristic:HOPPER_UP"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", known_devices())
def test_every_heuristic_tile_holds_whole_groups_and_fits(name, dtype):
    device, tried = device_info(name), 0
    for sizes in serving_sizes("dense_gemm"):
        for multiple in (16, 32, 64, 128, 256):
            tile = resolve_tiles("dense_gemm", device=device, dtype=dtype, block_k_multiple=multiple, **sizes)
            assert tile.BLOCK_K % multiple == 0
            assert fits("dense_gemm", tile, device, dtype, sizes)
            tried += 1
    assert tried > 100


# ---- what fits


def asked_sizes(op, sizes):
    """The sizes that may be part of a question for a tile of ``op``."""
    _, needed, others = tile_policy._HEURISTICS[op]
    return {name: value for name, value in sizes.items() if name in (*needed, *others)}


@pytest.mark.case("D1")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", tiled_ops())
def test_every_heuristic_tile_fits_every_device_at_serving_sizes(op, dtype):
    for device in map(device_info, known_devices()):
        for sizes in serving_sizes(op):
            asked = asked_sizes(op, sizes)
            choice = choose_tiles(op, device, dtype, asked)
            assert choice.source.startswith("heuristic:")
            assert fits(op, choice.tile, device, dtype, asked), (device.name, asked, choice.tile)


@pytest.mark.case("D1")
@each_origin
def test_a_stored_tile_past_the_shared_memory_is_refused_wherever_it_lies(origin):
    large = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}
    for name in ("h200", "rtx5090"):
        write(folder_of(origin, "tuned") / f"{name}.json", store_text(name, [tile_entry(tile=large)]))

    assert choose_tiles("dense_gemm", H200, "bfloat16", GEMM, any_triton=True).source == f"store:{origin}"
    with pytest.warns(StoreWarning, match=r"rtx5090\.json.*too large for the shared memory of rtx5090"):
        choice = choose_tiles("dense_gemm", device_info("rtx5090"), "bfloat16", GEMM, any_triton=True)
    assert choice.source == "heuristic:PRE_HOPPER"


ATTENTION = ("flash_decoding", "flashattention2_nopad")


@pytest.mark.case("D3")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("op", ATTENTION)
def test_a_card_with_64_kib_gets_attention_tiles_that_fit_it(op, head_dim, dtype):
    # A card that meets every need of the native rows but has the shared memory of the smallest.
    card = replace(device_info("a100"), name="small", smem=65_536)
    for q_len in (1, 16, 64, 8192):
        sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": head_dim, "page_size": 16, "q_len": q_len}
        tile = choose_tiles(op, card, dtype, sizes).tile
        assert smem_bytes(op, tile, dtype, sizes) <= 65_536, (tile, sizes)


@pytest.mark.case("D3")
@pytest.mark.parametrize("head_dim", [128, 256, 512])
@pytest.mark.parametrize("op", ATTENTION)
def test_attention_on_a_t4_is_decided_when_it_is_asked_for_and_every_no_has_its_reason(op, head_dim, monkeypatch):
    phase = catalog().contract(op).phase
    chosen = choose(op, phase, device=T4, dtype="float16", head_dim=head_dim)
    told = {entry["name"]: " ".join(entry["reasons"]) for entry in explain(op, device=T4, sizes={"head_dim": head_dim}).rejected}

    assert chosen.fallback  # an architecture that no native row claims is not "supported" and then fails at the first request
    assert "needs sm80 or later, t4 is sm75" in told[f"triton.{op}"]
    if head_dim == 512:
        assert "serves head_dim 1..256, asked for 512" in told[f"triton.{op}"]
    monkeypatch.setenv("RAPID_KERNELS", f"{op}=triton.{op}")
    with pytest.raises(ConfigError, match=rf"triton\.{op}.*t4.*sm80"):
        dispatch(op, phase, device=T4, dtype="float16", head_dim=head_dim)


@pytest.mark.case("D3")
def test_a_need_for_shared_memory_is_told_with_the_limit_when_nothing_else_serves(world):
    world.passed(world.row("native.double", requires=CapabilityRequirement(min_smem=98_304)), device="h200")
    card = replace(device_info("a100"), name="small", smem=65_536)

    assert choose("double", device=device_info("a100"), dtype="float32", d=256).name == "native.double"
    with pytest.raises(NoKernelError) as told:
        dispatch("double", device=card, dtype="float32", d=256)
    for part in ("double on small", "d=256", "native.double: needs 98,304 bytes of shared memory", "small has 65,536"):
        assert part in str(told.value)


# ---- one tile, one binary

COUNTS = (1, 2, 3, 15, 16, 17, 31, 32, 48, 64)


@pytest.mark.case("C1")
@pytest.mark.parametrize("op", tiled_ops())
def test_counts_of_one_bucket_share_their_tile_so_that_none_compiles_anew(op):
    asked = asked_sizes(op, serving_sizes(op)[-1])
    varied = [name for name in ("num_tokens", "num_seqs", "q_len", "kv_len") if name in asked]
    assert varied
    for count in varied:
        by_bucket = {}
        for value in COUNTS:
            sizes = {**asked, count: value}
            tile = resolve_tiles(op, device=H200, dtype="bfloat16", **sizes)
            by_bucket.setdefault(shape_bucket(sizes), set()).add(tile)
        assert len(by_bucket) == len({1 << (value - 1).bit_length() for value in COUNTS})
        assert all(len(tiles) == 1 for tiles in by_bucket.values()), count


@pytest.mark.case("C1")
@each_origin
def test_a_stored_tile_serves_every_count_of_its_bucket_and_no_other(origin):
    stored = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}
    entry = tile_entry(sizes={"num_tokens": 32, "n": 4096, "k": 4096}, tile=stored)
    write(folder_of(origin, "tuned") / "h200.json", store_text("h200", [entry]))

    tiles = {
        tokens: choose_tiles("dense_gemm", H200, "bfloat16", {"num_tokens": tokens, "n": 4096, "k": 4096}, any_triton=True).tile
        for tokens in COUNTS
    }

    assert {tokens for tokens, tile in tiles.items() if tile == Tile(**stored)} == {17, 31, 32}


# ---- what ships

REFRESH = {"tuned": "python -m benchmarks.kernels.tune_tiles", "evidence": "make test-gpu"}
DEFECTS = {
    "malformed": "has another shape than this version reads",
    "device": "is of no known device",
    "op": "is of an op or a row that is not there",
    "stale": "was taken on another source",
    "size": "does not fit its device",
}


def defects_of(kind, path):
    """What is wrong with a shipped file, a sentence each, with the command that makes it anew."""
    entries = read_entries(path)
    if entries is None:
        return [f"{path.name} cannot be read; run {REFRESH[kind]}"]
    check = _tile_defect if kind == "tuned" else _record_defect
    found = []
    if path.stem not in known_devices():
        found.append(f"{path.name} {DEFECTS['device']}; run {REFRESH[kind]}")
    keys = [_key(kind, entry) for entry in entries]
    for entry, key in zip(entries, keys, strict=True):
        defect = "malformed" if keys.count(key) > 1 else check(entry, path.stem)
        if defect:
            found.append(f"{path.name}: {key} {DEFECTS[defect]}; run {REFRESH[kind]}")
    return found


def _key(kind, entry):
    names = ("op", "bucket", "dtype", "triton") if kind == "tuned" else ("op", "row", "source_hash", "toolchain")
    return " ".join(str(entry.get(name)) for name in names)


def _is_stale(target, recorded):
    return source_hash(target) != recorded


def _record_defect(entry, device):
    record = _read_record(entry)
    if record is None or record.failure or not record.cases.get("count"):
        return "malformed"
    if record.device != device:
        return "device"
    row = next((row for row in catalog().all_rows() if (row.name, row.op) == (record.row, record.op)), None)
    if row is None or row.fallback:
        return "op"
    return "stale" if _is_stale(row.target, record.source_hash) else None


def _tile_defect(entry, device):
    op = entry.get("op")
    if op not in tiled_ops() or entry.get("target") not in {row.target for row in catalog().rows[op]}:
        return "op"
    try:
        tile = tile_policy._read_tile(entry["tile"])
        sizes = {name: int(value) for name, _, value in (part.partition("=") for part in entry["bucket"].split(","))}
        versioned = re.fullmatch(r"\d+\.\d+", entry["triton"])
        tile_policy._checked(op, entry["dtype"], sizes, 1)
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError):
        return "malformed"
    if not versioned or shape_bucket(sizes) != entry["bucket"] or set(entry) - tile_policy.ENTRY_FIELDS:
        return "malformed"
    if _is_stale(entry["target"], entry["source_hash"]):
        return "stale"
    known = device in known_devices()
    return "size" if known and not fits(op, tile, device_info(device), entry["dtype"], sizes) else None


@pytest.mark.parametrize("kind", ["tuned", "evidence"])
def test_every_shipped_entry_is_sound_and_of_the_source_as_it_is(kind):
    found = [defect for path in sorted((SHIPPED / kind).glob("*.json")) for defect in defects_of(kind, path)]

    assert not found, "\n".join(found)


def test_every_shipped_tile_is_the_one_that_is_taken(monkeypatch):
    monkeypatch.setattr(stores, "shipped_folder", lambda kind: SHIPPED / kind)
    for path in sorted((SHIPPED / "tuned").glob("*.json")):
        for entry in read_entries(path):
            sizes = {name: int(value) for name, _, value in (part.partition("=") for part in entry["bucket"].split(","))}
            choice = choose_tiles(entry["op"], device_info(path.stem), entry["dtype"], sizes, any_triton=True)
            assert choice.source == "store:shipped", entry


@pytest.mark.parametrize(
    ("fields", "defect"),
    [
        pytest.param({}, None, id="sound"),
        pytest.param({"source_hash": "f" * 64}, "stale", id="stale"),
        pytest.param({"op": "no_such_op"}, "op", id="op"),
        pytest.param({"target": "rapid_llm.kernels.ops.gemm.gone:f"}, "op", id="target"),
        pytest.param({"tile": {"BLOCK_M": 33}}, "malformed", id="tile"),
        pytest.param({"tile": {"BLOCK_M": 256, "BLOCK_N": 256, "BLOCK_K": 256}}, "size", id="too-large"),
        pytest.param({"bucket": "k=4096,n=4096,num_tokens=500"}, "malformed", id="bucket-that-is-none"),
        pytest.param({"bucket": "k=4096,num_tokens=512"}, "malformed", id="size-left-out"),
        pytest.param({"triton": None}, "malformed", id="no-triton"),
        pytest.param({"dtype": "float8"}, "malformed", id="dtype"),
        pytest.param({"note": "fast"}, "malformed", id="unknown-field"),
    ],
)
def test_the_check_of_shipped_tiles_sees_a_planted_defect(fields, defect, tmp_path):
    path = write(tmp_path / "h200.json", store_text("h200", [{**tile_entry(), **fields}]))

    found = defects_of("tuned", path)

    assert len(found) == (defect is not None)
    assert all(DEFECTS[defect] in told and "python -m benchmarks.kernels.tune_tiles" in told for told in found)


def test_the_check_of_shipped_files_sees_an_unknown_device_a_double_and_a_torn_file(tmp_path):
    unknown = write(tmp_path / "h20.json", store_text("h20", []))
    double = write(tmp_path / "h200.json", store_text("h200", [tile_entry(), tile_entry()]))
    torn = write(tmp_path / "b200.json", "{")

    assert DEFECTS["device"] in defects_of("tuned", unknown)[0]
    assert len(defects_of("tuned", double)) == 2
    with pytest.warns(StoreWarning):
        assert "cannot be read" in defects_of("evidence", torn)[0]


@pytest.mark.parametrize(
    ("fields", "defect"),
    [
        pytest.param({}, None, id="sound"),
        pytest.param({"source_hash": "f" * 64}, "stale", id="stale"),
        pytest.param({"row": "triton.gone"}, "op", id="row"),
        pytest.param({"failure": "a: wrong"}, "malformed", id="failed"),
        pytest.param({"device": "l40s"}, "device", id="another-device"),
        pytest.param({"cases": {"count": 0, "ids": []}}, "malformed", id="no-case-ran"),
    ],
)
def test_the_check_of_shipped_evidence_sees_a_planted_defect(fields, defect, tmp_path):
    entry = read_entries(SHIPPED / "evidence" / "h200.json")[0]
    path = write(tmp_path / "h200.json", store_text("h200", [{**entry, **fields}]))

    found = defects_of("evidence", path)

    assert len(found) == (defect is not None)
    assert all(DEFECTS[defect] in told for told in found)


# ---- latencies rank, evidence decides


def ranked(device=CPU, here=True):
    """Names of the eligible rows, best first, and the latencies that they were ranked by."""
    question = ranking.Question("double", device, "float32", {}, here=here)
    return {verdict.row.name: verdict.latency_us for verdict in ranking.rank(question, catalog(), load_records()).eligible}


BUCKET = latency_key(CONTRACT, "float32", {"num_tokens": 1, "d": 4096})


@pytest.fixture
def fast_and_slow(world):
    """Two rows verified here with a latency each, and a fallback."""
    world.row("torch.double", fallback=True)
    records = {}
    for name, latency in (("slow.double", 20.0), ("fast.double", 10.0)):
        records[name] = world.passed(world.row(name), latencies_us={BUCKET: latency})
    assert ranked() == {"fast.double": 10.0, "slow.double": 20.0, "torch.double": None}
    return records


def test_the_fastest_row_is_gone_once_its_check_fails_and_back_once_it_passes(fast_and_slow):
    failed = replace(fast_and_slow["fast.double"], failure="float32-d=5: out: 1 of 5 elements off")
    record_run(failed)
    forget_choices()

    assert list(ranked()) == ["slow.double", "torch.double"]
    assert choose("double", device=CPU, dtype="float32").name == "slow.double"

    (user_folder("evidence") / "cpu.json").unlink()
    for record in fast_and_slow.values():
        record_run(record)
    assert next(iter(ranked())) == "fast.double"


def test_the_fastest_row_is_gone_once_its_source_changes(fast_and_slow, world):
    world.module("kernel_fast_double", "def double(x, *, out):\n    out.copy_(x + x)\n    return out\n")
    forget_choices()

    assert list(ranked()) == ["slow.double", "torch.double"]


def test_all_rows_gone_leaves_the_fallback_without_their_latencies(fast_and_slow, world):
    for name in ("slow", "fast"):
        world.module(f"kernel_{name}_double", "def double(x, *, out):\n    return out\n")

    assert ranked() == {"torch.double": None}


def test_a_best_latency_of_another_device_or_triton_does_not_rank(world, monkeypatch):
    monkeypatch.setattr(ranking, "is_installed", lambda _: True)
    monkeypatch.setattr(ranking, "triton_minor", lambda: "3.9")
    needs = CapabilityRequirement(device_types=("cuda", "cpu"), packages=("triton",))
    versions = {"torch": "2.13.0", "triton": "3.9", "python": "3.11.7"}
    world.passed(world.row("here.double", requires=needs), toolchain=versions, latencies_us={BUCKET: 30.0})
    world.passed(world.row("older.double", requires=needs), toolchain={**versions, "triton": "3.6"}, latencies_us={BUCKET: 1.0})
    world.passed(world.row("elsewhere.double", requires=needs), device="h200", toolchain=versions, latencies_us={BUCKET: 0.5})

    assert list(ranked().items()) == [("here.double", 30.0), ("elsewhere.double", None), ("older.double", None)]


def test_a_latency_in_a_record_of_another_op_or_row_is_nobodys(world):
    row = world.row("slow.double")
    world.passed(row, latencies_us={BUCKET: 20.0})
    other = world.passed(row, latencies_us={BUCKET: 1.0})
    (user_folder("evidence") / "cpu.json").unlink()
    record_run(replace(other, latencies_us={BUCKET: 20.0}))
    record_run(replace(other, row="fast.double"))
    record_run(replace(other, op="triple"))

    assert ranked() == {"slow.double": 20.0}
    assert len(load_records()) == 3
    assert all(isinstance(record, EvidenceRecord) for record in load_records())
