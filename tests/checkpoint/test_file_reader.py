import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.checkpoint import file_reader
from rapid_llm.checkpoint.file_reader import WINDOW_BYTES, FileReader, TensorFiles
from rapid_llm.checkpoint.safetensors import SafetensorsCheckpoint
from rapid_llm.checkpoint.source import TensorInfo
from rapid_llm.errors import CheckpointError
from tests.checkpoint.writers import write_folder

CONTENT = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("reader") / "data"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def reads(monkeypatch):
    """Every (offset, bytes) that is asked of the operating system."""
    seen = []
    read_range = file_reader.read_range

    def counted(fd, offset, target):
        seen.append((offset, len(target)))
        return read_range(fd, offset, target)

    monkeypatch.setattr(file_reader, "read_range", counted)
    return seen


ranges = st.tuples(st.integers(0, 5000), st.integers(0, 5000)).map(sorted)


@given(asked=st.lists(ranges, max_size=20), ahead=st.integers(1, 6000))
@settings(deadline=None)
def test_any_range_in_any_order_is_what_the_file_holds(file, asked, ahead):
    reader = FileReader(file)
    views = [(start, end, reader.view(start, end - start, ahead=ahead)) for start, end in asked]
    reader.close()
    for start, end, view in views:  # earlier views outlive later ones and the file
        assert view.tobytes() == CONTENT[start:end]


@given(cuts=st.lists(st.integers(0, 5000), max_size=30).map(sorted), ahead=st.integers(1, 6000))
@settings(deadline=None)
def test_reading_in_file_order_asks_for_each_byte_once(file, cuts, ahead):
    seen = []
    reader = FileReader(file)
    reader._fill = lambda target, offset: seen.append((offset, len(target)))
    for start, end in zip([0, *cuts], [*cuts, 5000], strict=True):
        reader.view(start, end - start, ahead=ahead)
    reader.close()
    assert sum(length for _, length in seen) == 5000
    assert [offset for offset, _ in seen] == list(np.cumsum([0, *(length for _, length in seen)])[:-1])


@pytest.mark.case("J3")
def test_a_sharded_folder_is_read_in_large_sequential_reads_each_byte_once(tmp_path, reads):
    big = np.zeros((4096, 2500), np.float32)  # 41 MB: larger than a window
    small = np.zeros(64, np.float32)
    tensors = {"a": small, "b": big, "c": small, "d": small, "e": big, "f": small}
    source = SafetensorsCheckpoint(write_folder(tmp_path, tensors=tensors, num_shards=2))
    for name in source.tensors:
        source.read(name)
    source.close()

    sizes = [file.stat().st_size for file in sorted(tmp_path.glob("*.safetensors"))]
    assert sum(length for _, length in reads) == sum(sizes)
    headers, data = reads[:2], reads[2:]
    assert [offset for offset, _ in headers] == [0, 0]
    assert all(length >= WINDOW_BYTES or offset + length in sizes for offset, length in data)  # large, or up to the end
    assert len(data) == 4


@pytest.mark.case("J3")
def test_only_the_shard_that_is_read_keeps_a_window(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(b"x" * 100)
    files = TensorFiles()
    infos = [TensorInfo(name, (100,), "float32", tmp_path / name, 100, 0) for name in ("one", "two")]
    view = files.raw(infos[0])
    files.raw(infos[1])
    assert len(files.open(tmp_path / "one")._window) == 0
    assert view.tobytes() == b"x" * 100
    files.close()


def test_short_reads_of_the_system_are_gone_on_with(file, monkeypatch):
    read_range = file_reader.read_range
    monkeypatch.setattr(file_reader, "read_range", lambda fd, offset, target: read_range(fd, offset, target[:7]))
    reader = FileReader(file)
    assert reader.view(3, 1000).tobytes() == CONTENT[3:1003]
    reader.close()


def test_a_range_past_the_end_is_refused_by_file_and_size(file):
    reader = FileReader(file)
    with pytest.raises(CheckpointError, match=r"data is truncated: got 5,000 bytes, wanted 5,001"):
        reader.view(1, 5000)
    reader.close()


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    reader = FileReader(path)
    path.write_bytes(CONTENT[:100])
    with pytest.raises(CheckpointError, match="was cut while it was read: got its end at byte 100"):
        reader.view(0, 5000)
    reader.close()


def test_a_closed_reader_never_reads_another_file(file):
    reader = FileReader(file)
    number = reader._fd
    reader.close()
    with file.open("rb") as other:
        assert other.fileno() == number  # the system hands the number out again
        with pytest.raises(CheckpointError, match="cannot be read"):
            reader.view(0, 10)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere cannot be opened: got No such file"):
        FileReader(tmp_path / "nowhere")
