"""AWQ checkpoints, from file to logits; what they hold that is not served is refused by layer and key."""

import pytest
import torch

from rapid_llm import CheckpointError
from rapid_llm.quantization.checkpoint import checkpoint_formats
from tests.quantization import writers
from tests.quantization.layers import FILE, load_layer
from tests.quantization.tiny_run import FAMILIES, check_family

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_the_dequantised_model(family, tmp_path):
    check_family(tmp_path, family, CONFIG, lambda _, weight: writers.awq(weight))


def test_layers_that_are_left_out_are_plain(tmp_path):
    config = CONFIG | {"modules_to_not_convert": ["self_attn", "layers.0.mlp.down_proj"]}

    def writer(name, weight):
        return None if "self_attn" in name or name.endswith("layers.0.mlp.down_proj") else writers.awq(weight)

    check_family(tmp_path, "qwen2", config, writer)


def test_a_layer_that_the_file_holds_plainly_is_plain_whatever_the_config_says(tmp_path):
    check_family(tmp_path, "llama", CONFIG, lambda name, weight: None if "o_proj" in name else writers.awq(weight))


@pytest.mark.case("J8")
def test_all_16_zero_points_are_exact():
    zeros = torch.arange(16).view(16, 1).expand(16, 2)
    tensors, values = writers.awq(torch.randn(16, 64), zero_codes=zeros)
    form, loaded = load_layer(CONFIG, tensors, 16, 64)
    assert torch.equal(loaded.tensors["zeros"], zeros.to(torch.uint8))
    torch.testing.assert_close(loaded.numbers().double(), values, rtol=1e-6, atol=0)
    assert torch.equal(form.dequantised(lambda name: tensors[name.removeprefix("layer.")], "layer"), values)


@pytest.mark.parametrize("pieces", [2, 3, 64])
def test_pieces_that_end_within_a_byte_are_put_together(pieces):
    tensors, _ = writers.awq(torch.randn(16, 64))
    whole, parts = (load_layer(CONFIG, tensors, 16, 64, pieces=count)[1] for count in (1, pieces))
    assert torch.equal(whole.weight, parts.weight)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "gemv"}, "'version' is not served: got 'gemv', wanted 'gemm'"),
        ({"version": "gemv_fast"}, "'version' is not served"),
        ({"backend": "llm-awq"}, "'backend' is not served: got 'llm-awq'"),
        ({"bits": 8}, "'bits' is not served: got 8, wanted 4"),
        ({"zero_point": False}, "'zero_point' is not served: got False"),
        ({"group_size": 24}, "'group_size' is not served: got 24"),
        ({"modules_to_not_convert": [3]}, "modules_to_not_convert is no list of names"),
    ],
)
def test_a_setting_that_is_not_served_is_refused_by_key(changes, words):
    with pytest.raises(CheckpointError, match=words):
        checkpoint_formats(CONFIG | changes, {}, FILE)


def test_outputs_that_fill_no_words_are_refused_by_layer():
    tensors, _ = writers.awq(torch.randn(8, 64))
    with pytest.raises(CheckpointError, match="layer cannot be kept as awq: got 12 outputs, no multiple of 8"):
        load_layer(CONFIG, tensors, 12, 64)


def test_scales_that_are_not_numbers_are_refused_by_name():
    tensors, _ = writers.awq(torch.randn(8, 64))
    tensors["scales"][0, 3] = torch.nan
    with pytest.raises(CheckpointError, match=r"layer.scales holds scales .* got 1 NaN of 16"):
        load_layer(CONFIG, tensors, 8, 64)
