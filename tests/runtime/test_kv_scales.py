"""Scales of an e4m3 KV pool: a checkpoint's own, or measured on a text through the model."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from rapid_llm.build import build_engine, choose_placement
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.config import EngineConfig
from rapid_llm.errors import CheckpointError, ConfigError
from rapid_llm.kernels.device import device_info
from rapid_llm.ledger import StartupLedger
from rapid_llm.models.registry import architecture
from rapid_llm.runtime.kv_calibration import MARGIN, measured_scales
from rapid_llm.runtime.kv_scales import given_scales
from rapid_llm.runtime.weight_loader import load_weights
from tests.tiny_model import edit_json, save_checkpoint, tiny_model

LAYERS, HEADS = 2, 2
IDS = list(range(40))


@pytest.fixture(scope="module")
def oracle():
    return tiny_model("qwen3")


@pytest.fixture
def folder(oracle, tmp_path):
    return save_checkpoint(oracle, tmp_path)


def with_scales(folder, scales, **config):
    """The checkpoint with these tensors beside its own, and these keys in its config."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | scales, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", **config)
    return open_checkpoint(folder)


def every(name, values):
    """A tensor of this name in every layer, the layer's number added to ``values``."""
    return {f"model.layers.{layer}.self_attn.{name}": torch.as_tensor(values) + layer for layer in range(LAYERS)}


def measured(folder, dtype="float32", ids=IDS, **changes):
    """What is measured on ``ids``."""
    config, source = EngineConfig(device="cpu", dtype=dtype, kv_dtype="fp8_e4m3"), open_checkpoint(folder)
    place = choose_placement(config, source, device_info("cpu"))
    network = architecture(source.config.architecture).load()(place, source.config, max_positions=256, tied_head=True)
    load_weights(source, network.weights())
    for change in changes.values():
        change(network)
    return measured_scales(network, place, source.config, ids)


def test_a_measured_scale_takes_twice_the_largest_key_and_value_of_its_head_to_the_end_of_e4m3(oracle, folder):
    with torch.no_grad():
        cache = oracle(torch.tensor([IDS])).past_key_values
    found = measured(folder)
    for layer in range(LAYERS):
        keys, values = cache.layers[layer].keys[0], cache.layers[layer].values[0]  # [H, T, D], keys rotated
        for scale, numbers in ((found.k[layer], keys), (found.v[layer], values)):
            torch.testing.assert_close(scale * 448, MARGIN * numbers.abs().amax((1, 2)), rtol=1e-4, atol=0)


def test_the_text_is_cut_to_the_context_and_one_token_will_do(folder):
    assert measured(folder, ids=IDS[:1]).k.shape == (LAYERS, HEADS)
    assert "256 tokens" in measured(folder, ids=IDS * 20).origin


def test_a_head_of_zeros_has_a_scale_all_the_same(folder):
    def forget(network):
        network.layers[1].attention.qkv.weight.zero_()

    found = measured(folder, change=forget)
    assert (found.v[1] == 1.0).all()
    assert found.v.isfinite().all()


def test_keys_that_are_no_numbers_stop_the_start_and_name_the_layer(folder):
    def spoil(network):
        network.layers[1].attention.k_norm.weight.fill_(float("inf"))

    with pytest.raises(ConfigError, match=r"NaN or infinite K in layer 1.*another dtype, or leave kv_dtype out"):
        measured(folder, change=spoil)


FP8_CACHE = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "tensor"}}
GIVEN = [
    pytest.param("k_scale", "v_scale", [0.5], [0.5, 0.5], id="compressed-tensors"),
    pytest.param("k_proj.k_scale", "v_proj.v_scale", 0.25, [0.25, 0.25], id="modelopt-scalars"),
    pytest.param("k_scale", "v_scale", [[[0.5]], [[2.0]]], [0.5, 2.0], id="by-head"),
]


@pytest.mark.parametrize(("k_name", "v_name", "values", "expected"), GIVEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_checkpoints_scales_are_taken_for_every_head(folder, k_name, v_name, values, expected, dtype):
    scales = every(k_name, values) | every(v_name, torch.as_tensor(values) * 4)
    found = given_scales(with_scales(folder, {name: scale.to(dtype) for name, scale in scales.items()}))
    for layer in range(LAYERS):
        assert found.k[layer].tolist() == [value + layer for value in expected]
        assert found.v[layer].tolist() == [4 * value + layer for value in expected]


def test_scales_of_another_format_and_of_queries_are_left_aside(folder):
    assert given_scales(open_checkpoint(folder)) is None
    scales = every("k_scale", [0.5]) | every("v_scale", [0.5])
    int8 = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "int", "num_bits": 8}}
    assert given_scales(with_scales(folder, scales, quantization_config=int8)) is None
    nvfp4 = {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}}
    assert given_scales(with_scales(folder, scales, quantization_config=nvfp4)) is None
    assert given_scales(with_scales(folder, every("q_scale", [0.5]), quantization_config=FP8_CACHE)) is not None


def test_scales_of_queries_alone_are_none_of_the_cache(folder):
    assert given_scales(with_scales(folder, every("q_scale", [0.5]))) is None


BAD = [
    pytest.param([0.5, 0.5, 0.5], r"k_scale has another shape: got \[3\], wanted one number, or one for each of 2", id="three"),
    pytest.param([0.0], "k_scale is no scale: got 0.0, wanted numbers above 0", id="zero"),
    pytest.param([-1.0], "k_scale is no scale: got -1.0", id="negative"),
    pytest.param([float("nan")], "k_scale is no scale: got nan", id="nan"),
    pytest.param([0.5, float("inf")], "k_scale is no scale: got inf", id="infinite"),
]


@pytest.mark.parametrize(("values", "says"), BAD)
def test_a_scale_that_cannot_be_one_stops_the_start_by_its_name(folder, values, says):
    source = with_scales(folder, every("v_scale", [0.5]) | {"model.layers.0.self_attn.k_scale": torch.tensor(values)})
    with pytest.raises(CheckpointError, match=says):
        given_scales(source)


def test_scales_of_some_layers_only_are_refused(folder):
    scales = every("v_scale", [0.5]) | {"model.layers.0.self_attn.k_scale": torch.tensor([0.5])}
    with pytest.raises(CheckpointError, match="scales of the KV cache are missing: got k_scale of layer 1"):
        given_scales(with_scales(folder, scales))


def test_a_scale_of_integers_is_refused(folder):
    with pytest.raises(CheckpointError, match="v_scale is no scale: got int64, wanted a float"):
        given_scales(with_scales(folder, every("v_scale", [1])))


@pytest.mark.parametrize("given", [True, False])
def test_the_start_says_where_scales_are_from_and_how_many_rows_fit(folder, given, caplog):
    source = with_scales(folder, every("k_scale", [0.05]) | every("v_scale", [0.05])) if given else open_checkpoint(folder)
    ledger = StartupLedger()
    engine = build_engine(EngineConfig(device="cpu", kv_dtype="fp8_e4m3", max_kv_tokens=64), source, ledger)
    notes = "\n".join(ledger.notes)
    assert ("the checkpoint's scales" if given else "scales measured on 256 tokens, times 2") in notes
    assert "KV pool of 64 tokens of fp8_e4m3" in notes
    assert "KV scales" in [phase.name for phase in ledger.phases]
    pool = engine.worker.pool
    assert pool.nbytes == LAYERS * 64 * 2 * HEADS * 16
    assert pool.layers[0].k.dtype == torch.float8_e4m3fn
    assert (pool.layers[1].scales["k_scale"] == 1.05).all() == given
    assert not caplog.records


def test_scales_that_are_not_asked_for_cost_a_word_and_no_phase(folder, caplog):
    source, ledger = with_scales(folder, every("k_scale", [0.5]) | every("v_scale", [0.5])), StartupLedger()
    engine = build_engine(EngineConfig(device="cpu", max_kv_tokens=64), source, ledger)
    assert engine.worker.pool.layers[0].k.dtype == torch.float32
    assert "KV scales" not in [phase.name for phase in ledger.phases]
    assert "only kv_dtype='fp8_e4m3' keeps one" in caplog.text


def test_twice_the_rows_of_bfloat16_fit_into_the_same_memory(folder):
    from rapid_llm.build import resolve_sizes

    source, rows = open_checkpoint(folder), {}
    for kv_dtype in (None, "fp8_e4m3"):
        config = EngineConfig(device="cpu", dtype="bfloat16", kv_dtype=kv_dtype, memory_fraction=1e-7)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rapid_llm.build.free_host_bytes", lambda: 16 * 1024 * 1024 * 10_000)
            rows[kv_dtype] = resolve_sizes(
                config, source.config, choose_placement(config, source, device_info("cpu"))
            ).max_kv_tokens
    assert rows["fp8_e4m3"] in (2 * rows[None], 2 * rows[None] + 16)
