"""Blocks of a GGUF file that are kept: the values of each are those that the gguf package reads, and nothing is rounded."""

import numpy as np
import pytest
import torch

from rapid_llm.checkpoint.ggml_types import BLOCK_TYPES, dequantise
from rapid_llm.quantization.gguf import KEPT, GgufFormats, Int4Numbered
from rapid_llm.quantization.packed import Int4Weight, Int8Weight
from tests.quantization.test_online import Cpu

ROWS, WIDTH = 6, 512
NAMES = ["a", "b"]


def blocks_of(kind, seed=0):
    """Rows of random blocks: any bits, but for scales and minima that are no infinities: uint8 [ROWS, bytes of a row]."""
    block_type = BLOCK_TYPES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (ROWS * WIDTH // block_type.block_elements, block_type.block_bytes), np.uint8)
    halves = rng.standard_normal((len(blocks), 2)).astype("<f2").view(np.uint8)
    blocks[:, : 4 if KEPT[kind].has_minima else 2] = halves[:, : 4 if KEPT[kind].has_minima else 2]
    return blocks.reshape(ROWS, -1)


def values_of(kind, rows):
    """What the file holds, in float64 from exact float32 factors."""
    block_type = BLOCK_TYPES[kind]
    return torch.from_numpy(dequantise(rows.reshape(-1, block_type.block_bytes), block_type).reshape(len(rows), WIDTH)).double()


def kept(*kinds_and_rows):
    """A weight stacked of parts, each (type, rows of blocks)."""
    formats = GgufFormats({f"{name}.weight": kind for name, (kind, _) in zip(NAMES, kinds_and_rows, strict=False)})
    names = NAMES[: len(kinds_and_rows)]
    kept_blocks = formats.of(names, WIDTH)
    weight = kept_blocks.empty(Cpu(), sum(len(rows) for _, rows in kinds_and_rows), WIDTH)
    start = 0
    for name, (kind, rows) in zip(names, kinds_and_rows, strict=True):
        part = weight.part(start, start + len(rows))
        [slot] = kept_blocks.slots(name, part)
        assert slot.dtypes == (kind,)
        assert slot.target.as_stored
        for first in (3, 0):  # any pieces, any order
            slot.target[first : first + 3].copy_(torch.from_numpy(rows[first : first + 3]))
        start += len(rows)
    return weight


def assert_values(weight, expected):
    """Equal but for fp32 roundings of sums whose terms, code times scale and a minimum, are up to 16 scales or minima large."""
    scales = weight.tensors["scales"].double().abs()
    zeros = weight.tensors["zeros"].double().abs() if "zeros" in weight.tensors else torch.zeros(())
    terms = (scales * (16 + zeros)).repeat_interleave(weight.group, 1)
    assert ((weight.numbers().double() - expected).abs() <= 4 * torch.finfo(torch.float32).eps * terms).all()


@pytest.mark.parametrize("kind", KEPT)
def test_values_are_those_of_the_file(kind):
    rows = blocks_of(kind)
    weight = kept((kind, rows))
    assert_values(weight, values_of(kind, rows))
    if not KEPT[kind].has_minima:
        assert torch.equal(weight.numbers().double(), values_of(kind, rows))


@pytest.mark.parametrize(
    ("kind", "way", "bits"),
    [("Q4_0", Int4Weight, 5), ("Q4_1", Int4Numbered, 6), ("Q4_K", Int4Numbered, 6), ("Q8_0", Int8Weight, 9)],
)
def test_what_an_element_takes(kind, way, bits):
    weight = kept((kind, blocks_of(kind)))
    assert type(weight) is way
    assert sum(each.nbytes for each in weight.tensors.values()) * 8 == bits * ROWS * WIDTH


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_a_group_without_a_scale_holds_its_minimum(kind):
    rows = blocks_of(kind)
    rows.reshape(-1, BLOCK_TYPES[kind].block_bytes)[:3, :2] = 0
    weight = kept((kind, rows))
    expected = values_of(kind, rows)
    assert_values(weight, expected)
    assert torch.equal(weight.numbers().double()[0, :32], expected[0, :32])


def test_blocks_of_nothing_are_zeros():
    for kind in KEPT:
        weight = kept((kind, np.zeros_like(blocks_of(kind))))
        assert (weight.numbers() == 0).all()


def test_a_scale_that_is_no_number_is_passed_on():
    rows = blocks_of("Q4_K")
    rows[2, :2] = np.frombuffer(np.float16("nan").tobytes(), np.uint8)
    assert kept(("Q4_K", rows)).numbers().isnan().any(1).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize(("first", "second"), [("Q4_K", "Q4_0"), ("Q4_0", "Q4_1"), ("Q4_1", "Q4_K"), ("Q8_0", "Q8_0")])
def test_parts_whose_codes_have_as_many_bits_share_a_weight(first, second):
    parts = [(first, blocks_of(first, 1)), (second, blocks_of(second, 2))]
    assert_values(kept(*parts), torch.cat([values_of(kind, rows) for kind, rows in parts]))


@pytest.mark.parametrize("types", [("Q4_K", "Q6_K"), ("Q8_0", "Q4_0"), ("float32", "float32"), ("Q5_0", "Q5_0")], ids="+".join)
def test_what_no_one_way_holds_becomes_numbers(types):
    assert GgufFormats(dict(zip(("a.weight", "b.weight"), types, strict=True))).of(NAMES, WIDTH) is None


def test_only_products_that_may_be_used_are():
    types = {"a.weight": "Q4_0", "b.weight": "Q8_0"}
    assert GgufFormats(types, ["w8a16_gemm"]).of(["a"], WIDTH) is None
    assert GgufFormats(types, ["w8a16_gemm"]).of(["b"], WIDTH).kind == "Q8_0"
