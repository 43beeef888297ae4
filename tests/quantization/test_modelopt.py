"""Checkpoints of ModelOpt, from file to logits, with the config in either place."""

import json
import logging

import pytest
import torch

from rapid_llm import LLM, CheckpointError
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.quantization.checkpoint import checkpoint_formats
from rapid_llm.runtime.kv_scales import given_scales
from tests.quantization import writers
from tests.quantization.layers import FILE, load_layer
from tests.quantization.tiny_run import DENSE, FAMILIES, check_family, check_logits
from tests.tiny_model import edit_json, tiny_model

NESTED = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
FP8 = {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "quantization": NESTED}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_logits_equal_those_of_the_dequantised_model(family, tmp_path):
    check_family(tmp_path, family, FP8, lambda _, weight: writers.floats(weight, "tensor", input_scale=0.1, shape=()))


@pytest.mark.parametrize("family", DENSE)
def test_nvfp4_logits_equal_those_of_the_dequantised_model(family, tmp_path):
    check_family(tmp_path, family, NVFP4, lambda _, weight: writers.nvfp4(weight, input_scale=0.1))


def test_modules_are_left_out_by_wildcards(tmp_path):
    config = NVFP4 | {"ignore": ["lm_head", "model.layers.*.self_attn*", "model.layers.0.mlp.down_proj"]}

    def writer(name, weight):
        return None if "self_attn" in name or name.endswith("0.mlp.down_proj") else writers.nvfp4(weight)

    check_family(tmp_path, "llama", config, writer)


def folder_with_own_file(folder, config):
    oracle = tiny_model("llama", tie_word_embeddings=False)
    writers.write_quantised(folder, oracle, NVFP4, lambda _, weight: writers.nvfp4(weight))
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quantization | config}))
    return oracle


def test_a_config_in_a_file_of_its_own_is_read(tmp_path):
    oracle = folder_with_own_file(tmp_path, {})
    check_logits(tmp_path, oracle)
    edit_json(tmp_path / "config.json", quantization_config=...)
    check_logits(tmp_path, oracle)


def test_two_configs_that_differ_are_refused(tmp_path):
    folder_with_own_file(tmp_path, {"quant_algo": "FP8"})
    with pytest.raises(CheckpointError, match=r"config.json and hf_quant_config.json differ: got 'NVFP4' and 'FP8'"):
        LLM(str(tmp_path))


def test_scales_of_a_kv_cache_are_no_weights(tmp_path, caplog):
    def writer(name, weight):
        tensors, values = writers.floats(weight, "tensor", input_scale=0.1)
        kind = {"k_proj": "k_scale", "v_proj": "v_scale"}.get(name.rpartition(".")[2])
        return (tensors | {kind: torch.tensor([0.5])} if kind else tensors), values

    config = {"quant_method": "modelopt", "quantization": NESTED | {"kv_cache_quant_algo": "FP8"}}
    with caplog.at_level(logging.WARNING):
        check_family(tmp_path, "llama", config, writer)
    assert ["kv_dtype='fp8_e4m3'" in record.message for record in caplog.records] == [True]  # and the key is known
    assert given_scales(open_checkpoint(tmp_path)).k.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_nvfp4_values_and_zero_scales_of_small_groups_are_exact():
    weight = torch.randn(8, 64)
    weight[3, 16:32] = 1e-9
    tensors, values = writers.nvfp4(weight)
    assert (tensors["weight_scale"].float() == 0).any()
    form, loaded = load_layer(NVFP4, tensors, 8, 64)
    torch.testing.assert_close(loaded.numbers().double(), values, rtol=1e-6, atol=0)
    assert torch.equal(form.dequantised(lambda name: tensors[name.removeprefix("layer.")], "layer"), values)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("weight_scale_2", torch.tensor(0.0), r"layer.weight_scale_2 holds scales .* got 8 zero of 8"),
        ("weight_scale_2", torch.tensor(torch.nan), r"layer.weight_scale_2 holds scales .* got 8 NaN of 8"),
        (
            "weight_scale",
            torch.full((8, 4), -1.0).to(torch.float8_e4m3fn),
            r"layer.weight_scale holds .* got 32 negative of 32",
        ),
    ],
)
def test_scales_that_no_quantiser_writes_are_refused_by_name(name, value, words):
    tensors, _ = writers.nvfp4(torch.randn(8, 64))
    with pytest.raises(CheckpointError, match=words):
        load_layer(NVFP4, tensors | {name: value}, 8, 64)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (NVFP4 | {"quant_algo": "W4A8_AWQ"}, r"'quant_algo' is not served: got 'W4A8_AWQ', wanted 'FP8' \| 'NVFP4'"),
        (NVFP4 | {"group_size": 32}, "'group_size' is not served: got 32"),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "MIXED_PRECISION"}},
            "'quantization.quant_algo' is not served",
        ),
        ({"quant_method": "modelopt"}, "'quant_algo' is not served: got no such key"),
        (NVFP4 | {"quantized_layers": {"a": {}}}, "'quantized_layers' is not served"),
    ],
)
def test_a_setting_that_is_not_served_is_refused_by_key(config, words):
    with pytest.raises(CheckpointError, match=words):
        checkpoint_formats(config, {}, FILE)


def test_rows_that_groups_do_not_divide_are_refused_by_layer():
    with pytest.raises(CheckpointError, match="layer cannot be kept as modelopt: got rows of 72, no multiple of 16"):
        checkpoint_formats(NVFP4, {}, FILE).of(["layer"], 72)
