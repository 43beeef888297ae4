"""mxfp4 checkpoints, from file to logits, and stacks of experts as gpt-oss stores them."""

import pytest
import torch

from rapid_llm import CheckpointError
from rapid_llm.quantization.checkpoint import checkpoint_formats
from tests.quantization import writers
from tests.quantization.layers import CPU, FILE, fill, load_layer, named, table_of
from tests.quantization.tiny_run import FAMILIES, check_family

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def writer(name, weight):
    return None if "self_attn" in name else writers.mxfp4(weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_the_dequantised_model(family, tmp_path):
    check_family(tmp_path, family, CONFIG, writer)


def test_every_code_and_scale_is_exact():
    codes = torch.arange(256).to(torch.uint8).view(16, 1, 16).expand(16, 16, 16).reshape(256, 1, 16)[:250].contiguous()
    scales = torch.arange(250).to(torch.uint8).view(250, 1)
    tensors = {"_blocks": codes, "_scales": scales}
    form, weight = load_layer(CONFIG, tensors, 250, 32)
    halves = torch.stack((codes.view(250, 16) & 15, codes.view(250, 16) >> 4), 2).view(250, 32)
    values = writers.E2M1[halves.long()] * 2.0 ** (scales.double() - 127)
    torch.testing.assert_close(weight.numbers().double(), values, rtol=0, atol=0)
    whole = named(tensors)
    assert torch.equal(form.dequantised(lambda name: whole[name], "layer"), values)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_stack_of_experts_is_filled_and_its_rows_put_apart(interleaved):
    written = [writers.mxfp4(torch.randn(12, 64, generator=torch.Generator().manual_seed(i))) for i in range(3)]
    tensors = named(
        {key: torch.stack([each[0][key] for each in written]) for key in ("_blocks", "_scales")}, "mlp.experts.gate_up"
    )
    form = checkpoint_formats(CONFIG, table_of(tensors), FILE).of(["mlp.experts.gate_up"], 64)
    stack = form.empty(CPU, 12, 64, experts=3)
    fill(list(form.stack_slots("mlp.experts.gate_up", stack, interleaved=interleaved)), tensors, pieces=3)
    for number, (_, values) in enumerate(written):
        wanted = torch.cat((values[::2], values[1::2])) if interleaved else values
        torch.testing.assert_close(stack.expert(number).numbers().double(), wanted, rtol=0, atol=0)


def test_a_scale_of_255_is_refused_by_name():
    tensors, _ = writers.mxfp4(torch.randn(4, 64))
    tensors["_scales"][1, 1] = 255
    with pytest.raises(CheckpointError, match=r"layer_scales holds scales that no quantiser writes: got 1 NaN of 8"):
        load_layer(CONFIG, tensors, 4, 64)


def test_rows_that_groups_do_not_divide_are_refused_by_layer():
    with pytest.raises(CheckpointError, match="layer cannot be kept as mxfp4: got rows of 48, no multiple of 32"):
        checkpoint_formats(CONFIG, {}, FILE).of(["layer"], 48)
