import logging
import math
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.errors import CheckpointError
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.experts import ExpertNames, Experts
from rapid_llm.models.rope_scaling import RopeScaling
from tests.checkpoint.writers import gguf_metadata, llama_config

HF, GGUF = Path("config.json"), Path("model.gguf")


def from_hf(**changes):
    return ModelConfig.from_hf(llama_config(**changes), HF)


def from_gguf(**changes):
    return ModelConfig.from_gguf(gguf_metadata(**changes), GGUF)


def refusal_of(make, **changes):
    with pytest.raises(CheckpointError) as refusal:
        make(**changes)
    return str(refusal.value)


def test_sizes_are_read_from_config_json():
    config = from_hf(head_dim=32, rope_theta=5e5, attention_bias=True, mlp_bias=True, bos_token_id=1, eos_token_id=[2, 3])
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        bos_token_id=1,
        eos_token_ids=(2, 3),
    )


def test_both_kinds_of_file_give_the_same_sizes():
    hf, gguf = from_hf(rms_norm_eps=0.5), from_gguf(**{"llama.attention.layer_norm_rms_epsilon": 0.5})
    assert hf == gguf


def test_absent_keys_take_the_defaults_of_the_llama_family():
    absent = (
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
        "max_position_embeddings",
        "tie_word_embeddings",
        "eos_token_id",
    )
    config = from_hf(**dict.fromkeys(absent, ...))
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.rope_theta, config.max_position_embeddings, config.tie_word_embeddings) == (10000.0, 2048, False)
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rope_theta": 7.0}, id="top-level"),
        pytest.param({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, id="rope_parameters"),
        pytest.param({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 7, "rope_type": "default"}}, id="both-agree"),
        pytest.param({"rope_theta": 7.0, "rope_scaling": None}, id="null-scaling"),
        pytest.param({"rope_theta": 7.0, "rope_scaling": {"type": "default"}}, id="default-scaling"),
    ],
)
def test_the_rotary_base_is_found_wherever_an_export_puts_it(changes):
    assert from_hf(**changes).rope_theta == 7.0


@pytest.mark.parametrize("kind", ["longrope", "su", "mrope", 5, ["linear"]])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_an_unsupported_rope_type_is_refused_by_name(kind, key, type_key):
    message = refusal_of(from_hf, **{key: {type_key: kind, "factor": 8.0}})
    assert f"config.json: rope type {kind!r} in {key!r} is not supported" in message


@pytest.mark.parametrize(
    "scaling",
    [
        pytest.param({"factor": 2.0}, id="no-type"),
        pytest.param({"rope_type": "default", "partial_rotary_factor": 0.5}, id="partial"),
        pytest.param({"full_attention": {"rope_type": "linear"}}, id="by-layer-type"),
        pytest.param("linear", id="string"),
        pytest.param({"rope_type": "default", "rope_theta": "big"}, id="bad-theta"),
    ],
)
def test_rope_settings_that_are_not_understood_are_refused(scaling):
    refusal_of(from_hf, rope_theta=..., rope_parameters=scaling)


HF_SCALINGS = [
    pytest.param({"rope_type": "linear", "factor": 2.0}, RopeScaling("linear", 2.0, 128), 128, id="linear"),
    pytest.param({"type": "dynamic", "factor": 4.0}, RopeScaling("dynamic", original_context=128), 128, id="dynamic"),
    pytest.param(
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        RopeScaling("llama3", 8.0, 32, 1.0, 4.0),
        128,
        id="llama3",
    ),
    pytest.param(
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.5, "truncate": False},
        RopeScaling("yarn", 4.0, 128, attention_factor=1.5, truncate=False),
        512,
        id="yarn-past-its-max-positions",
    ),
    pytest.param(
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32, "beta_fast": 16, "mscale": None},
        RopeScaling("yarn", 4.0, 32, beta_fast=16.0, attention_factor=0.1 * math.log(4) + 1),
        128,
        id="yarn-factor-from-the-positions",
    ),
    pytest.param(
        {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 1.0},
        RopeScaling("yarn", 4.0, 128, attention_factor=(0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        512,
        id="yarn-two-weights",
    ),
]


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("values", "scaling", "context"), HF_SCALINGS)
def test_rope_scalings_are_read_with_their_defaults_settled(key, values, scaling, context):
    config = from_hf(**{key: values})
    assert (config.rope_scaling, config.context) == (scaling, context)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        pytest.param({"rope_type": "linear"}, "'factor' cannot be used: got no such key", id="no-factor"),
        pytest.param({"rope_type": "linear", "factor": -1}, "'factor' cannot be used: got -1", id="negative"),
        pytest.param(
            {"rope_type": "linear", "factor": 2.0, "beta_fast": 2}, "keys that are not supported: got beta_fast", id="other-key"
        ),
        pytest.param({"rope_type": "llama3", "factor": 8.0}, "'low_freq_factor' cannot be used: got no such key", id="no-bounds"),
        pytest.param(
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "'high_freq_factor' cannot be used: got 4.0, wanted more than low_freq_factor",
            id="bounds-crossed",
        ),
        pytest.param({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}, "'beta_fast'", id="betas-crossed"),
        pytest.param({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "'truncate' cannot be used: got 1", id="flag"),
        pytest.param({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "'rope_theta'", id="base-without-logarithm"),
        pytest.param({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "rope type 'yarn'", id="two-types"),
    ],
)
def test_a_rope_scaling_that_cannot_be_followed_is_refused(values, told):
    assert told in refusal_of(from_hf, rope_theta=..., rope_scaling={"rope_theta": 1e4, **values})


def test_two_rope_scalings_that_differ_are_refused():
    linear, yarn = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}
    message = refusal_of(from_hf, rope_scaling=linear, rope_parameters=yarn)
    assert "the rope scaling is given twice and differs" in message


@pytest.mark.parametrize(
    ("keys", "scaling", "context"),
    [
        pytest.param({"scaling.type": "none"}, None, 128, id="none"),
        pytest.param({"scaling.type": "linear", "scaling.factor": 1.0}, None, 128, id="factor-of-one"),
        pytest.param({"scaling.type": "linear", "scaling.factor": 4.0}, RopeScaling("linear", 4.0, 128), 128, id="linear"),
        pytest.param({"scale_linear": 4.0}, RopeScaling("linear", 4.0, 128), 128, id="old-linear"),
        pytest.param(
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32},
            RopeScaling("yarn", 4.0, 32, attention_factor=0.1 * math.log(4) + 1),
            128,
            id="yarn",
        ),
    ],
)
def test_gguf_rope_scalings_are_read(keys, scaling, context):
    config = from_gguf(**{f"llama.rope.{key}": value for key, value in keys.items()})
    assert (config.rope_scaling, config.context) == (scaling, context)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"scaling.type": "longrope"}, "scaling.type"),
        ({"scaling.factor": 4.0}, "scaling.factor"),
        ({"scaling.type": "yarn", "scaling.factor": "big"}, "scaling.factor"),
        ({"scaling.type": "yarn", "scaling.factor": 2.0, "scaling.yarn_ext_factor": 0.5}, "scaling.yarn_ext_factor"),
    ],
)
def test_a_gguf_rope_scaling_that_cannot_be_followed_is_refused_by_key(keys, key):
    message = refusal_of(from_gguf, **{f"llama.rope.{name}": value for name, value in keys.items()})
    assert f"model.gguf: key 'llama.rope.{key}' cannot be used" in message


@pytest.mark.parametrize(
    ("kind", "changes", "window"),
    [
        ("llama", {"sliding_window": None}, None),
        ("llama", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {}, 4096),  # what transformers takes for an absent key
        ("mistral", {"sliding_window": 64, "layer_types": ["full_attention", "full_attention"]}, None),
        ("mistral", {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, 64),
        ("qwen2", {"sliding_window": 64}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 64),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, 64),
        ("qwen3", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, None),
    ],
)
def test_a_sliding_window_counts_where_some_layer_has_it(kind, changes, window):
    assert from_hf(model_type=kind, architectures=..., **changes).sliding_window == window


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": -4},
        {"sliding_window": "all"},
        {"use_sliding_window": 0},
        {"layer_types": 5},
        {"layer_types": ["full_attention", "chunked_attention"]},
        {"layer_types": ["sliding_attention"], "sliding_window": None},
        {"sliding_window": 64, "max_window_layers": "few"},
    ],
    ids=str,
)
def test_a_window_that_is_not_understood_is_refused_by_key(changes):
    assert "cannot be used" in refusal_of(from_hf, **changes)


def test_a_gguf_window_counts_too():
    assert from_gguf(**{"llama.attention.sliding_window": 0}).sliding_window is None
    assert from_gguf(**{"llama.attention.sliding_window": 64}).sliding_window == 64


@pytest.mark.parametrize(
    ("kind", "changes", "biases", "qk_norm"),
    [
        ("llama", {}, (False, False, False), False),
        ("llama", {"attention_bias": True}, (True, True, False), False),
        ("mistral", {"attention_bias": True}, (False, False, False), False),
        ("qwen2", {}, (True, False, False), False),
        ("qwen3", {}, (False, False, False), True),
        ("qwen3", {"attention_bias": True, "mlp_bias": True}, (True, True, False), True),
    ],
)
def test_biases_and_norms_are_those_of_the_architecture(kind, changes, biases, qk_norm):
    config = from_hf(model_type=kind, architectures=..., **changes)
    assert ((config.qkv_bias, config.o_bias, config.mlp_bias), config.qk_norm) == (biases, qk_norm)


@pytest.mark.parametrize(
    ("kind", "kv_heads", "head_dim"), [("llama", 32, 2), ("mistral", 8, 2), ("qwen2", 32, 2), ("qwen3", 32, 128)]
)
def test_absent_keys_take_the_defaults_of_their_architecture(kind, kv_heads, head_dim):
    config = from_hf(model_type=kind, architectures=..., num_key_value_heads=..., num_attention_heads=32, head_dim=...)
    assert (config.num_kv_heads, config.head_dim) == (kv_heads, head_dim)


@pytest.mark.parametrize(("kind", "theta"), [("llama", 1e4), ("mixtral", 1e6), ("qwen3_moe", 1e4)])
def test_an_absent_rotary_base_is_that_of_the_architecture(kind, theta):
    assert from_hf(**moe(kind, rope_theta=..., **({"num_local_experts": 0} if kind == "llama" else {}))).rope_theta == theta


def test_two_rotary_bases_that_differ_are_refused():
    message = refusal_of(from_hf, rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert "the rotary base is given twice and differs" in message


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("hidden_act", "gelu", "silu"),
        ("pretraining_tp", 2, 1),
        ("partial_rotary_factor", 0.5, 1),
        ("attn_logit_softcapping", 50.0, None),
        ("final_logit_softcapping", 30.0, None),
        ("logits_scaling", 8.0, 1.0),
        ("embedding_multiplier", 12.0, 1.0),
        ("use_qk_norm", True, False),
        ("num_local_experts", 8, 0),
        ("rope_interleaved", True, False),
        ("pretraining_tp", True, 1),
    ],
)
def test_a_key_that_changes_the_maths_is_refused_unless_it_is_neutral(key, value, neutral):
    message = refusal_of(from_hf, **{key: value})
    assert f"config.json: key {key!r} changes the maths and is not supported: got {value!r}" in message
    assert from_hf(**{key: neutral}) == from_hf()


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("rope.dimension_sections", [16, 24, 24, 0], None),
        ("expert_shared_count", 1, 0),
        ("logit_scale", 0.5, 0.0),
        ("tensor_data_layout", "Meta AI original pth", "reference"),
        ("attention.causal", False, True),
    ],
)
def test_a_gguf_key_that_changes_the_maths_is_refused_unless_it_is_neutral(key, value, neutral):
    message = refusal_of(from_gguf, **{f"llama.{key}": value})
    assert f"model.gguf: key 'llama.{key}' changes the maths and is not supported" in message
    assert from_gguf(**{f"llama.{key}": neutral}) == from_gguf()


def test_unknown_keys_are_logged_in_one_line_and_harmless_ones_are_not(caplog):
    with caplog.at_level(logging.WARNING):
        from_hf(torch_dtype="bfloat16", use_cache=True, transformers_version="5", auto_map={}, shiny=1, another=2)
    assert [record.getMessage() for record in caplog.records] == [
        "config.json: keys that this version does not know and does not follow: another, shiny"
    ]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        pytest.param("gemma3", ["Gemma3ForCausalLM"], id="other-model"),
        pytest.param("llama", ["LlamaForSequenceClassification"], id="other-head"),
        pytest.param("llama", [], id="no-class"),
        pytest.param("qwen2", ["LlamaForCausalLM"], id="class-and-type-differ"),
        pytest.param(..., ..., id="neither"),
        pytest.param(5, "LlamaForCausalLM", id="wrong-types"),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_known_ones(kind, names):
    message = refusal_of(from_hf, model_type=kind, architectures=names)
    assert "config.json: the architecture is not supported" in message
    assert "wanted llama (LlamaForCausalLM) | mistral (MistralForCausalLM)" in message
    assert "qwen3_moe (Qwen3MoeForCausalLM)" in message


@pytest.mark.parametrize(("kind", "names"), [("llama", ...), (..., ["LlamaForCausalLM"])])
def test_one_name_of_the_architecture_is_enough(kind, names):
    assert from_hf(model_type=kind, architectures=names).architecture == "llama"


@pytest.mark.parametrize("value", ["gemma3", ..., 3, ["llama"], array("i", [1, 2])])
def test_an_unknown_gguf_architecture_is_refused(value):
    metadata = {"general.architecture": value} if value is not ... else {}
    with pytest.raises(CheckpointError, match=r"model.gguf: the architecture is not supported: got general.architecture"):
        ModelConfig.from_gguf(metadata, GGUF)


SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]


@pytest.mark.parametrize("key", [*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "64", True, 2**31, [4], float("nan")])
def test_a_size_of_the_wrong_kind_is_refused_by_key(key, value):
    assert f"config.json: key {key!r} cannot be used: got {value!r}" in refusal_of(from_hf, **{key: value})


@pytest.mark.parametrize("key", SIZES)
def test_a_missing_size_is_refused_by_key(key):
    assert f"key {key!r} cannot be used: got no such key" in refusal_of(from_hf, **{key: ...})


def test_an_absurd_number_of_layers_is_refused_before_anything_is_built():
    assert "wanted an integer from 1 to 10,000" in refusal_of(from_hf, num_hidden_layers=10**6)


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [0, -1e-5, "1e-5", True, float("inf"), 10**400])
def test_a_number_of_the_wrong_kind_is_refused_by_key(key, value):
    assert f"key {key!r} cannot be used" in refusal_of(from_hf, **{key: value})


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
@pytest.mark.parametrize("value", [1, 0, "true"])
def test_a_flag_is_true_or_false(key, value):
    assert f"key {key!r} cannot be used: got {value!r}, wanted true or false" in refusal_of(from_hf, **{key: value})


def test_heads_must_divide():
    assert "the head counts do not fit: got 4 attention heads, 3 key-value heads" in refusal_of(from_hf, num_key_value_heads=3)
    assert "key 'head_dim' cannot be used: got no such key" in refusal_of(from_hf, num_attention_heads=7, num_key_value_heads=7)
    assert "head_dim is odd" in refusal_of(from_hf, head_dim=15)
    assert from_hf(num_attention_heads=7, num_key_value_heads=7, head_dim=16).head_dim == 16


@pytest.mark.parametrize("key", ["attention.value_length", "rope.dimension_count"])
def test_gguf_head_widths_must_agree(key):
    assert f"key 'llama.{key}' cannot be used: got 8, wanted the head width, 16" in refusal_of(from_gguf, **{f"llama.{key}": 8})


def test_the_vocabulary_is_counted_where_gguf_names_no_size():
    assert from_gguf(**{"llama.vocab_size": ...}).vocab_size == 257


@pytest.mark.case("J5")
@pytest.mark.parametrize(("value", "ids"), [(None, ()), (..., ()), (5, (5,)), ([5, 6], (5, 6)), ([], ())])
def test_end_ids_come_as_int_list_or_null(value, ids):
    assert from_hf(eos_token_id=value).eos_token_ids == ids


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
hf_keys = st.sampled_from(
    [*llama_config(), "head_dim", "rope_scaling", "rope_parameters", "layer_types", "attention_bias", "sliding_window"]
)
gguf_values = json_values | st.lists(st.integers(-5, 5), max_size=3).map(lambda numbers: array("i", numbers))


@given(changes=st.dictionaries(hf_keys, json_values, max_size=3))
@settings(deadline=None)
def test_any_json_gives_a_config_or_a_refusal(changes):
    try:
        config = from_hf(**changes)
    except CheckpointError:
        return
    assert config.num_heads % config.num_kv_heads == 0


@given(
    changes=st.dictionaries(
        st.sampled_from([*gguf_metadata(), "llama.rope.scaling.type", "llama.expert_count"]), gguf_values, max_size=3
    )
)
@settings(deadline=None)
def test_any_metadata_gives_a_config_or_a_refusal(changes):
    try:
        config = from_gguf(**changes)
    except CheckpointError:
        return
    assert config.num_heads % config.num_kv_heads == 0


def moe(kind="qwen3_moe", **changes):
    counts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if kind == "qwen3_moe" else {}
    return {"model_type": kind, "architectures": ..., "num_local_experts": 8} | counts | changes


def experts_of(kind, **changes):
    return from_hf(**moe(kind, **changes)).experts


def test_experts_are_read_from_config_json():
    mixtral, qwen = ExpertNames("block_sparse_moe", "w1", "w3", "w2"), ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
    assert experts_of("mixtral") == Experts(mixtral, 8, 2, 96, renormalise=True)
    assert experts_of("mixtral", num_experts_per_tok=1, num_local_experts=4) == Experts(mixtral, 4, 1, 96, renormalise=True)
    assert experts_of("qwen3_moe") == Experts(qwen, 8, 2, 32, renormalise=False)
    assert experts_of("qwen3_moe", num_local_experts=...) == experts_of("qwen3_moe", num_experts=...)
    assert experts_of("qwen3_moe", norm_topk_prob=True, moe_intermediate_size=16) == Experts(qwen, 8, 2, 16, renormalise=True)
    assert experts_of("qwen3_moe", num_experts_per_tok=..., moe_intermediate_size=...) == Experts(
        qwen, 8, 8, 768, renormalise=False
    )
    assert from_hf(model_type="qwen3", architectures=..., num_experts=0).experts is None


@pytest.mark.parametrize(
    ("step", "only", "dense"),
    [(1, None, ()), (1, [], ()), (1, [0, 3], (0, 3)), (2, [], (0, 2)), (2, [1], (0, 1, 2)), (5, [], (0, 1, 2, 3)), (1, [99], ())],
)
def test_layers_without_experts_are_told_by_step_and_list(step, only, dense):
    assert experts_of("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=step, mlp_only_layers=only).dense_layers == dense


@pytest.mark.parametrize(
    ("kind", "changes", "key"),
    [
        ("qwen3_moe", {"num_experts": ..., "num_local_experts": ...}, "num_experts"),
        ("mixtral", {"num_local_experts": ...}, "num_experts"),
        ("qwen3_moe", {"num_experts": 4}, "num_local_experts"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts"),
        ("qwen3_moe", {"num_experts": 2**30, "num_local_experts": ...}, "num_experts"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ("qwen3_moe", {"moe_intermediate_size": "32"}, "moe_intermediate_size"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers"),
    ],
)
def test_a_key_of_experts_that_cannot_be_used_is_refused_by_name(kind, changes, key):
    assert f"key {key!r} cannot be used" in refusal_of(from_hf, **moe(kind, **changes))


@pytest.mark.parametrize(
    ("key", "value"), [("shared_expert_intermediate_size", 32), ("scoring_func", "sigmoid"), ("routed_scaling_factor", 2.5)]
)
def test_routing_that_is_not_followed_is_refused(key, value):
    assert f"key {key!r} changes the maths" in refusal_of(from_hf, **moe(**{key: value}))


def test_keys_of_training_a_router_are_known(caplog):
    with caplog.at_level(logging.WARNING):
        from_hf(**moe("mixtral", output_router_logits=True, router_aux_loss_coef=0.02, router_jitter_noise=0.1))
    assert caplog.records == []


def test_keys_of_experts_say_nothing_about_a_dense_model(caplog):
    with caplog.at_level(logging.WARNING):
        from_hf(num_experts_per_tok=2, num_experts=0)
    assert [record.getMessage() for record in caplog.records] == [
        "config.json: keys that this version does not know and does not follow: num_experts_per_tok"
    ]


def test_a_llama_file_with_experts_is_mixtral():
    config = from_gguf(**{"llama.expert_count": 8, "llama.expert_used_count": 2})
    assert (config.architecture, config.intermediate_size) == ("mixtral", 96)
    assert config.experts == experts_of("mixtral")
    assert from_gguf(**{"llama.expert_count": 0}).architecture == "llama"


def test_experts_are_read_from_gguf_metadata():
    values = {key.replace("llama.", "qwen3moe."): value for key, value in gguf_metadata().items()}
    values |= {"general.architecture": "qwen3moe", "qwen3moe.expert_feed_forward_length": 32}
    values |= {"qwen3moe.expert_count": 8, "qwen3moe.expert_used_count": 2}
    assert ModelConfig.from_gguf(values, GGUF).experts == experts_of("qwen3_moe", norm_topk_prob=True)
    plain = ModelConfig.from_gguf(values | {"qwen3moe.expert_weights_norm": False}, GGUF)
    assert plain.experts == experts_of("qwen3_moe")
    for changes, key in (({"expert_count": 0}, "expert_count"), ({"expert_used_count": 9}, "expert_used_count")):
        with pytest.raises(CheckpointError, match=f"key 'qwen3moe.{key}' cannot be used"):
            ModelConfig.from_gguf(values | {f"qwen3moe.{name}": value for name, value in changes.items()}, GGUF)


@pytest.mark.parametrize(("key", "value"), [("expert_shared_count", 1), ("expert_gating_func", 2), ("expert_weights_scale", 2.5)])
def test_gguf_routing_that_is_not_followed_is_refused(key, value):
    keys = {"llama.expert_count": 8, "llama.expert_used_count": 2, f"llama.{key}": value}
    assert f"key 'llama.{key}' changes the maths" in refusal_of(from_gguf, **keys)
