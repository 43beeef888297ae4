"""Nothing starts with a parameter that the file did not fill, or with a tensor that nobody asked for."""

import gc
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file

from rapid_llm import LLM, CheckpointError
from rapid_llm.build import build_engine
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.config import EngineConfig
from rapid_llm.ledger import StartupLedger
from tests.tiny_model import save_checkpoint, tiny_llama, tiny_model


@pytest.fixture
def folder(tmp_path):
    return save_checkpoint(tiny_llama(tie_word_embeddings=False), tmp_path)


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def put(name, *shape):
    return lambda tensors: tensors.update({name: torch.zeros(*shape)})


DROPPED = [
    "model.embed_tokens.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]


@pytest.mark.case("J2")
@pytest.mark.parametrize("name", DROPPED)
def test_a_missing_tensor_stops_the_start_by_name(folder, name):
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"(?s){name}"):
        LLM(str(folder))


@pytest.mark.case("J2")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("model.layers.0.extra.weight", 3), r"1 unexpected \(model.layers.0.extra.weight\)"),
        (put("model.layers.2.mlp.up_proj.weight", 96, 64), "unexpected.*model.layers.2.mlp.up_proj.weight"),
        (put("model.norm.weight", 65), r"model.norm.weight is \[65\], not \[64\]"),
        (put("model.layers.0.self_attn.q_proj.weight", 64, 32), "mis-shaped.*q_proj"),
        (put("model.layers.0.mlp.down_proj.bias", 64), "unexpected.*down_proj.bias"),
    ],
    ids=["unknown-name", "layer-too-many", "vector-shape", "matrix-shape", "bias-that-config-denies"],
)
def test_an_unexpected_or_misshapen_tensor_stops_the_start_by_name(folder, change, words):
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=words):
        LLM(str(folder))


EXPERT = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w3.weight",
    "qwen3_moe": "model.layers.0.mlp.experts.7.down_proj.weight",
}
ROUTER = {"mixtral": "model.layers.0.block_sparse_moe.gate.weight", "qwen3_moe": "model.layers.1.mlp.gate.weight"}


@pytest.mark.case("J2")
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("name", [*EXPERT.values(), *ROUTER.values()])
def test_a_missing_tensor_of_one_expert_stops_the_start_by_name(name, quantize, tmp_path):
    folder = save_checkpoint(tiny_model("mixtral" if "block_sparse" in name else "qwen3_moe"), tmp_path)
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"1 missing \\({name}\\)$|1 missing \\({name}\\), wanted"):
        LLM(str(folder), quantize=quantize)


@pytest.mark.case("J2")
@pytest.mark.parametrize("family", EXPERT)
def test_an_expert_too_many_or_of_another_shape_stops_the_start_by_name(family, tmp_path):
    folder = save_checkpoint(tiny_model(family), tmp_path)
    name = EXPERT[family]
    another = name.replace(".experts.", ".experts.1")

    def change(tensors):
        tensors[another], tensors[name] = tensors[name], tensors[name][:, :-1]

    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=rf"1 unexpected \({another}\); 1 mis-shaped \({name} is "):
        LLM(str(folder))


@pytest.mark.parametrize("is_sound", [True, False])
def test_the_garbage_collector_runs_again_after_a_load(folder, is_sound):
    if not is_sound:
        change_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with nullcontext() if is_sound else pytest.raises(CheckpointError):
        LLM(str(folder), max_kv_tokens=64)
    assert gc.isenabled()


def test_all_mismatches_are_listed_at_once(folder):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["strange"] = torch.zeros(1)

    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=r"1 missing \(model.norm.weight\); 1 unexpected \(strange\)"):
        LLM(str(folder))


def test_old_rotary_buffers_are_left_out(folder):
    change_tensors(folder, put("model.layers.0.self_attn.rotary_emb.inv_freq", 8))
    LLM(str(folder), max_kv_tokens=64)


def test_parameters_are_nan_until_loaded_and_none_is_left(folder, monkeypatch):
    seen = []

    def load(source, slots, progress=None):
        seen.extend(slots)
        assert all(slot.target.isnan().all() for slot in seen)

    monkeypatch.setattr("rapid_llm.build.load_weights", load)
    build_engine(EngineConfig(str(folder), "cpu", max_kv_tokens=64), open_checkpoint(folder), StartupLedger())
    monkeypatch.undo()
    engine = build_engine(EngineConfig(str(folder), "cpu", max_kv_tokens=64), open_checkpoint(folder), StartupLedger())
    assert len(seen) == 21
    assert not any(slot.target.isnan().any() for slot in engine.worker.model.weights())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_files_load_exactly(tmp_path, dtype):
    oracle = tiny_llama().to(dtype)
    folder = save_checkpoint(oracle, tmp_path)
    engine = build_engine(EngineConfig(str(folder), "cpu", max_kv_tokens=64), open_checkpoint(folder), StartupLedger())
    state = oracle.state_dict()
    for slot in engine.worker.model.weights():
        assert torch.equal(slot.target, state[slot.name].float()), slot.name


def test_progress_ends_at_every_byte_and_tells_the_rate(folder):
    calls = []
    llm = LLM(str(folder), max_kv_tokens=64, progress=lambda *call: calls.append(call))
    done, total, _ = calls[-1]
    assert done == total == sum(tensor.numel() * 4 for tensor in load_file(folder / "model.safetensors").values())
    assert any("GB/s" in note for note in llm.ledger.notes)


def test_shards_load_as_one_file_does(tmp_path):
    oracle = tiny_llama()
    folder = save_checkpoint(oracle, tmp_path, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    engine = build_engine(EngineConfig(str(folder), "cpu", max_kv_tokens=64), open_checkpoint(folder), StartupLedger())
    state = oracle.state_dict()
    for slot in engine.worker.model.weights():
        assert torch.equal(slot.target, state[slot.name]), slot.name
