"""`rapid-llm verify-checkpoint` tells a broken file, and broken maths of ours, from a model that is merely small."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from rapid_llm.entrypoints.cli import main
from rapid_llm.modules import linear
from tests.tiny_model import save_checkpoint, tiny_model

LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return save_checkpoint(tiny_model("qwen2"), tmp_path)


def change(folder, name, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors[name])
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("options", [[], ["--quantize", "int8"], ["--quantize", "int4"], ["--dtype", "bfloat16"]], ids=" ".join)
def test_a_sound_checkpoint_passes_however_it_is_kept(folder, options, capsys):
    assert main(["verify-checkpoint", str(folder), "--device", "cpu", *options]) == 0
    printed = capsys.readouterr().out
    assert "model.layers.0.self_attn.q_proj" in printed
    assert "8 layers checked, 0 with problems" in printed


def test_layers_of_experts_are_no_stumbling_block(tmp_path, capsys):
    folder = save_checkpoint(tiny_model("qwen3_moe", mlp_only_layers=[1]), tmp_path)
    assert main(["verify-checkpoint", str(folder), "--device", "cpu", "--quantize", "int8"]) == 0
    printed = capsys.readouterr().out
    assert "model.layers.0.mlp.gate " in printed
    assert "7 layers checked, 0 with problems" in printed


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


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["verify-checkpoint", str(tmp_path / "nothing")]) == 2
    assert "is no checkpoint" in capsys.readouterr().err
