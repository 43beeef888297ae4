"""e4m3 checkpoints, from file to logits: as they are where the device has no e4m3, with rounded activations where it has.

Products of rounded activations are compared layer by layer too, on the same input: whole models differ by roundings that the
order of a sum turned over.
"""

import pytest
import torch

from rapid_llm import CheckpointError
from rapid_llm.modules.mlp import GatedMLP
from rapid_llm.modules.norm import RMSNorm
from rapid_llm.modules.placement import Placement
from rapid_llm.quantization.checkpoint import checkpoint_formats
from rapid_llm.quantization.fp8 import Fp8
from rapid_llm.quantization.packed import Fp8Bytes
from rapid_llm.quantization.w8a8 import Fp8Weight, RoundedRows
from tests import reference
from tests.quantization import writers
from tests.quantization.layers import CPU, FILE, fill, load_layer, named, table_of
from tests.quantization.tiny_run import FAMILIES, IDS, check_family, check_rounded_family
from tests.tiny_model import expected_logits, tiny_model

PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
INVERSE = ("weight_scale_inv", "activation_scale")


class Native(Placement):
    """A place whose rows are called native, though plain torch serves."""

    def is_native(self, op, **sizes):
        return True


NATIVE = Native(CPU.info, CPU.device, CPU.dtype)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param(PER_TENSOR, {"layout": "tensor", "shape": ()}, id="tensor"),
        pytest.param(STATIC, {"layout": "tensor", "input_scale": 0.02}, id="static"),
        pytest.param(BLOCKS, {"layout": "block", "names": INVERSE, "dtype": torch.bfloat16}, id="blocks"),
    ],
)
def test_logits_equal_those_of_the_dequantised_model(config, options, family, tmp_path):
    check_family(tmp_path, family, config, lambda _, weight: writers.floats(weight, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_a_model_that_rounds_its_activations_where_the_device_does(family, tmp_path, monkeypatch):
    def writer(_, weight):
        return writers.floats(weight, "tensor")

    check_rounded_family(tmp_path, family, PER_TENSOR, writer, "quantize_fp8", monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_values(family, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    oracle = tiny_model(family, tie_word_embeddings=False)
    config = BLOCKS | {"modules_to_not_convert": ["lm_head"]}
    writers.write_quantised(tmp_path, oracle, config, lambda _, weight: writers.floats(weight, "block", names=INVERSE))
    how = FineGrainedFP8Config(dequantize=True, modules_to_not_convert=["lm_head"])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=how)
    assert torch.equal(expected_logits(theirs, IDS), expected_logits(oracle, IDS))


@pytest.mark.parametrize(("hidden", "intermediate"), [(192, 320), (128, 272)])
def test_blocks_that_rows_do_not_fill_are_scaled_right(hidden, intermediate, tmp_path):
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": 8, "num_key_value_heads": 4}
    check_family(tmp_path, "llama", BLOCKS, lambda _, weight: writers.floats(weight, "block", names=INVERSE), **sizes)


def test_layers_that_are_left_out_are_plain(tmp_path):
    config = BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp", "self_attn.qkv_proj"]}

    def writer(name, weight):
        is_plain = "layers.0.mlp" in name or name.endswith(("q_proj", "k_proj", "v_proj"))
        return None if is_plain else writers.floats(weight, "block", names=INVERSE)

    check_family(tmp_path, "qwen3", config, writer)


def loaded(config, n, k, layout, place=CPU, **options):
    tensors, values = writers.floats(torch.randn(n, k, generator=torch.Generator().manual_seed(n)) * 0.1, layout, **options)
    form, weight = load_layer(config, tensors, n, k, place)
    assert torch.equal(form.dequantised(lambda name: tensors[name.removeprefix("layer.")], "layer"), values)
    return weight, values


@pytest.mark.parametrize(
    ("config", "layout", "n", "k", "scales"),
    [
        pytest.param(PER_TENSOR, "tensor", 40, 96, (40,), id="a-scale-for-all"),
        pytest.param(BLOCKS, "block", 256, 384, (2, 3), id="whole-blocks"),
        pytest.param(BLOCKS, "block", 200, 320, (2, 3), id="blocks-cut-off"),
        pytest.param(BLOCKS, "block", 24, 64, (1, 1), id="one-block"),
    ],
)
def test_activations_are_rounded_where_the_device_multiplies_e4m3(config, layout, n, k, scales):
    weight, values = loaded(config, n, k, layout, NATIVE, names=INVERSE)
    assert isinstance(weight, Fp8Weight)
    assert weight.tensors["scales"].shape == scales
    torch.testing.assert_close(weight.numbers().double(), values, rtol=1e-6, atol=0)
    x = torch.randn(5, k)
    codes, steps = reference.quantize_fp8(x, group=128 if layout == "block" and k > 128 else k)
    width = -(-k // max(steps.reshape(5, -1).shape[1], 1)) if steps.reshape(5, -1).shape[1] == 1 else 128
    rounded = codes.double() * steps.reshape(5, -1).double().repeat_interleave(width, 1)[:, :k]
    assert 0.005 < ((rounded - x).norm() / x.norm()) < 0.05
    check_product(weight, x, rounded @ values.t())


def check_product(weight, x, expected):
    out, bias = torch.empty(len(x), weight.n), torch.randn(weight.n)
    weight.product(NATIVE)(x, out, bias)
    torch.testing.assert_close(out.double(), expected + bias, rtol=1e-5, atol=1e-5 * float(expected.std()))


def test_static_scales_of_stacked_layers_are_their_largest():
    first, values = writers.floats(torch.randn(32, 64), "tensor", input_scale=0.01)
    second, others = writers.floats(3 * torch.randn(16, 64), "tensor", input_scale=0.02)
    tensors = named(first, "a.q_proj") | named(second, "a.k_proj")
    form = checkpoint_formats(STATIC, table_of(tensors), FILE).of(["a.q_proj", "a.k_proj"], 64)
    weight = form.empty(NATIVE, 48, 64)
    fill([*form.slots("a.q_proj", weight.part(0, 32)), *form.slots("a.k_proj", weight.part(32, 48))], tensors)
    assert weight.x_scale.item() == pytest.approx(0.02)
    torch.testing.assert_close(weight.numbers().double(), torch.cat((values, others)), rtol=1e-6, atol=0)
    x = torch.randn(4, 64)
    codes = (x / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn)
    check_product(weight, x, codes.double() * weight.x_scale.double() @ torch.cat((values, others)).t())


def test_one_scale_of_a_whole_matrix_stays_one_beside_static_activations():
    weight, _ = loaded(STATIC, 32, 64, "tensor", NATIVE, input_scale=0.01)
    assert weight.tensors["scales"].shape == (1,)
    assert torch.equal(weight.part(8, 16).numbers(), weight.numbers()[8:16])


def test_rows_of_a_weight_by_blocks_are_those_of_the_whole():
    weight, _ = loaded(BLOCKS, 256, 384, "block", NATIVE, names=INVERSE)
    assert torch.equal(weight.part(128, 256).numbers(), weight.numbers()[128:])


@pytest.mark.case("E1")
def test_a_device_without_e4m3_multiplies_the_bytes_as_they_are():
    weight, values = loaded(STATIC, 32, 64, "tensor", input_scale=0.01)
    assert isinstance(weight, Fp8Bytes)
    assert weight.weight.dtype == torch.float8_e4m3fn
    x = torch.randn(3, 64)
    check_product(weight, x, x.double() @ values.t())


def test_scales_that_are_powers_of_two_in_a_byte_are_read():
    weight = torch.randn(256, 256)
    tensors, _ = writers.floats(weight, "block", names=INVERSE)
    bits = tensors["weight_scale_inv"].log2().ceil()
    tensors["weight_scale_inv"] = (bits + 127).to(torch.uint8)
    _, loaded = load_layer(BLOCKS | {"scale_fmt": "ue8m0"}, tensors, 256, 256)
    wide = (2.0**bits).repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(loaded.numbers(), tensors["weight"].float() * wide)


class RoundedByRow:
    """Every layer is e4m3, with a scale a row."""

    def of(self, names, k):
        return Fp8("channel", "dynamic")


def test_what_comes_before_a_product_of_e4m3_rounds_as_the_product_would_have():
    place = Native(CPU.info, CPU.device, CPU.dtype, RoundedByRow())
    mlp = GatedMLP(place, "mlp", 256, 384, bias=False)
    norm, plain = (RMSNorm(place, "norm", 256, 1e-5, reader=reader) for reader in (mlp.gate_up.takes_fp8, None))
    norm.weight.copy_(plain.weight.copy_(torch.rand(256)))
    for layer in mlp.linears:
        layer.weight.round(0, torch.randn(layer.weight.n, layer.weight.k))
    x, residual = torch.randn(5, 256), torch.randn(5, 256)

    rounded = norm.add(x.clone(), residual.clone())
    inner = torch.nn.functional.silu(mlp.gate_up(rounded)[:, :384]) * mlp.gate_up(rounded)[:, 384:]

    assert isinstance(rounded, RoundedRows)
    assert torch.equal(mlp.gate_up(rounded), mlp.gate_up(plain.add(x.clone(), residual.clone())))
    assert torch.equal(mlp(rounded), mlp.down(inner))
    assert "swiglu" not in {question.op for question in place.questions}


@pytest.mark.parametrize(
    ("value", "words"), [(torch.nan, "1 NaN of"), (torch.inf, "1 infinite of"), (-1.0, "1 negative of"), (0.0, "1 zero of")]
)
@pytest.mark.parametrize("name", ["weight_scale", "input_scale"])
def test_scales_that_no_quantiser_writes_are_refused_by_name(name, value, words):
    tensors, _ = writers.floats(torch.randn(1, 64), "tensor", input_scale=0.01)
    with pytest.raises(CheckpointError, match=f"layer.{name} holds scales that no quantiser writes: got {words}"):
        load_layer(STATIC, tensors | {name: torch.tensor([value])}, 1, 64, NATIVE)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (BLOCKS | {"weight_block_size": [64, 128]}, r"'weight_block_size' is not served: got \[64, 128\]"),
        (BLOCKS | {"activation_scheme": "static"}, "'activation_scheme' is not served: got 'static', wanted 'dynamic' with"),
        (PER_TENSOR | {"activation_scheme": "none"}, "'activation_scheme' is not served"),
        (PER_TENSOR | {"fmt": "e5m2"}, "'fmt' is not served: got 'e5m2'"),
        (BLOCKS | {"expert_dtype": "fp4"}, "'expert_dtype' is not served: got 'fp4'"),
        (BLOCKS | {"modules_to_convert": ["model.embed_tokens"]}, "'modules_to_convert' is not served"),
        (BLOCKS | {"scale_fmt": "e5m3"}, "'scale_fmt' is not served"),
    ],
)
def test_a_setting_that_is_not_served_is_refused_by_key(config, words):
    with pytest.raises(CheckpointError, match=words):
        checkpoint_formats(config, {}, FILE)


def test_rows_that_blocks_cut_unevenly_are_refused_by_layer():
    with pytest.raises(CheckpointError, match="layer cannot be kept as fp8: got rows of 200 in blocks of 128"):
        checkpoint_formats(BLOCKS, {}, FILE).of(["layer"], 200)
