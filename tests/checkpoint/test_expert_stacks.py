"""A stack of a layer's experts is read as the experts one by one, whichever file it lies in."""

import gguf as oracle
import numpy as np
import pytest

from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.errors import CheckpointError
from tests.checkpoint.writers import F32, Q8_0, Gguf, GgufTensor, gguf_metadata, llama_config, write_folder

EXPERTS, INNER, WIDTH = 3, 32, 64
QWEN = {"block": "mlp", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL = {"block": "block_sparse_moe", "gate": "w1", "up": "w3", "down": "w2"}
KINDS = {"qwen3_moe": QWEN, "mixtral": MIXTRAL}


@pytest.fixture
def stacks():
    rng = np.random.default_rng(0)
    shapes = {"gate": (EXPERTS, INNER, WIDTH), "up": (EXPERTS, INNER, WIDTH), "down": (EXPERTS, WIDTH, INNER)}
    return {part: rng.standard_normal(shape).astype(np.float32) for part, shape in shapes.items()}


def config_of(kind):
    counts = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
    return llama_config(model_type=kind, architectures=..., **counts)


def read_back(source, kind, stacks, layer=1):
    names = KINDS[kind]
    for part, values in stacks.items():
        for number in range(EXPERTS):
            name = f"model.layers.{layer}.{names['block']}.experts.{number}.{names[part]}.weight"
            assert source.tensors[name].shape == values.shape[1:]
            np.testing.assert_array_equal(source.read(name), values[number])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", ["mlp", "block"])
@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_a_folder_may_hold_gate_and_up_of_all_experts_in_one(tmp_path, stacks, kind, block, suffix):
    at = f"model.layers.1.{KINDS[kind].get(block, 'mlp')}.experts."
    router = np.ones((EXPERTS, WIDTH), np.float32)
    held = {
        at + "gate_up_proj" + suffix: np.concatenate((stacks["gate"], stacks["up"]), 1),
        at + "down_proj" + suffix: stacks["down"],
    }
    folder = write_folder(tmp_path, config=config_of(kind), tensors=held | {"model.layers.1.mlp.gate.weight": router})
    source = open_checkpoint(folder)
    read_back(source, kind, stacks)
    assert f"model.layers.1.{KINDS[kind]['block']}.gate.weight" in source.tensors
    assert len(source.tensors) == 3 * EXPERTS + 1


@pytest.mark.parametrize(("kind", "arch"), [("qwen3_moe", "qwen3moe"), ("mixtral", "llama")])
@pytest.mark.parametrize("fused", [False, True], ids=["gate-and-up", "gate-up-in-one"])
@pytest.mark.parametrize("type_id", [F32, Q8_0], ids=["F32", "Q8_0"])
def test_a_gguf_file_holds_stacks(tmp_path, stacks, kind, arch, fused, type_id):
    parts = {f"ffn_{part}_exps": values for part, values in stacks.items()}
    if fused:
        parts = {"ffn_gate_up_exps": np.concatenate((stacks["gate"], stacks["up"]), 1), "ffn_down_exps": stacks["down"]}
    stored = []
    for name, values in parts.items():
        data = values if type_id == F32 else oracle.quantize(values, oracle.GGMLQuantizationType.Q8_0)
        stored.append(GgufTensor(f"blk.1.{name}.weight", values.shape, type_id, data.tobytes()))
    router = GgufTensor("blk.1.ffn_gate_inp.weight", (EXPERTS, WIDTH), F32, bytes(EXPERTS * WIDTH * 4))
    dense = GgufTensor("blk.0.ffn_gate.weight", (96, WIDTH), F32, bytes(96 * WIDTH * 4))
    metadata = {key.replace("llama.", f"{arch}."): value for key, value in gguf_metadata().items()}
    metadata |= {"general.architecture": arch, f"{arch}.expert_count": EXPERTS, f"{arch}.expert_used_count": 2}
    file = tmp_path / "model.gguf"
    file.write_bytes(Gguf(metadata, [*stored, router, dense]).to_bytes())

    source = open_checkpoint(file)

    if type_id == Q8_0:
        kind_of = oracle.GGMLQuantizationType.Q8_0
        stacks = {part: oracle.dequantize(oracle.quantize(values, kind_of), kind_of) for part, values in stacks.items()}
    read_back(source, kind, stacks)
    assert f"model.layers.1.{KINDS[kind]['block']}.gate.weight" in source.tensors
    assert source.config.experts.dense_layers == (0,)


def test_what_is_no_stack_of_the_layer_is_left_for_the_loader_to_refuse(tmp_path, stacks):
    at = "model.layers.1.mlp.experts."
    held = {
        at + "down_proj": stacks["down"][:2],
        at + "gate_up_proj": np.zeros((EXPERTS, 3, 4), np.float32),
        at + "up_proj": np.zeros(EXPERTS, np.float32),
        "model.layers.1.other.experts.gate_proj": stacks["gate"],
    }
    assert set(open_checkpoint(write_folder(tmp_path, config=config_of("qwen3_moe"), tensors=held)).tensors) == set(held)


@pytest.mark.parametrize("single_first", [True, False])
def test_an_expert_that_stands_twice_is_refused_by_name(tmp_path, stacks, single_first):
    single = "model.layers.1.mlp.experts.2.down_proj.weight"
    held = {single: stacks["down"][2], "model.layers.1.mlp.experts.down_proj": stacks["down"]}
    held = held if single_first else dict(reversed(held.items()))
    folder = write_folder(tmp_path, config=config_of("qwen3_moe"), tensors=held)
    with pytest.raises(CheckpointError, match=r"holds what another one does: got .*\.experts\.2\.down_proj\.weight twice"):
        open_checkpoint(folder)


def test_a_dense_model_has_no_stacks(tmp_path, stacks):
    held = {"model.layers.1.mlp.experts.down_proj": stacks["down"]}
    assert list(open_checkpoint(write_folder(tmp_path, tensors=held)).tensors) == list(held)
