"""What a start does with a quantised checkpoint of any format: refuses by name, asks a device for rows that serve there."""

from pathlib import Path

import pytest
import torch

from rapid_llm import CheckpointError, ConfigError
from rapid_llm.build import build_engine
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.config import EngineConfig
from rapid_llm.entrypoints.verify_checkpoint import check_checkpoint
from rapid_llm.kernels.device import DeviceInfo, device_info
from rapid_llm.kernels.dispatcher.dispatch import choose
from rapid_llm.ledger import StartupLedger
from rapid_llm.modules.placement import Placement
from rapid_llm.quantization.checkpoint import checkpoint_formats
from tests.quantization import test_awq, test_compressed_tensors, test_fp8, test_gptq, test_modelopt, test_mxfp4, writers
from tests.quantization.layers import FILE
from tests.tiny_model import edit_json, tiny_model

COMPRESSED = test_compressed_tensors


def folder_of(folder, config=test_gptq.CONFIG, writer=lambda _, weight: writers.gptq(weight), change=None):
    """A tiny checkpoint, its tensors changed by ``change``."""
    writers.write_quantised(folder, tiny_model("llama", tie_word_embeddings=False), config, writer, change=change)
    return str(folder)


def start(folder, **options):
    """Build the engine."""
    config = EngineConfig(folder, "cpu", "float32", max_kv_tokens=64, **options)
    return build_engine(config, open_checkpoint(folder), StartupLedger())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "quip"}, r"'quant_method' is not served: got 'quip', wanted 'awq' \| 'compressed-tensors' \| 'fp8'"),
        ({"bits": 4}, "'quant_method' is not served: got no such key"),
        ({"quant_method": ["gptq"]}, r"'quant_method' is not served: got \['gptq'\]"),
        ("gptq", "'quantization_config' cannot be used: got 'gptq', wanted an object"),
    ],
)
def test_a_format_that_is_not_served_is_refused_by_name(config, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        start(folder_of(tmp_path, config))


def test_a_config_under_two_names_is_refused(tmp_path):
    folder = folder_of(tmp_path)
    edit_json(tmp_path / "config.json", compression_config=test_gptq.CONFIG)
    with pytest.raises(CheckpointError, match="wanted one of quantization_config and compression_config"):
        start(folder)


def test_the_older_name_of_the_config_is_read(tmp_path):
    folder = folder_of(tmp_path)
    edit_json(tmp_path / "config.json", compression_config=test_gptq.CONFIG, quantization_config=...)
    assert start(folder)


def test_rounding_what_is_rounded_already_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"is quantised already: got quantize='int8', quant_method 'gptq'"):
        start(folder_of(tmp_path), quantize="int8")


@pytest.mark.parametrize("layer", ["lm_head", "model.embed_tokens"])
def test_a_quantised_head_or_embedding_is_refused_by_name(layer, tmp_path):
    def change(tensors):
        quantised, _ = writers.gptq(tensors.pop(f"{layer}.weight")[:256])
        tensors |= {f"{layer}.{key}": value.contiguous() for key, value in quantised.items()}

    with pytest.raises(CheckpointError, match=f"{layer} is quantised, which is not served: got {layer}.g_idx, {layer}.qweight"):
        start(folder_of(tmp_path, change=change))


@pytest.mark.parametrize("missing", ["scales", "qzeros", "qweight"])
def test_a_missing_tensor_stops_the_start_by_name(missing, tmp_path):
    name = f"model.layers.1.self_attn.k_proj.{missing}"
    with pytest.raises(CheckpointError, match=rf"1 missing \({name}\)"):
        start(folder_of(tmp_path, change=lambda tensors: tensors.pop(name)))


def test_a_layer_that_the_config_leaves_out_and_the_file_quantises_is_refused(tmp_path):
    config = test_awq.CONFIG | {"modules_to_not_convert": ["o_proj"]}
    with pytest.raises(CheckpointError, match=r"2 missing \(model.layers.0.self_attn.o_proj.weight.*6 unexpected"):
        start(folder_of(tmp_path, config, lambda _, weight: writers.awq(weight)))


def test_codes_of_another_dtype_are_refused_by_name(tmp_path):
    name = "model.layers.0.mlp.up_proj.qweight"
    with pytest.raises(CheckpointError, match=f"1 mistyped .{name} is float32, not int32"):
        start(folder_of(tmp_path, change=lambda tensors: tensors.update({name: tensors[name].float()})))


def test_codes_in_a_file_whose_config_says_nothing_are_refused(tmp_path):
    folder = folder_of(tmp_path, test_fp8.PER_TENSOR, lambda _, weight: writers.floats(weight, "tensor"))
    edit_json(tmp_path / "config.json", quantization_config=...)
    with pytest.raises(CheckpointError, match=r"14 mistyped .*float8_e4m3fn, not of floats"):
        start(folder)


FORMATS = {
    "gptq": test_gptq.CONFIG,
    "gptq-act-order": test_gptq.gptq(desc_act=True),
    "gptq-8-bits": test_gptq.gptq(bits=8),
    "awq": test_awq.CONFIG,
    "fp8": test_fp8.PER_TENSOR,
    "fp8-static": test_fp8.STATIC,
    "fp8-blocks": test_fp8.BLOCKS,
    "modelopt-fp8": test_modelopt.FP8,
    "modelopt-nvfp4": test_modelopt.NVFP4,
    "mxfp4": test_mxfp4.CONFIG,
    "w4a16": COMPRESSED.config(COMPRESSED.PACKED, COMPRESSED.group(COMPRESSED.INT4)),
    "w8a16": COMPRESSED.config(COMPRESSED.PACKED, COMPRESSED.group(COMPRESSED.INT8)),
    "int8": COMPRESSED.config("int-quantized", COMPRESSED.group(COMPRESSED.INT8)),
    "w8a8": COMPRESSED.config("int-quantized", COMPRESSED.group(COMPRESSED.INT8, COMPRESSED.TOKENS)),
    "fp8-tokens": COMPRESSED.config(
        "float-quantized", COMPRESSED.group(COMPRESSED.FLOAT8, COMPRESSED.TOKENS | {"type": "float"})
    ),
    "ct-nvfp4": COMPRESSED.config("nvfp4-pack-quantized", COMPRESSED.group(COMPRESSED.NVFP4)),
    "ct-mxfp4": COMPRESSED.config("mxfp4-pack-quantized", COMPRESSED.group(COMPRESSED.MXFP4)),
}


WRITTEN = {
    "gptq": (test_gptq.CONFIG, lambda _, weight: writers.gptq(weight)),
    "gptq-8-bits": (test_gptq.gptq(bits=8), lambda _, weight: writers.gptq(weight, bits=8, symmetric=True)),
    "awq": (test_awq.CONFIG, lambda _, weight: writers.awq(weight)),
    "fp8-static": (test_fp8.STATIC, lambda _, weight: writers.floats(weight, "tensor", input_scale=0.001)),
    "fp8-blocks": (test_fp8.BLOCKS, lambda _, weight: writers.floats(weight, "block", names=test_fp8.INVERSE)),
    "w8a8": (FORMATS["w8a8"], lambda _, weight: writers.integers(weight)),
    "modelopt-nvfp4": (test_modelopt.NVFP4, lambda _, weight: writers.nvfp4(weight)),
    "mxfp4": (test_mxfp4.CONFIG, test_mxfp4.writer),
}


@pytest.mark.parametrize("is_native", [False, True], ids=["cpu", "native"])
@pytest.mark.parametrize("form", WRITTEN)
def test_layers_as_they_serve_are_those_of_the_file(form, is_native, tmp_path, monkeypatch):
    if is_native:
        monkeypatch.setattr(Placement, "is_native", lambda *_, **__: True)
    folder_of(tmp_path, *WRITTEN[form])
    checks = list(check_checkpoint(tmp_path, EngineConfig(str(tmp_path), "cpu", "float32")))
    assert len(checks) == 8
    assert [check.problems for check in checks] == [()] * 8


class Asked(Placement):
    """A place of a device that is not there: its tensors lie on the CPU, and the rows that its device gets are noted."""

    def kernel(self, op, **sizes):
        self.recorder.shared.setdefault("rows", []).append(choose(op, device=self.info, dtype=self.dtype_name, **sizes))


OLDER = {
    75: (device_info("t4"), torch.float16),
    80: (device_info("a100"), torch.bfloat16),
    86: (device_info("rtx3090"), torch.bfloat16),
}


def rows_on(device: DeviceInfo, dtype, config):
    place = Asked(device, torch.device("cpu"), dtype)
    layer = "model.layers.0.mlp.down_proj"
    weight = checkpoint_formats(config, {}, FILE).of([layer], 256).empty(place, 128, 256)
    weight.product(place)
    return weight, place.recorder.shared["rows"]


@pytest.mark.case("E1")
@pytest.mark.parametrize("sm", OLDER)
@pytest.mark.parametrize("form", FORMATS)
def test_devices_without_e4m3_get_rows_that_serve_there(form, sm):
    device, dtype = OLDER[sm]
    weight, rows = rows_on(device, dtype, FORMATS[form])
    assert rows
    for row in rows:
        assert not row.requires.native_fp8
        assert not row.requires.unmet(device)
        assert sm >= 80 or row.fallback
        assert row.op not in ("fp8_gemm", "quantize_fp8")
    if "fp8" in form:
        assert [row.op for row in rows] == ["w8a16_gemm"]
        assert weight.weight.dtype == torch.float8_e4m3fn


def test_every_served_format_has_its_row_in_the_documents():
    from rapid_llm.quantization.checkpoint import _RULES

    page = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text()
    for method in _RULES:
        assert f"`{method}`" in page
