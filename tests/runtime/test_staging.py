"""Tensor data goes from files to parameters in pieces: each byte once, in large reads, a bounded number of them at a time."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.checkpoint import file_reader
from rapid_llm.checkpoint.gguf import GgufCheckpoint
from rapid_llm.checkpoint.safetensors import SafetensorsCheckpoint
from rapid_llm.checkpoint.source import TensorInfo
from rapid_llm.errors import CheckpointError
from rapid_llm.runtime.staging import PIECE_BYTES, place_pieces, plan_pieces
from tests.checkpoint.writers import Q8_0, llama_gguf, llama_tensors, write_folder

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@st.composite
def tables(draw):
    """Tensors of some files in file order, with gaps between them."""
    infos = []
    for file in range(draw(st.integers(1, 3))):
        offset = draw(st.integers(0, 100))
        for number in range(draw(st.integers(1, 6))):
            shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
            dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
            nbytes = int(np.prod(shape)) * ITEM_BYTES[dtype]
            reordered = bool(shape) and draw(st.booleans())
            infos.append(TensorInfo(f"{file}.{number}", shape, dtype, Path(f"file{file}"), nbytes, offset, reordered))
            offset += nbytes + draw(st.sampled_from([0, 0, 1, 31, 5000]))
    return infos


@given(infos=tables(), piece_bytes=st.integers(1, 20_000))
@settings(deadline=None)
def test_every_row_lies_in_one_piece_and_no_piece_is_larger_than_it_must_be(infos, piece_bytes):
    pieces = plan_pieces(infos, piece_bytes)
    by_name = {info.name: [] for info in infos}
    for piece in pieces:
        assert piece.nbytes == piece.parts[-1].offset + piece.parts[-1].nbytes - piece.offset
        for part in piece.parts:
            assert part.info.file == piece.file
            assert piece.offset <= part.offset <= part.offset + part.nbytes <= piece.offset + piece.nbytes
            by_name[part.info.name].append(part)
        # Only what cannot be cut is larger: one row, or a tensor whose rows come right all together.
        [first, *others] = piece.parts
        assert piece.nbytes <= piece_bytes or (not others and (first.info.is_reordered or first.stop - first.start <= 1))
    for info in infos:
        parts = by_name[info.name]
        row_bytes = info.nbytes // info.shape[0] if info.shape and info.shape[0] else info.nbytes
        assert sum(part.nbytes for part in parts) == info.nbytes
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == (info.shape[0] if info.shape else 1)
        assert all(part.offset == info.offset + part.start * row_bytes for part in parts)


def written(kind, tmp_path):
    tensors = llama_tensors()
    if kind == "gguf":
        path = tmp_path / "model.gguf"
        path.write_bytes(llama_gguf(tensors).to_bytes())
        return GgufCheckpoint(path)
    return SafetensorsCheckpoint(write_folder(tmp_path, tensors=tensors, num_shards=2))


def place(source, piece_bytes, threads, targets=None):
    """Load everything into NaN-filled targets, some of them transposed as a CPU keeps matrices."""
    if targets is None:
        targets = {}
        for i, (name, info) in enumerate(source.tensors.items()):
            shape = info.shape[::-1] if i % 2 and len(info.shape) == 2 else info.shape
            blank = torch.full(shape, torch.nan)
            targets[name] = blank if shape == info.shape else blank.t()
    pieces = plan_pieces(source.tensors.values(), piece_bytes)
    placed = list(place_pieces(source, pieces, targets, threads=threads))
    assert sorted(placed, key=pieces.index) == pieces
    return targets


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize("piece_bytes", [1, 300, 5000, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_whatever_the_size_of_pieces_every_value_arrives_where_it_belongs(kind, piece_bytes, threads, tmp_path):
    source = written(kind, tmp_path)
    targets = place(source, piece_bytes, threads)
    for name, original in llama_tensors().items():
        np.testing.assert_array_equal(targets[name].numpy(), original)


def test_quantised_rows_are_dequantised_piece_by_piece(tmp_path):
    import gguf as oracle

    path = tmp_path / "model.gguf"
    kind = oracle.GGMLQuantizationType.Q8_0
    path.write_bytes(llama_gguf(llama_tensors(), Q8_0, lambda rows: oracle.quants.quantize(rows, kind)).to_bytes())
    source = GgufCheckpoint(path)
    targets = place(source, 3000, 2)
    for name in source.tensors:
        np.testing.assert_array_equal(targets[name].numpy(), source.read(name))


@pytest.mark.case("J3")
def test_a_large_load_reads_each_byte_once_in_large_reads_and_holds_a_few_pieces_at_a_time(tmp_path, monkeypatch):
    big = np.zeros((4096, 5000), np.float32)  # 82 MB: larger than a piece
    source = SafetensorsCheckpoint(
        write_folder(tmp_path, tensors={"a": np.zeros(64, np.float32), "b": big, "c": big}, num_shards=2)
    )
    reads, held, most = [], [0], [0]
    lock = threading.Lock()
    read_range, fill = file_reader.read_range, source.fill

    def counted_read(fd, offset, target):
        count = read_range(fd, offset, target)
        with lock:
            reads.append(count)
        return count

    def counted_fill(file, offset, buffer):
        with lock:
            held[0] += len(buffer)
            most[0] = max(most[0], held[0])
        fill(file, offset, buffer)
        with lock:
            held[0] -= len(buffer)

    monkeypatch.setattr(file_reader, "read_range", counted_read)
    monkeypatch.setattr(source, "fill", counted_fill)
    targets = {name: torch.empty(info.shape) for name, info in source.tensors.items()}
    place(source, PIECE_BYTES, 3, targets)

    total = sum(info.nbytes for info in source.tensors.values())
    assert sum(reads) == total
    assert len(reads) <= total // PIECE_BYTES + 4  # a last, shorter piece for each tensor and file
    assert most[0] <= 3 * PIECE_BYTES


def test_a_file_that_was_cut_stops_the_load_by_name(tmp_path):
    source = written("gguf", tmp_path)
    with source.path.open("r+b") as file:
        file.truncate(source.path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model\.gguf was cut while it was read"):
        place(source, 500, 2)


def test_nothing_to_load_is_nothing_to_do(tmp_path):
    assert list(place_pieces(written("gguf", tmp_path), [], {})) == []
