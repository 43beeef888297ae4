"""Experts of quantised checkpoints: a layer's are one stack in their format, or the start is stopped by the layer's name."""

import pytest
import torch

from rapid_llm.build import build_engine
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.config import EngineConfig
from rapid_llm.errors import CheckpointError, ConfigError
from rapid_llm.ledger import StartupLedger
from rapid_llm.modules.placement import Placement
from rapid_llm.quantization.mxfp4 import Mxfp4Weight
from rapid_llm.quantization.packed import Fp8Bytes, Int4Weight, Int8Weight
from rapid_llm.quantization.w8a8 import Fp8Weight
from tests.e2e.test_families_match_transformers import run_model
from tests.quantization.tiny_run import IDS, check_logits
from tests.quantization.writers import awq, floats, gptq, integers, mxfp4, nvfp4, packed_integers, write_quantised
from tests.tiny_model import expected_logits, tiny_model

ROUTERS = ["re:.*mlp\\.gate$", "re:.*block_sparse_moe\\.gate$", "lm_head"]
WIDE = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128}


def compressed(kind, weights, inputs=None):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": ROUTERS}


def fp8(**more):
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["mlp.gate", "lm_head"], **more}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ROUTERS}
BLOCKS = {"weight_block_size": [128, 128]}
CASES = [
    pytest.param("mixtral", GPTQ, gptq, {}, Int4Weight, id="gptq"),
    pytest.param(
        "qwen3_moe", GPTQ | {"bits": 8, "sym": True}, lambda w: gptq(w, bits=8, symmetric=True), {}, Int8Weight, id="gptq-8"
    ),
    pytest.param("qwen3_moe", AWQ, awq, {}, Int4Weight, id="awq"),
    pytest.param("mixtral", compressed("pack-quantized", INT4), packed_integers, {}, Int4Weight, id="packed"),
    pytest.param("qwen3_moe", compressed("int-quantized", INT8), integers, {"mlp_only_layers": [0]}, Int8Weight, id="int8"),
    pytest.param("mixtral", MXFP4, mxfp4, {}, Mxfp4Weight, id="mxfp4"),
    pytest.param("mixtral", fp8(), lambda w: floats(w, "tensor"), {}, Fp8Bytes, id="fp8"),
    pytest.param(
        "qwen3_moe",
        fp8(**BLOCKS),
        lambda w: floats(w, "block", names=("weight_scale_inv", "input_scale")),
        WIDE,
        Fp8Bytes,
        id="fp8-blocks",
    ),
]


def written(folder, family, config, writer, changes):
    oracle = tiny_model(family, tie_word_embeddings=False, **changes)
    write_quantised(folder, oracle, config, lambda _, weight: writer(weight))
    return oracle


def stacks(folder):
    """The last layer's."""
    source = open_checkpoint(folder)
    engine = build_engine(EngineConfig(str(folder), "cpu", max_kv_tokens=64), source, StartupLedger())
    mlp = engine.worker.model.layers[-1].mlp
    return mlp.gate_up.weight, mlp.down.weight


@pytest.mark.parametrize(("family", "config", "writer", "changes", "kept"), CASES)
def test_experts_say_what_their_values_say(family, config, writer, changes, kept, tmp_path):
    oracle = written(tmp_path, family, config, writer, changes)
    check_logits(tmp_path, oracle)
    assert [type(stack) for stack in stacks(tmp_path)] == [kept, kept]


@pytest.mark.parametrize("by_block", [False, True], ids=["tensor", "block"])
def test_activations_are_rounded_too_where_e4m3_is_multiplied(by_block, tmp_path, monkeypatch):
    monkeypatch.setattr(Placement, "is_native", lambda self, op, **sizes: True)
    layout = "block" if by_block else "tensor"
    oracle = written(tmp_path, "qwen3_moe", fp8(**(BLOCKS if by_block else {})), lambda w: floats(w, layout), WIDE)
    for stack in stacks(tmp_path):
        assert type(stack) is Fp8Weight
        assert stack.tensors["scales"].shape[1:] == ((stack.n // 128, stack.k // 128) if by_block else (stack.n,))
    [logits], expected = run_model(tmp_path, [[(0, 0, IDS)]]), expected_logits(oracle, IDS)[-1]
    assert torch.nn.functional.cosine_similarity(logits[0], expected, 0) > 0.95  # e4m3 of activations: a few percent each
    assert not torch.allclose(logits[0], expected, rtol=0, atol=1e-4)


def test_experts_of_other_formats_in_one_layer_are_refused_by_name(tmp_path):
    oracle = tiny_model("mixtral")
    write_quantised(tmp_path, oracle, GPTQ, lambda name, weight: None if name.endswith("experts.2.w3") else gptq(weight))
    with pytest.raises(CheckpointError, match=r"experts\.2\.w3: plain numbers"):
        stacks(tmp_path)


def test_down_in_another_format_than_gate_and_up_is_refused_by_name(tmp_path):
    write_quantised(tmp_path, tiny_model("mixtral"), GPTQ, lambda name, weight: None if name.endswith("w2") else gptq(weight))
    message = r"layers\.0\.block_sparse_moe\.experts cannot be served in their format: got gptq and plain numbers"
    with pytest.raises(ConfigError, match=message):
        stacks(tmp_path)


def test_a_format_that_no_op_for_experts_reads_is_refused_by_name(tmp_path):
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*mlp.gate"]}
    written(tmp_path, "qwen3_moe", config, nvfp4, {"mlp_only_layers": [0]})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts cannot be served in their format: got modelopt"):
        stacks(tmp_path)


def test_an_order_of_columns_of_each_expert_is_refused_by_name(tmp_path):
    write_quantised(tmp_path, tiny_model("mixtral"), GPTQ | {"desc_act": True}, lambda _, weight: gptq(weight))
    with pytest.raises(ConfigError, match=r"layers\.0\.block_sparse_moe\.experts\.0\.w1: .*got one each"):
        stacks(tmp_path)


def test_blocks_that_two_matrices_share_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(Placement, "is_native", lambda self, op, **sizes: True)
    written(tmp_path, "qwen3_moe", fp8(**BLOCKS), lambda w: floats(w, "block"), WIDE | {"moe_intermediate_size": 96})
    with pytest.raises(ConfigError, match=r"mlp\.experts\.0\.gate_proj cannot be stacked .*got 96 rows in blocks of 128"):
        stacks(tmp_path)
