import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.errors import CheckpointError
from tests.checkpoint.writers import llama_config, llama_tensors, safetensors_bytes, write_folder

TWO = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.float16)}


def header_and_data(data: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: dict | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def read_all(folder):
    source = open_checkpoint(folder)
    values = {name: source.read(name) for name in source.tensors}
    source.close()
    return source, values


@pytest.mark.parametrize("num_shards", [pytest.param(1, id="one-file"), pytest.param(3, id="shards-and-index")])
@pytest.mark.parametrize("dtype", [pytest.param(np.float32, id="F32"), pytest.param(np.float16, id="F16")])
def test_tensors_come_back_as_they_were_written(tmp_path, num_shards, dtype):
    tensors = llama_tensors(dtype=dtype)
    source, values = read_all(write_folder(tmp_path, tensors=tensors, num_shards=num_shards))
    assert list(values) == list(tensors)  # in file order
    for name, written in tensors.items():
        assert source.tensors[name].shape == written.shape
        assert source.tensors[name].dtype == str(np.dtype(dtype))
        np.testing.assert_array_equal(values[name], written, strict=True)


def test_bfloat16_comes_as_raw_bits(tmp_path):
    bits = np.array([[0x3F80, 0xC000], [0x7F80, 0x0001]], np.uint16)
    source, values = read_all(write_folder(tmp_path, tensors={"a": bits}))
    assert source.tensors["a"].dtype == "bfloat16"
    np.testing.assert_array_equal(values["a"], bits, strict=True)


def test_values_are_writable_so_that_torch_takes_them_without_a_warning(tmp_path):
    _, values = read_all(write_folder(tmp_path, tensors=TWO))
    assert all(array.flags.writeable and array.flags.aligned for array in values.values())


def test_an_unaligned_tensor_is_copied_into_place(tmp_path):
    write_folder(tmp_path, tensors={"a": TWO["b"], "b": TWO["a"]})
    header, data = header_and_data((tmp_path / "model.safetensors").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(with_header(json.dumps(header).encode() + b" ", data))  # an odd length
    _, values = read_all(tmp_path)
    assert values["b"].flags.aligned
    np.testing.assert_array_equal(values["b"], TWO["a"])


def test_files_of_the_safetensors_package_are_read(tmp_path):
    from safetensors.numpy import save_file

    write_folder(tmp_path)
    save_file(llama_tensors(seed=3), tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, values = read_all(tmp_path)
    for name, written in llama_tensors(seed=3).items():
        np.testing.assert_array_equal(values[name], written)


def test_an_empty_tensor_and_a_scalar_are_read(tmp_path):
    _, values = read_all(
        write_folder(tmp_path, tensors={"none": np.zeros((0, 3), np.float32), "one": np.float32([[7]]).reshape(())})
    )
    assert values["none"].shape == (0, 3)
    assert values["one"].shape == ()


def test_stored_rotary_buffers_are_left_out(tmp_path):
    tensors = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32), **TWO}
    source, _ = read_all(write_folder(tmp_path, tensors=tensors))
    assert list(source.tensors) == ["a", "b"]


def edited(tensor="a", **changes):
    def edit(data):
        header, rest = header_and_data(data)
        header[tensor] |= changes
        return with_header(header, rest)

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda data: b"", "is truncated: got 0 bytes", id="empty"),
        pytest.param(lambda data: data[:7], "is truncated: got 7 bytes", id="inside-length"),
        pytest.param(lambda data: data[:50], "is truncated or no safetensors file", id="inside-header"),
        pytest.param(lambda data: data[:-1], "is truncated or has bytes", id="one-byte-short"),
        pytest.param(lambda data: data + b"\0", "bytes that no tensor owns", id="one-byte-more"),
        pytest.param(lambda data: b"\xff" * 8 + data[8:], "a header of 18,446,744,073,709,551,615 bytes", id="absurd-header"),
        pytest.param(lambda data: with_header(b"{" * 9, b""), "not valid JSON", id="bad-json"),
        pytest.param(lambda data: with_header(b"[" * 200_000, b""), "not valid JSON", id="deep-json"),
        pytest.param(lambda data: with_header(b"\xff\xfe{}", b""), "not valid JSON", id="not-utf8"),
        pytest.param(lambda data: with_header(b"[]", b""), "holds no JSON object", id="a-list"),
        pytest.param(lambda data: with_header(b'{"a":1,"a":2}', b""), "key 'a' stands twice", id="name-twice"),
        pytest.param(
            edited(dtype="F8_E5M2"), "the dtype of tensor 'a' cannot be used: got 'F8_E5M2', wanted F32 | F16", id="dtype"
        ),
        pytest.param(edited(dtype=["F32"]), "the dtype of tensor 'a'", id="dtype-type"),
        pytest.param(edited(shape=[2, -3]), "the shape of tensor 'a'", id="negative-size"),
        pytest.param(edited(shape=[2, 3.0]), "the shape of tensor 'a'", id="float-size"),
        pytest.param(edited(shape=[2**62, 2**62]), "the data_offsets of tensor 'a'", id="absurd-shape"),
        pytest.param(edited(shape=[2, 4]), "the data_offsets of tensor 'a'", id="shape-not-of-its-bytes"),
        pytest.param(edited(data_offsets=[0]), "the data_offsets of tensor 'a'", id="one-offset"),
        pytest.param(edited(data_offsets=[24, 0]), "the data_offsets of tensor 'a'", id="backwards"),
        pytest.param(edited(data_offsets=[4, 28]), "tensor 'a' overlaps or leaves a gap", id="gap"),
        pytest.param(edited("b", data_offsets=[16, 24]), "tensor 'b' overlaps or leaves a gap", id="overlap"),
        pytest.param(edited(data_offsets=[2**40, 2**40 + 24]), "overlaps or leaves a gap", id="out-of-file"),
        pytest.param(lambda data: with_header({"a": 7}, b""), "the entry of tensor 'a'", id="entry-is-a-number"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, damage, message):
    write_folder(tmp_path, tensors=TWO)
    file = tmp_path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(tmp_path)
    assert message in str(refusal.value)
    assert "model.safetensors" in str(refusal.value)


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("fuzz"), tensors=TWO)
    return folder, (folder / "model.safetensors").read_bytes()


@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_flipped_and_cut_bytes_give_an_error_or_a_consistent_file(small_folder, data):
    folder, whole = small_folder
    content = bytearray(whole[: data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))])
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=4)):
        if place < len(content):
            content[place] = value
    (folder / "model.safetensors").write_bytes(content)
    try:
        source, values = read_all(folder)
    except CheckpointError:
        return
    assert all(values[name].shape == info.shape for name, info in source.tensors.items())


# --- shards and their index ---


@pytest.fixture
def sharded(tmp_path):
    return write_folder(tmp_path, num_shards=2)


def edit_index(folder, **changes):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] |= changes
    file.write_text(json.dumps(index))


def refusal_of(folder):
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(folder)
    return str(refusal.value)


@pytest.mark.case("J2")
def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert "names files that are not there: got model-00002-of-00002.safetensors" in refusal_of(sharded)


@pytest.mark.case("J2")
def test_a_tensor_in_two_shards_is_named_with_both(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))
    second.write_bytes(safetensors_bytes({"model.embed_tokens.weight": np.zeros(2, np.float32)}))
    message = refusal_of(sharded)
    assert "'model.embed_tokens.weight' stands twice" in message
    assert first.name in message
    assert second.name in message


@pytest.mark.case("J2")
@pytest.mark.parametrize(
    "entry",
    [
        pytest.param({"ghost.weight": "model-00001-of-00002.safetensors"}, id="in-no-file"),
        pytest.param({"model.norm.weight": "model-00001-of-00002.safetensors"}, id="in-the-other-file"),
    ],
)
def test_a_tensor_that_the_index_promises_and_its_file_lacks_is_named(sharded, entry):
    edit_index(sharded, **entry)
    assert f"names tensors that its files do not hold: got 1 not there: {next(iter(entry))}" in refusal_of(sharded)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/x.safetensors", "a\0.safetensors", "model.bin", "", 7])
def test_an_index_reaches_for_plain_safetensors_names_only(sharded, name):
    edit_index(sharded, **{"model.norm.weight": name})
    assert "tensor 'model.norm.weight' has no usable file" in refusal_of(sharded)


def test_an_index_without_a_map_is_refused(sharded):
    (sharded / "model.safetensors.index.json").write_text('{"metadata": {}}')
    assert "has no weight_map" in refusal_of(sharded)


def test_several_files_without_an_index_are_refused(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    assert "no telling which weights to load" in refusal_of(sharded)


def test_one_file_of_another_name_needs_no_index(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    source, _ = read_all(tmp_path)
    assert len(source.tensors) == len(llama_tensors())


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", '"a"', "{'a': 1}"])
def test_broken_json_beside_the_weights_is_refused_by_file(tmp_path, name, text):
    write_folder(tmp_path, config=llama_config(), generation={})
    (tmp_path / name).write_text(text)
    assert name in refusal_of(tmp_path)
