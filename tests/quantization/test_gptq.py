"""GPTQ checkpoints, from file to logits; what they hold that is not served is refused by layer and key."""

import logging

import pytest
import torch

from rapid_llm import CheckpointError
from rapid_llm.quantization.checkpoint import checkpoint_formats
from tests.quantization import writers
from tests.quantization.layers import FILE, load_layer, table_of
from tests.quantization.tiny_run import FAMILIES, check_family

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
ORDER = torch.Generator().manual_seed(7)


def gptq(**changes):
    return CONFIG | changes


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_the_dequantised_model(family, tmp_path):
    check_family(tmp_path, family, CONFIG, lambda _, weight: writers.gptq(weight))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param(gptq(checkpoint_format="gptq_v2"), {"v2": True}, id="v2"),
        pytest.param(gptq(sym=True), {"symmetric": True}, id="symmetric"),
        pytest.param(gptq(group_size=-1), {"group": 0}, id="a-scale-a-row"),
        pytest.param(gptq(bits=8, sym=True), {"bits": 8, "symmetric": True}, id="8-bits"),
        pytest.param(
            gptq(bits=8, sym=True, group_size=-1, format="gptq_v2"),
            {"bits": 8, "symmetric": True, "v2": True, "group": 0},
            id="8-bits-v2-a-scale-a-row",
        ),
    ],
)
def test_every_way_of_storing_is_read(config, options, tmp_path):
    check_family(tmp_path, "llama", config, lambda _, weight: writers.gptq(weight, **options))


@pytest.mark.parametrize("bits", [4, 8])
def test_act_order_gathers_activations_by_the_order_of_each_product(bits, tmp_path):
    orders = {}

    def writer(name, weight):
        product = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
        order = orders.setdefault(product, torch.randperm(weight.shape[1], generator=ORDER))
        return writers.gptq(weight, bits=bits, symmetric=bits == 8, order=order)

    check_family(tmp_path, "qwen2", gptq(bits=bits, desc_act=True), writer)


@pytest.mark.case("J8")
@pytest.mark.parametrize("v2", [False, True])
def test_all_16_zero_points_are_exact(v2):
    weight = torch.randn(16, 64)
    zeros = torch.arange(16).view(16, 1).expand(16, 2)
    tensors, values = writers.gptq(weight, v2=v2, zero_codes=zeros)
    form, loaded = load_layer(gptq(checkpoint_format="gptq_v2" if v2 else "gptq"), tensors, 16, 64)
    assert torch.equal(loaded.tensors["zeros"], zeros.to(torch.uint8))
    torch.testing.assert_close(loaded.numbers().double(), values, rtol=1e-6, atol=0)
    assert torch.equal(form.dequantised(lambda name: tensors[name.removeprefix("layer.")], "layer"), values)


def test_zero_points_of_8_are_not_kept():
    tensors, _ = writers.gptq(torch.randn(8, 64), symmetric=True)
    assert "zeros" not in load_layer(CONFIG, tensors, 8, 64)[1].tensors


def test_act_order_restores_the_file_s_columns_in_its_values():
    order = torch.randperm(64, generator=ORDER)
    tensors, values = writers.gptq(torch.randn(8, 64), order=order)
    form, loaded = load_layer(gptq(desc_act=True), tensors, 8, 64)
    assert loaded.order is not None
    torch.testing.assert_close(loaded.numbers().double(), values, rtol=1e-6, atol=0)
    assert torch.equal(form.dequantised(lambda name: tensors[name.removeprefix("layer.")], "layer"), values)


def test_an_order_that_changes_nothing_costs_nothing():
    tensors, _ = writers.gptq(torch.randn(8, 64))
    assert load_layer(gptq(desc_act=True), tensors, 8, 64)[1].order is None


def test_parts_of_one_product_in_two_orders_are_refused(tmp_path):
    def writer(_, weight):
        return writers.gptq(weight, order=torch.randperm(weight.shape[1], generator=ORDER))

    with pytest.raises(CheckpointError, match=r"layers\.\d\..*_proj has its columns in another order"):
        check_family(tmp_path, "llama", gptq(desc_act=True), writer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"g_idx": torch.zeros(64, dtype=torch.int32)}, r"layer.g_idx cannot be used: got groups of uneven sizes"),
        ({"g_idx": (torch.arange(64) % 2).to(torch.int32)}, "got columns of a group that lie apart"),
        ({"scales": torch.full((2, 8), torch.nan).half()}, r"layer.scales holds scales .* got 16 NaN of 16"),
        ({"scales": -torch.ones(2, 8).half()}, "16 negative of 16"),
        ({"scales": torch.zeros(2, 8).half()}, "16 zero of 16"),
        ({"scales": torch.full((2, 8), torch.inf).half()}, "16 infinite of 16"),
    ],
    ids=["uneven-groups", "unsaid-order", "nan", "negative", "zero", "infinite"],
)
def test_a_damaged_layer_is_refused_by_name(change, words):
    tensors, _ = writers.gptq(torch.randn(8, 64))
    with pytest.raises(CheckpointError, match=words):
        load_layer(CONFIG, tensors | change, 8, 64)


def test_8_bits_with_other_zero_points_are_refused():
    tensors, _ = writers.gptq(torch.randn(8, 64), bits=8)
    with pytest.raises(CheckpointError, match=r"layer.qzeros cannot be used: got 8-bit codes with other zero points"):
        load_layer(gptq(bits=8), tensors, 8, 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 3}, r"'bits' is not served: got 3, wanted 4 \| 8"),
        ({"bits": True}, "'bits' is not served: got True"),
        ({"bits": ...}, "'bits' is not served: got no such key"),
        ({"group_size": 48}, "'group_size' is not served: got 48"),
        ({"checkpoint_format": "marlin"}, "'checkpoint_format' is not served: got 'marlin'"),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, "'format' is not served: got 'gptq_v2', wanted 'gptq'"),
        ({"lm_head": True}, "'lm_head' is not served: got True, wanted False"),
        ({"dynamic": {"+:(": {}}}, r"'dynamic.\+:\(' is not served"),
        ({"dynamic": {"x": {"bits": 2}}}, r"'dynamic.x.bits' is not served: got 2"),
        ({"adapter": {"name": "lora"}}, "'adapter' is not served"),
        ({"modules_in_block_to_quantize": "q_proj"}, "wanted a list of names"),
    ],
)
def test_a_setting_that_is_not_served_is_refused_by_key(changes, words):
    config = {key: value for key, value in gptq(**changes).items() if value is not ...}
    with pytest.raises(CheckpointError, match=words):
        checkpoint_formats(config, {}, FILE)


def test_dynamic_leaves_layers_out_and_gives_others_settings_of_their_own(tmp_path):
    config = gptq(dynamic={r"-:.*\.o_proj": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": -1}})

    def writer(name, weight):
        if name.endswith("o_proj"):
            return None
        return writers.gptq(weight, bits=8, group=0, symmetric=True) if name.endswith("down_proj") else writers.gptq(weight)

    check_family(tmp_path, "llama", config, writer)


def test_modules_in_block_to_quantize_names_the_quantised_ones(tmp_path):
    config = gptq(modules_in_block_to_quantize=[["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.down_proj"]])
    quantised = ("q_proj", "k_proj", "v_proj", "down_proj")
    check_family(tmp_path, "llama", config, lambda name, weight: writers.gptq(weight) if name.endswith(quantised) else None)


def test_rows_that_do_not_divide_into_groups_are_refused_by_layer(tmp_path):
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj cannot be kept as gptq: got rows of 96, which do not"):
        check_family(tmp_path, "llama", gptq(group_size=64), lambda _, weight: writers.gptq(weight))


def test_a_bias_of_zeros_is_left_aside_where_the_model_has_none(tmp_path):
    def writer(_, weight):
        tensors, values = writers.gptq(weight)
        return tensors | {"bias": torch.zeros(len(weight)).half()}, values

    check_family(tmp_path, "llama", CONFIG, writer)
    tensors, _ = writers.gptq(torch.randn(8, 64))
    with pytest.raises(CheckpointError, match=r"layer.bias cannot be used: got values that are not 0"):
        load_layer(CONFIG, tensors | {"bias": torch.ones(8)}, 8, 64)


def test_unknown_keys_are_logged_once(caplog):
    with caplog.at_level(logging.WARNING):
        checkpoint_formats(gptq(damp_percent=0.1, new_thing=3), {}, FILE)
    assert [record.message for record in caplog.records] == [
        f"{FILE}: quantisation keys that this version does not know and does not follow: new_thing"
    ]


def test_parts_of_one_product_quantised_differently_are_refused():
    formats = checkpoint_formats(gptq(dynamic={"-:.*k_proj": {}}), table_of({}), FILE)
    words = r"multiplied as one are quantised differently: got a\.q_proj: Gptq\(.*a\.k_proj: plain"
    with pytest.raises(CheckpointError, match=words):
        formats.of(["a.q_proj", "a.k_proj"], 64)
