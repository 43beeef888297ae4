"""A GGUF file of each architecture, written from a tiny transformers model as the converter does, gives that model's logits."""

import math
import struct

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from rapid_llm.build import build_engine
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.config import EngineConfig
from rapid_llm.ledger import StartupLedger
from tests.checkpoint.writers import BYTE_TOKENS, F32, Gguf, GgufTensor, gguf_name, permuted
from tests.e2e.test_families_match_transformers import LLAMA3, YARN, assert_close, run_model
from tests.tiny_model import SPECIAL, expected_logits, tiny_model

GGUF_NAMES = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}
PROMPT = [72, 101, 108, 108, 111, 32, 226, 156, 147, 5, 9, 200, 31, 64, 17, 3, 77, 12, 90, 33, 256]


def written(family, model, folder, *tensors, types=None, **keys):
    """A GGUF file of ``model``, with further tensors and metadata keys below the architecture's name.

    ``types`` are ggml types by a part of a tensor's GGUF name; all others are F32.
    """
    config, arch = model.config, GGUF_NAMES.get(family, family)
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if family in GGUF_NAMES:
        metadata |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    if family == "qwen3_moe":
        metadata["expert_feed_forward_length"] = config.moe_intermediate_size
    metadata |= keys
    stored = [
        stored_as(gguf_name(name), in_order(arch, name, values.numpy()).astype("<f4"), types or {})
        for name, values in apart(model.state_dict()).items()
        if name != "lm_head.weight" or not config.tie_word_embeddings
    ]
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*BYTE_TOKENS, *SPECIAL],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(SPECIAL),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 257,
    }
    named = {f"{arch}.{key}": value for key, value in metadata.items()}
    path = folder / "model.gguf"
    path.write_bytes(Gguf({"general.architecture": arch} | named | tokenizer, [*stored, *tensors]).to_bytes())
    return path


def stored_as(name, values, types):
    kind = GGMLQuantizationType[next((kind for part, kind in types.items() if part in name), "F32")]
    data = values if kind == GGMLQuantizationType.F32 else quantize(values, kind)
    return GgufTensor(name, values.shape, kind.value, data.tobytes())


def apart(tensors):
    """Gate and up of the experts as the converter stores them: a stack each."""
    names = {}
    for name, values in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = values.chunk(2, 1)
            names |= {name.replace("gate_up_proj", "gate_proj.weight"): gate, name.replace("gate_up_proj", "up_proj.weight"): up}
        else:
            names[name if name.endswith((".weight", ".bias")) else f"{name}.weight"] = values
    return names


def in_order(arch, name, values):
    """Rows as the converter stores them: those of q and k in another order, in llama files only."""
    return np.ascontiguousarray(permuted(name, values) if arch == "llama" else values)


def llama3_divisors(head_dim):
    """The tensor that stands for llama3's scaling in a GGUF file: what every frequency is divided by."""
    divisors = []
    for i in range(head_dim // 2):
        turns = LLAMA3["original_max_position_embeddings"] / (2 * math.pi * 1e4 ** (2 * i / head_dim))
        kept = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        divisors.append(1 / (kept + (1 - kept) / LLAMA3["factor"]))
    return GgufTensor("rope_freqs.weight", (len(divisors),), F32, struct.pack(f"<{len(divisors)}f", *divisors))


def same_logits(path, oracle):
    expected = expected_logits(oracle, PROMPT)
    [first, second] = run_model(path, [[(0, 0, PROMPT[:-1])], [(0, len(PROMPT) - 1, PROMPT[-1:])]])
    assert_close(first[0], expected[-2])
    assert_close(second[0], expected[-1])


@pytest.mark.case("J10")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_written_from(family, tied, tmp_path):
    oracle = tiny_model(family, tie_word_embeddings=tied, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    same_logits(written(family, oracle, tmp_path), oracle)


def test_layers_without_experts_are_found_in_the_tensor_table(tmp_path):
    oracle = tiny_model("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])
    same_logits(written("qwen3_moe", oracle, tmp_path), oracle)


@pytest.mark.parametrize("said", [True, False])
def test_weights_of_experts_sum_to_1_unless_the_file_says_otherwise(said, tmp_path):
    oracle = tiny_model("qwen3_moe", norm_topk_prob=not said)
    keys = {} if not said else {"expert_weights_norm": False}
    same_logits(written("qwen3_moe", oracle, tmp_path, **keys), oracle)
    with pytest.raises(AssertionError):  # and it matters
        same_logits(written("qwen3_moe", oracle, tmp_path, expert_weights_norm=said), oracle)


@pytest.mark.parametrize(
    ("gate", "up", "down", "kept"),
    [
        ("Q8_0", "Q8_0", "Q8_0", ("Q8_0", "Q8_0")),
        ("Q4_0", "Q4_0", "Q4_0", ("Q4_0", "Q4_0")),
        ("Q4_1", "Q4_0", "Q4_0", None),  # no op for experts takes minima
        ("Q4_0", "Q4_0", "Q8_0", None),
        ("Q8_0", "Q8_0", "F32", None),
    ],
)
def test_blocks_of_experts_are_kept_where_one_op_multiplies_by_all_of_them(gate, up, down, kept, tmp_path):
    path = written(
        "mixtral", tiny_model("mixtral"), tmp_path, types={"gate_exps": gate, "up_exps": up, "down_exps": down, "attn_q.": "Q8_0"}
    )
    steps = [[(0, 0, PROMPT[:-1])], [(0, len(PROMPT) - 1, PROMPT[-1:])]]
    for one, other in zip(run_model(path, steps, gguf="keep"), run_model(path, steps, gguf="dequantise"), strict=True):
        assert_close(one, other)
    source = open_checkpoint(path)
    model = build_engine(EngineConfig(str(path), "cpu", gguf="keep", max_kv_tokens=64), source, StartupLedger()).worker.model
    forms = [stack.format for stack in (model.layers[1].mlp.gate_up, model.layers[1].mlp.down)]
    assert forms == [None, None] if kept is None else tuple(form.kind for form in forms) == kept


def test_biases_are_found_in_the_tensor_table(tmp_path):
    oracle = tiny_model("llama", attention_bias=True, mlp_bias=True)
    same_logits(written("llama", oracle, tmp_path), oracle)


def test_a_tensor_of_divisors_scales_the_rotary_frequencies_as_llama3_does(tmp_path):
    oracle = tiny_model("llama", rope_parameters=LLAMA3)
    same_logits(written("llama", oracle, tmp_path, llama3_divisors(16)), oracle)


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        pytest.param(
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            id="linear",
        ),
        pytest.param(
            YARN,
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
            id="yarn",
        ),
    ],
)
def test_rope_scalings_in_metadata_are_followed(rope, keys, tmp_path):
    oracle = tiny_model("qwen2", head_dim=16, rope_parameters=rope)
    same_logits(written("qwen2", oracle, tmp_path, **keys), oracle)
    with pytest.raises(AssertionError):  # and they matter
        same_logits(written("qwen2", oracle, tmp_path), oracle)


def test_the_oracle_is_not_fooled_by_the_order_of_rows(tmp_path):
    oracle = tiny_model("llama")
    path = written("llama", oracle, tmp_path)
    renamed = path.read_bytes().replace(b"llama", b"qwen2")
    other = tmp_path / "other.gguf"
    other.write_bytes(renamed)
    with pytest.raises(AssertionError):
        same_logits(other, oracle)
