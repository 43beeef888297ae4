"""`rapid-llm verify-checkpoint` tells a broken file, and broken maths of ours, from a model that is merely small."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.entrypoints.cli import main
from rapid_llm.modules import linear
from rapid_llm.modules.moe import MixtureOfExperts
from tests.e2e.test_gguf_kept import MIXED, written
from tests.quantization.writers import awq, gptq, write_quantised
from tests.tiny_model import save_checkpoint, tiny_model

LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return save_checkpoint(tiny_model("qwen2"), tmp_path)


def change(folder, name, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors[name])
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "options",
    [[], ["--quantize", "int8"], ["--quantize", "int4"], ["--quantize", "fp8"], ["--quantize", "nvfp4"], ["--dtype", "bfloat16"]],
    ids=" ".join,
)
def test_a_sound_checkpoint_passes_however_it_is_kept(folder, options, capsys):
    assert main(["verify-checkpoint", str(folder), "--device", "cpu", *options]) == 0
    printed = capsys.readouterr().out
    assert "model.layers.0.self_attn.q_proj" in printed
    assert "8 layers checked, 0 with problems" in printed


@pytest.mark.parametrize(
    "options", [[], ["--quantize", "int8"], ["--quantize", "int4"], ["--quantize", "fp8"], ["--dtype", "bfloat16"]], ids=" ".join
)
def test_a_few_experts_of_a_layer_are_checked_one_by_one(options, tmp_path, capsys):
    folder = save_checkpoint(tiny_model("qwen3_moe", mlp_only_layers=[1]), tmp_path)
    assert main(["verify-checkpoint", str(folder), "--device", "cpu", *options]) == 0
    printed = capsys.readouterr().out
    assert "model.layers.0.mlp.gate " in printed
    for number in (0, 4, 7):
        assert f"model.layers.0.mlp.experts.{number}.gate_proj " in printed
    assert "10 layers checked, 0 with problems" in printed


def test_an_expert_in_the_place_of_another_is_told(tmp_path, monkeypatch, capsys):
    folder, expert = save_checkpoint(tiny_model("mixtral"), tmp_path), MixtureOfExperts.expert
    monkeypatch.setattr(MixtureOfExperts, "expert", lambda self, x, number: expert(self, x, (number + 1) % 4))
    assert main(["verify-checkpoint", str(folder), "--device", "cpu"]) == 1
    assert "another direction" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        pytest.param(lambda weight: weight[3, 5:7].fill_(torch.nan), "up_proj holds 2 values that are not numbers", id="nan"),
        pytest.param(lambda weight: weight[::1].zero_(), "up_proj has 96 of 96 rows of zeros", id="zeros"),
    ],
)
def test_values_that_no_trained_weight_shows_are_told_by_layer(folder, edit, told, capsys):
    change(folder, LAYER, edit)
    assert main(["verify-checkpoint", str(folder), "--device", "cpu"]) == 1
    assert f"model.layers.1.mlp.{told}" in capsys.readouterr().out


def test_a_product_that_is_off_is_told(folder, monkeypatch, capsys):
    product = linear.Linear.__call__
    monkeypatch.setattr(linear.Linear, "__call__", lambda self, x: product(self, x.flip(1)))
    assert main(["verify-checkpoint", str(folder), "--device", "cpu"]) == 1
    assert "error above 1e-04" in capsys.readouterr().out


def test_a_product_of_another_size_is_told_from_one_of_another_direction(folder, monkeypatch, capsys):
    product = linear.Linear.__call__
    monkeypatch.setattr(linear.Linear, "__call__", lambda self, x: product(self, 2 * x))
    main(["verify-checkpoint", str(folder), "--device", "cpu"])
    assert "the right direction and another size" in capsys.readouterr().out
    monkeypatch.setattr(linear.Linear, "__call__", lambda self, x: product(self, -x))
    main(["verify-checkpoint", str(folder), "--device", "cpu"])
    assert "another direction" in capsys.readouterr().out


@pytest.mark.parametrize("gguf", ["keep", "dequantise"])
def test_blocks_of_a_gguf_file_pass_kept_or_not(gguf, tmp_path, capsys):
    assert main(["verify-checkpoint", str(written(tmp_path, MIXED)), "--device", "cpu", "--gguf", gguf]) == 0
    printed = capsys.readouterr().out
    assert ("Q4_1+Q4_K" in printed) is (gguf == "keep")


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize(("config", "writer"), [(GPTQ, gptq), (AWQ, awq)], ids=["gptq", "awq"])
def test_a_quantised_checkpoint_is_held_to_the_values_its_tensors_stand_for(config, writer, tmp_path, capsys):
    write_quantised(tmp_path, tiny_model("llama"), config, lambda name, weight: writer(weight))
    assert main(["verify-checkpoint", str(tmp_path), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert config["quant_method"] in printed
    assert "8 layers checked, 0 with problems" in printed


def test_zero_points_off_by_one_are_told_although_every_product_is_right(tmp_path, capsys):
    """Written as gptq_v2 stores them, and said to be stored less one."""
    write_quantised(tmp_path, tiny_model("llama"), GPTQ, lambda name, weight: gptq(weight, v2=True))
    assert main(["verify-checkpoint", str(tmp_path), "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "up_proj has values that lie around -1.0 steps, not 0: its zero points may be off by one" in printed
    assert "error above" not in printed


@pytest.mark.parametrize("code", [0, 15])
def test_zero_points_at_an_end_of_the_codes_are_told(code, tmp_path, capsys):
    def writer(name, weight):
        return awq(weight, zero_codes=torch.full((len(weight), weight.shape[1] // 32), code) if "up_proj" in name else None)

    write_quantised(tmp_path, tiny_model("llama"), AWQ, writer)
    assert main(["verify-checkpoint", str(tmp_path), "--device", "cpu"]) == 1
    assert f"model.layers.0.mlp.up_proj has zero points that are all {code}" in capsys.readouterr().out


def test_scales_that_are_no_numbers_or_0_are_told(tmp_path, capsys):
    path = written(tmp_path, {"_proj": "Q8_0"})
    data, info = bytearray(path.read_bytes()), open_checkpoint(path).tensors["model.layers.1.mlp.up_proj.weight"]
    for block in range(info.nbytes // 34):
        at = info.offset + 34 * block
        data[at : at + 2] = b"\x00\x00" if block % 2 else data[at : at + 2]
    data[info.offset : info.offset + 2] = b"\x00\x7e"
    path.write_bytes(data)
    assert main(["verify-checkpoint", str(path), "--device", "cpu", "--gguf", "keep"]) == 1
    printed = capsys.readouterr().out
    assert "up_proj has 1 of 2,048 scales that are not numbers" in printed
    assert "up_proj has 1,024 of 2,048 scales of 0" in printed


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["verify-checkpoint", str(tmp_path / "nothing")]) == 2
    assert "is no checkpoint" in capsys.readouterr().err
