import struct

import gguf as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.checkpoint.embedded import find_embedded_model
from rapid_llm.checkpoint.ggml_types import BLOCK_TYPES, CHUNK_ELEMENTS, dequantise
from rapid_llm.checkpoint.gguf_header import FIRST_READ
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.errors import CheckpointError
from rapid_llm.models.rope_scaling import RopeScaling
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
    quantised_q4_k,
    quantised_q5_k,
    quantised_q6_k,
)

SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
"""Bytes of a block at which a float16 begins."""
QUANTISED = [pytest.param(name, id=name) for name in SCALES]
HARD_SCALES = {"0": 0, "-0": 0x8000, "tiny": 1, "largest": 0x7BFF, "inf": 0x7C00, "-inf": 0xFC00, "NaN": 0x7E00, "sNaN": 0x7C01}


def as_tensor(values):
    """What ``read`` gives as a tensor: bfloat16 comes as its raw bits."""
    return torch.from_numpy(values).view(torch.bfloat16) if values.dtype == np.uint16 else torch.from_numpy(values)


def oracle_type(name):
    return oracle.GGMLQuantizationType[name]


def save(tmp_path, file: Gguf | bytes):
    path = tmp_path / "model.gguf"
    path.write_bytes(file if isinstance(file, bytes) else file.to_bytes())
    return path


def oracle_values(blocks, name):
    with np.errstate(all="ignore"):
        return oracle.dequantize(blocks, oracle_type(name))


def assert_same_bits(actual, expected):
    """Equal to the bit; a NaN equals any NaN, since payloads are nobody's promise."""
    assert actual.dtype == expected.dtype == np.float32
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(np.where(nan, 0, actual.view(np.uint32)), np.where(nan, 0, expected.view(np.uint32)))


def refusal_of(path):
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(path)
    assert "model.gguf" in str(refusal.value)
    return str(refusal.value)


# --- values ---


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize(
    ("chunks", "more"), [pytest.param(0, 1, id="one"), pytest.param(1, 0, id="a-chunk"), pytest.param(2, 7, id="ragged")]
)
def test_blocks_are_dequantised_bit_for_bit_as_by_the_gguf_package(name, chunks, more):
    kind = BLOCK_TYPES[name]
    num_blocks = chunks * (CHUNK_ELEMENTS // kind.block_elements) + more
    blocks = np.random.default_rng(0).integers(0, 256, (num_blocks, kind.block_bytes), dtype=np.uint8)
    assert_same_bits(dequantise(blocks, kind), oracle_values(blocks, name))


@pytest.mark.parametrize("name", QUANTISED)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_bytes_and_any_scales_are_dequantised_as_by_the_gguf_package(name, data):
    kind = BLOCK_TYPES[name]
    num_blocks = data.draw(st.integers(1, 3))
    size = num_blocks * kind.block_bytes
    blocks = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8).reshape(num_blocks, -1).copy()
    for place in SCALES[name]:
        scales = st.lists(st.sampled_from([*HARD_SCALES.values()]), min_size=num_blocks, max_size=num_blocks)
        blocks[:, place : place + 2] = np.array(data.draw(scales), "<u2")[:, None].view(np.uint8)
    assert_same_bits(dequantise(blocks, kind), oracle_values(blocks, name))


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("bits", [pytest.param(bits, id=name) for name, bits in HARD_SCALES.items()])
def test_hard_scales_pass_through_without_a_warning(name, bits):
    kind = BLOCK_TYPES[name]
    blocks = np.random.default_rng(1).integers(0, 256, (2, kind.block_bytes), dtype=np.uint8)
    for place in SCALES[name]:
        blocks[:, place : place + 2] = np.frombuffer(struct.pack("<H", bits), np.uint8)
    values = dequantise(blocks, kind)
    assert np.isfinite(values).all() == (bits & 0x7C00 != 0x7C00)
    assert_same_bits(values, oracle_values(blocks, name))


def test_every_bf16_number_is_loaded_bit_for_bit_as_by_the_gguf_package(tmp_path):
    numbers = np.arange(1 << 16, dtype="<u2").reshape(256, 256)
    file = Gguf(gguf_metadata(), [GgufTensor("output.weight", numbers.shape, oracle_type("BF16").value, numbers.tobytes())])
    source = open_checkpoint(save(tmp_path, file))
    raw = source.read("lm_head.weight")
    assert raw.dtype == np.uint16
    assert source.tensors["lm_head.weight"].dtype == "bfloat16"
    assert_same_bits(as_tensor(raw).float().numpy(), oracle_values(numbers.view(np.uint8), "BF16"))


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


# Rounding errors lie evenly within a step, so their mean square is step ** 2 / 12; that of the weights is 1, and the cosine falls
# short of 1 by half of the first. The bound allows twice that, for scales are rounded too. The step is what a block spans over
# the steps that the type has for it: of 32 normal numbers the largest is 2.4 on average (of 16 it is 2.1), and 4.1 lie between
# the smallest and the largest. Rows or nibbles in a wrong order give a cosine near 0, an offset of one step 6 times what is
# allowed. F16, BF16 and Q8_0 fall short by less than 0.00002: their bound only has to tell them from a wrong order.
STEPS = {
    "Q4_0": 2.4 / 8,
    "Q4_1": 4.1 / 15,
    "Q5_0": 2.4 / 16,
    "Q5_1": 4.1 / 31,
    "Q4_K": 4.1 / 15,
    "Q5_K": 4.1 / 31,
    "Q6_K": 2.1 / 31,
}
LEAST_COSINES = {"F32": 1 - 1e-12, "F16": 0.999, "BF16": 0.999, "Q8_0": 0.999}
LEAST_COSINES |= {name: 1 - step**2 / 12 for name, step in STEPS.items()}
OWN_QUANTISERS = {"Q4_K": quantised_q4_k, "Q5_K": quantised_q5_k, "Q6_K": quantised_q6_k}


@pytest.mark.case("J10")
@pytest.mark.parametrize("type_name", [pytest.param(name, id=name) for name in BLOCK_TYPES])
def test_a_file_of_each_type_is_near_its_source_with_q_and_k_rows_in_hugging_face_order(tmp_path, type_name):
    def quantise(rows):
        own = OWN_QUANTISERS.get(type_name)
        return own(rows) if own else oracle.quantize(rows, oracle_type(type_name))

    tensors = llama_tensors(hidden=256, intermediate=512, num_heads=16)
    sizes = {"llama.embedding_length": 256, "llama.feed_forward_length": 512, "llama.attention.head_count": 16}
    source = open_checkpoint(save(tmp_path, llama_gguf(tensors, oracle_type(type_name).value, quantise, **sizes)))
    assert set(source.tensors) == set(tensors)
    for name, original in tensors.items():
        info = source.tensors[name]
        assert info.shape == original.shape
        assert info.dtype == (BLOCK_TYPES[type_name].dtype if original.ndim == 2 else "float32")
        one, other = as_tensor(source.read(name)).double().numpy().ravel(), original.astype(np.float64).ravel()
        assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) >= LEAST_COSINES[type_name], name


@pytest.mark.case("J10")
def test_permuted_biases_come_back_too_and_switch_biases_on(tmp_path):
    bias = np.arange(4 * HEAD_DIM, dtype=np.float32)
    tensors = llama_tensors() | {"model.layers.0.self_attn.q_proj.bias": bias}
    source = open_checkpoint(save(tmp_path, llama_gguf(tensors)))
    np.testing.assert_array_equal(source.read("model.layers.0.self_attn.q_proj.bias"), bias)
    assert (source.config.qkv_bias, source.config.o_bias, source.config.mlp_bias) == (True, False, False)


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
    [
        (9, "Q8_1"),
        (10, "Q2_K"),
        (11, "Q3_K"),
        (16, "IQ2_XXS"),
        (20, "IQ4_NL"),
        (26, "I32"),
        (34, "TQ1_0"),
        (39, "MXFP4"),
        (1000, "number 1000"),
    ],
)
def test_an_unsupported_tensor_type_is_refused_by_its_name(tmp_path, type_id, type_name):
    file = Gguf(gguf_metadata(), [GgufTensor("blk.0.attn_q.weight", (64, 64), type_id, b"\0" * 9000)])
    message = refusal_of(save(tmp_path, file))
    assert f"tensor 'blk.0.attn_q.weight' is of a type that is not supported: got {type_name}, wanted F32 | F16 | BF16" in message
    assert "Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | Q4_K | Q5_K | Q6_K; convert the model to one of those" in message


@pytest.mark.parametrize("name", QUANTISED)
def test_rows_of_broken_blocks_are_refused(tmp_path, name):
    size = BLOCK_TYPES[name].block_elements
    rows = GgufTensor("output.weight", (4, size + size // 2), oracle_type(name).value, bytes(6 * BLOCK_TYPES[name].block_bytes))
    message = refusal_of(save(tmp_path, Gguf(gguf_metadata(), [rows])))
    assert f"'output.weight' has broken blocks: got rows of {size + size // 2}, wanted rows of a multiple of {size};" in message


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "blk.00.attn_q.weight", "blk.x.attn_q.weight", "v.patch.weight", ""])
def test_an_unknown_tensor_is_refused_by_name(tmp_path, name):
    file = Gguf(gguf_metadata(), [GgufTensor(name, (4,), F32, b"\0" * 16)])
    assert f"tensor {name!r} is unknown" in refusal_of(save(tmp_path, file))


def rope_divisors(values, type_id=F32, dtype="<f4"):
    return GgufTensor("rope_freqs.weight", (len(values),), type_id, np.array(values, dtype).tobytes())


def test_divisors_of_the_rotary_frequencies_belong_to_the_config(tmp_path):
    source = open_checkpoint(save(tmp_path, Gguf(gguf_metadata(), [rope_divisors([1, 1, 1, 1, 2, 3, 4, 8])])))
    assert source.config.rope_scaling == RopeScaling("factors", divisors=(1, 1, 1, 1, 2, 3, 4, 8))
    assert "rope_freqs.weight" not in source.tensors


@pytest.mark.parametrize(
    ("divisors", "keys", "told"),
    [
        pytest.param(rope_divisors([1] * 4), {}, "got float32 [4], wanted 8 float32 numbers above 0", id="too-few"),
        pytest.param(rope_divisors([1] * 7 + [0]), {}, "got float32 [8]", id="zero"),
        pytest.param(rope_divisors([1] * 7 + [np.nan]), {}, "got float32 [8]", id="nan"),
        pytest.param(rope_divisors([1] * 8, F16, "<f2"), {}, "got float16 [8]", id="float16"),
        pytest.param(
            rope_divisors([1] * 8),
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            "and scaling 'linear' in the metadata",
            id="scaled-twice",
        ),
    ],
)
def test_divisors_that_cannot_be_used_are_refused(divisors, keys, told, tmp_path):
    message = refusal_of(save(tmp_path, Gguf(gguf_metadata(**keys), [divisors])))
    assert "tensor 'rope_freqs.weight' cannot be used" in message
    assert told in message


def test_a_quantised_vector_is_refused(tmp_path):
    file = Gguf(gguf_metadata(), [GgufTensor("output_norm.weight", (64,), Q8_0, b"\0" * 68)])
    assert "tensor 'output_norm.weight' is a quantised vector: got Q8_0" in refusal_of(save(tmp_path, file))


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
