import struct

import gguf as oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.checkpoint.embedded import find_embedded_model
from rapid_llm.checkpoint.ggml_types import BLOCK_TYPES, dequantise
from rapid_llm.checkpoint.gguf_header import FIRST_READ
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.errors import CheckpointError
from tests.checkpoint.writers import (
    F16,
    F32,
    HEAD_DIM,
    HIDDEN,
    Q4_1,
    Q8_0,
    Gguf,
    GgufTensor,
    gguf_metadata,
    llama_gguf,
    llama_tensors,
)

QUANTISED = [pytest.param("Q4_1", id="Q4_1"), pytest.param("Q8_0", id="Q8_0")]


def oracle_type(name):
    return oracle.GGMLQuantizationType[name]


def save(tmp_path, file: Gguf | bytes):
    path = tmp_path / "model.gguf"
    path.write_bytes(file if isinstance(file, bytes) else file.to_bytes())
    return path


def refusal_of(path):
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(path)
    assert "model.gguf" in str(refusal.value)
    return str(refusal.value)


# --- values ---


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize(
    "num_blocks", [pytest.param(1, id="one"), pytest.param(4096, id="a-chunk"), pytest.param(9001, id="ragged")]
)
def test_blocks_are_dequantised_bit_for_bit_as_by_the_gguf_package(name, num_blocks):
    kind = BLOCK_TYPES[name]
    blocks = np.random.default_rng(0).integers(0, 256, (num_blocks, kind.block_bytes), dtype=np.uint8)
    blocks[:, 1 : 2 if name == "Q8_0" else 4 : 2] &= 0xBF  # finite scales of either sign: NaN payloads are nobody's promise
    expected = oracle.dequantize(blocks, oracle_type(name))
    actual = dequantise(blocks, kind)
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", QUANTISED)
def test_infinite_scales_pass_through_without_a_warning(name):
    kind = BLOCK_TYPES[name]
    blocks = np.zeros((2, kind.block_bytes), np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    assert np.isnan(dequantise(blocks, kind)).any()


@pytest.mark.real_model
def test_every_tensor_of_the_embedded_model_equals_the_gguf_package_bit_for_bit():
    source = open_checkpoint(find_embedded_model())
    stored = {tensor.name: tensor for tensor in oracle.GGUFReader(find_embedded_model()).tensors}
    assert len(source.tensors) == len(stored) == 272
    parts = {"q_proj": ("attn_q", 9), "k_proj": ("attn_k", 3), "v_proj": ("attn_v", 0), "o_proj": ("attn_output", 0)}
    parts |= {"gate_proj": ("ffn_gate", 0), "up_proj": ("ffn_up", 0), "down_proj": ("ffn_down", 0)}
    parts |= {"input_layernorm": ("attn_norm", 0), "post_attention_layernorm": ("ffn_norm", 0)}
    for name in source.tensors:
        if ".layers." not in name:
            gguf_name, heads = (
                {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name],
                0,
            )
        else:
            part, heads = parts[name.split(".")[-2]]
            gguf_name = f"blk.{name.split('.')[2]}.{part}.weight"
        expected = oracle.dequantize(stored[gguf_name].data, stored[gguf_name].tensor_type)
        if heads:  # stored (head, pair, half): wanted (head, half, pair)
            expected = expected.reshape(heads, 32, 2, -1).transpose(0, 2, 1, 3).reshape(expected.shape)
        np.testing.assert_array_equal(source.read(name).view(np.uint32), expected.view(np.uint32), err_msg=name)


@pytest.mark.case("J10")
@pytest.mark.parametrize(
    ("type_id", "type_name", "least_cosine"),
    [
        pytest.param(F32, "F32", 1.0 - 1e-12, id="F32"),
        pytest.param(F16, "F16", 0.999, id="F16"),
        pytest.param(Q8_0, "Q8_0", 0.999, id="Q8_0"),
        pytest.param(Q4_1, "Q4_1", 0.99, id="Q4_1"),
    ],
)
def test_permuted_q_and_k_rows_come_back_in_hugging_face_order(tmp_path, type_id, type_name, least_cosine):
    def quantise(rows):
        return oracle.quantize(rows, oracle_type(type_name))

    tensors = llama_tensors()
    source = open_checkpoint(save(tmp_path, llama_gguf(tensors, type_id, quantise)))
    assert set(source.tensors) == set(tensors)
    for name, original in tensors.items():
        one, other = source.read(name).astype(np.float64).ravel(), original.astype(np.float64).ravel()
        assert source.tensors[name].shape == original.shape
        assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) >= least_cosine, name


@pytest.mark.case("J10")
def test_permuted_biases_come_back_too_and_switch_biases_on(tmp_path):
    bias = np.arange(4 * HEAD_DIM, dtype=np.float32)
    tensors = llama_tensors() | {"model.layers.0.self_attn.q_proj.bias": bias}
    source = open_checkpoint(save(tmp_path, llama_gguf(tensors)))
    np.testing.assert_array_equal(source.read("model.layers.0.self_attn.q_proj.bias"), bias)
    assert source.config.attention_bias
    assert not source.config.mlp_bias


def test_the_head_in_the_file_decides_on_tied_embeddings(tmp_path):
    tensors = llama_tensors()
    assert open_checkpoint(save(tmp_path, llama_gguf(tensors))).config.tie_word_embeddings
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    source = open_checkpoint(save(tmp_path, llama_gguf(tensors)))
    assert not source.config.tie_word_embeddings
    np.testing.assert_array_equal(source.read("lm_head.weight"), tensors["lm_head.weight"])


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_versions_and_alignments_are_followed(tmp_path, version, alignment):
    file = llama_gguf(llama_tensors())
    file.version, file.alignment = version, alignment
    source = open_checkpoint(save(tmp_path, file))
    for name, original in llama_tensors().items():
        np.testing.assert_array_equal(source.read(name), original)


def test_a_header_longer_than_the_first_read_is_read_on(tmp_path):
    file = llama_gguf(llama_tensors(), **{"general.description": "x" * (FIRST_READ + 17), "general.more": "y"})
    source = open_checkpoint(save(tmp_path, file))
    assert source.tokenizer_source.metadata["general.more"] == "y"
    np.testing.assert_array_equal(source.read("model.norm.weight"), llama_tensors()["model.norm.weight"])


def test_metadata_of_every_type_is_read(tmp_path):
    file = llama_gguf(llama_tensors(), **{"x.flag": True, "x.numbers": [1, -2], "x.texts": ["é", ""]})
    file.raw_metadata = {
        "x.u8": (0, b"\xff"),
        "x.i8": (1, b"\xff"),
        "x.u16": (2, b"\xff\xff"),
        "x.i16": (3, b"\xff\xff"),
        "x.i32": (5, struct.pack("<i", -7)),
        "x.u64": (10, struct.pack("<Q", 2**63)),
        "x.i64": (11, struct.pack("<q", -(2**62))),
        "x.f64": (12, struct.pack("<d", 0.1)),
    }
    metadata = open_checkpoint(save(tmp_path, file)).tokenizer_source.metadata
    values = {key[2:]: value for key, value in metadata.items() if key.startswith("x.")}
    assert values.pop("numbers").tolist() == [1, -2]
    assert values == {
        "flag": True,
        "texts": ["é", ""],
        "u8": 255,
        "i8": -1,
        "u16": 65535,
        "i16": -1,
        "i32": -7,
        "u64": 2**63,
        "i64": -(2**62),
        "f64": 0.1,
    }


# --- refusals ---


@pytest.mark.parametrize(
    ("type_id", "type_name"),
    [(2, "Q4_0"), (12, "Q4_K"), (14, "Q6_K"), (30, "BF16"), (26, "I32"), (39, "MXFP4"), (1000, "number 1000")],
)
def test_an_unsupported_tensor_type_is_refused_by_its_name(tmp_path, type_id, type_name):
    file = Gguf(gguf_metadata(), [GgufTensor("blk.0.attn_q.weight", (64, 64), type_id, b"\0" * 9000)])
    message = refusal_of(save(tmp_path, file))
    assert (
        f"tensor 'blk.0.attn_q.weight' is of a type that is not supported: got {type_name}, wanted F32 | F16 | Q4_1 | Q8_0"
        in message
    )


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "blk.00.attn_q.weight", "blk.x.attn_q.weight", "v.patch.weight", ""])
def test_an_unknown_tensor_is_refused_by_name(tmp_path, name):
    file = Gguf(gguf_metadata(), [GgufTensor(name, (4,), F32, b"\0" * 16)])
    assert f"tensor {name!r} is unknown" in refusal_of(save(tmp_path, file))


def test_scaled_rotary_frequencies_are_refused_as_a_rope_type(tmp_path):
    file = Gguf(gguf_metadata(), [GgufTensor("rope_freqs.weight", (4,), F32, b"\0" * 16)])
    assert "got rope type llama3, wanted rope type default" in refusal_of(save(tmp_path, file))


def test_a_tensor_that_stands_twice_is_refused(tmp_path):
    one = GgufTensor("output_norm.weight", (4,), F32, b"\0" * 16)
    assert "'output_norm.weight' stands twice" in refusal_of(save(tmp_path, Gguf(gguf_metadata(), [one, one])))


def test_a_part_of_a_split_file_is_refused(tmp_path):
    file = llama_gguf(llama_tensors(), **{"split.count": 3})
    assert "got one of 3 parts" in refusal_of(save(tmp_path, file))


def head(num_tensors=0, num_entries=0, version=3, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + rest


def entry(key, code, data):
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", code) + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "passes byte 8", id="empty"),
        pytest.param(b"GGUF", "passes byte 8", id="magic-only"),
        pytest.param(b"GGML" + bytes(40), "the beginning is corrupt: got b'GGML'", id="magic"),
        pytest.param(head(version=1), "version is not supported: got 1", id="old-version"),
        pytest.param(b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "(big-endian)", id="big-endian"),
        pytest.param(head(num_tensors=2**60), "the number of tensors is corrupt", id="absurd-tensors"),
        pytest.param(head(num_entries=2**60), "the number of metadata keys is corrupt", id="absurd-keys"),
        pytest.param(head(num_entries=1, rest=struct.pack("<Q", 2**63) + bytes(40)), "the header is corrupt", id="absurd-key"),
        pytest.param(
            head(num_entries=1, rest=entry(b"k", 8, struct.pack("<Q", 2**64 - 1)) + bytes(9)), "the header is", id="text"
        ),
        pytest.param(
            head(num_entries=1, rest=entry(b"k", 9, struct.pack("<IQ", 8, 2**61)) + bytes(9)),
            "number of entries of 'k'",
            id="texts",
        ),
        pytest.param(
            head(num_entries=1, rest=entry(b"k", 9, struct.pack("<IQ", 4, 2**62)) + bytes(9)),
            "number of entries of 'k'",
            id="numbers",
        ),
        pytest.param(
            head(num_entries=1, rest=entry(b"k", 9, struct.pack("<IQ", 9, 1)) + bytes(9)), "element type of key 'k'", id="nested"
        ),
        pytest.param(
            head(num_entries=1, rest=entry(b"k", 77, bytes(20))), "the type of key 'k' is corrupt: got 77", id="value-type"
        ),
        pytest.param(head(num_entries=1, rest=entry(b"\xff", 0, bytes(20))), "the text of a metadata key", id="key-not-utf8"),
        pytest.param(head(num_entries=2, rest=2 * entry(b"k", 0, b"\1")), "key 'k' twice", id="key-twice"),
        pytest.param(
            Gguf(gguf_metadata(**{"general.alignment": 12})).to_bytes(),
            "key 'general.alignment' is corrupt: got 12",
            id="alignment",
        ),
        pytest.param(
            Gguf(gguf_metadata(**{"general.alignment": [1, 2]})).to_bytes(),
            "key 'general.alignment' is corrupt",
            id="alignment-array",
        ),
        pytest.param(
            Gguf(gguf_metadata(), [GgufTensor("output_norm.weight", (2**62, 2**62), F32, b"")]).to_bytes(),
            "the shape of",
            id="shape",
        ),
        pytest.param(
            Gguf(gguf_metadata(), [GgufTensor("output_norm.weight", (0,), F32, b"")]).to_bytes(), "the shape of", id="size-0"
        ),
        pytest.param(
            Gguf(gguf_metadata(), [GgufTensor("output_norm.weight", (1,) * 5, F32, b"")]).to_bytes(),
            "number of dimensions",
            id="dims",
        ),
        pytest.param(
            Gguf(gguf_metadata(), [GgufTensor("output.weight", (4, 33), Q8_0, bytes(200))]).to_bytes(),
            "broken blocks",
            id="blocks",
        ),
        pytest.param(
            Gguf(gguf_metadata(), [GgufTensor("output_norm.weight", (2**40,), F32, b"")]).to_bytes(),
            "is truncated",
            id="out-of-file",
        ),
    ],
)
def test_a_corrupt_header_is_refused_by_what_is_wrong(tmp_path, content, message):
    assert message in refusal_of(save(tmp_path, content))


def test_overlapping_tensors_are_refused(tmp_path):
    tensors = [GgufTensor("output_norm.weight", (16,), F32, bytes(64)), GgufTensor("output.weight", (4, 4), F32, bytes(64))]
    content = Gguf(gguf_metadata(), tensors).to_bytes()
    second_offset = struct.pack("<IQ", F32, 64)
    assert content.count(second_offset) == 1
    assert "overlaps another" in refusal_of(save(tmp_path, content.replace(second_offset, struct.pack("<IQ", F32, 32))))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A file of few bytes, so that most flips hit something: three tokens, one layer's worth of tensors."""
    short = {"tokenizer.ggml.tokens": ["a", "b", "<|end|>"], "tokenizer.ggml.token_type": [1, 1, 3], "llama.vocab_size": 3}
    tensors = [
        GgufTensor("token_embd.weight", (3, HIDDEN), Q8_0, bytes(range(204))),
        GgufTensor("blk.0.attn_q.weight", (8, 32), Q4_1, bytes(range(160))),
        GgufTensor("output_norm.weight", (4,), F32, bytes(16)),
    ]
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"
    return path, Gguf(gguf_metadata(**short, **{"tokenizer.ggml.eos_token_id": 2}), tensors).to_bytes()


def open_and_read_all(path):
    source = open_checkpoint(path)
    for name, info in source.tensors.items():
        assert source.read(name).shape == info.shape
    source.close()


def test_every_truncation_is_an_error(small):
    path, whole = small
    path.write_bytes(whole)
    open_and_read_all(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            open_and_read_all(path)


@given(data=st.data())
@settings(deadline=None, max_examples=600)
def test_flipped_bytes_give_an_error_or_a_consistent_file(small, data):
    path, whole = small
    content = bytearray(whole)
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), min_size=1, max_size=5)
    ):
        content[place] = value
    path.write_bytes(content)
    try:
        open_and_read_all(path)
    except CheckpointError:
        return
