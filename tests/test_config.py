"""Values out of range are refused by name, wherever they come from, and sizes are settled once."""

import math

import pytest

from rapid_llm.config import EngineConfig, SamplingParams, resolve
from rapid_llm.errors import ConfigError, RequestError

BAD = [
    ("temperature", [-0.1, math.nan, math.inf, "hot", None, True]),
    ("top_p", [0.0, -1.0, 1.01, math.nan, None]),
    ("min_p", [-0.1, 1.1, math.nan]),
    ("top_k", [-2, 1.5, None, True]),
    ("seed", [2**63, -(2**63) - 1, 1.0, "7"]),
    ("max_tokens", [0, -1, 1.5, True]),
    ("logprobs", [-1, 21, 1.0]),
    ("stop", ["", [""], ["a", ""], [3], 3]),
    ("stop_token_ids", [[-1], ["a"], 3, [1.5]]),
    ("ignore_eos", [1, None]),
    ("n", [0, -1, 129, 1.0, None, True]),
    ("min_tokens", [-1, 1.5, None, True]),
    ("presence_penalty", [-2.01, 2.01, math.nan, None, "much"]),
    ("frequency_penalty", [-2.01, 2.01, math.inf, True]),
    ("repetition_penalty", [0.0, -1.0, 0.009, 101.0, math.nan, None]),
    ("logit_bias", [3, [1, 2], {-1: 0.0}, {"AI": 1.0}, {1.5: 1.0}, {True: 1.0}, {3: 100.5}, {3: -math.inf}, {3: "x"}, {3: None}]),
    ("bad_words", ["", [""], ["a", 3], 3, {"a": 1}]),
    ("logprobs_mode", ["cooked", None, 1]),
    ("prompt_logprobs", [-1, 21, 1.0, True]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD for value in values])
def test_a_sampling_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=f"{name} is out of range: got .*, wanted .*; "):
        SamplingParams(**{name: value})


@pytest.mark.case("H2")
def test_edges_of_the_ranges_are_allowed():
    params = SamplingParams(
        temperature=0, top_p=1, top_k=10_000_000, min_p=1.0, seed=-(2**63), max_tokens=1, logprobs=20, stop="x"
    )
    SamplingParams(n=128, max_tokens=5, min_tokens=5, presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.01)
    assert SamplingParams(logit_bias={0: -100, 5: 100.0}, bad_words="ab", prompt_logprobs=0).bad_strings == ("ab",)
    assert params.stop_strings == ("x",)
    assert SamplingParams(top_k=-1, stop=["a", "b"]).stop_strings == ("a", "b")


def test_a_mode_of_logprobs_without_logprobs_is_refused():
    with pytest.raises(RequestError, match="logprobs_mode has no effect alone"):
        SamplingParams(logprobs_mode="processed")


def test_params_can_be_hashed_and_do_not_change_with_the_dict_they_were_given():
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert params.logit_bias == {3: 1.0}
    assert len({params, SamplingParams(logit_bias={3: 1.0})}) == 1
    assert params.with_defaults(temperature=0.5).logit_bias == {3: 1.0}


def settle(config, context=1000, free_bytes=10**9, is_cpu=False):
    return resolve(config, context=context, kv_bytes_per_token=1000, free_bytes=free_bytes, is_cpu=is_cpu)


def test_the_pool_takes_its_share_of_the_free_memory_and_no_more_than_is_of_use():
    assert settle(EngineConfig(memory_fraction=0.5), free_bytes=3_200_000).num_pages == 100
    assert settle(EngineConfig(max_num_seqs=2)).num_pages == 2 * 63
    assert settle(EngineConfig(), is_cpu=True).num_pages == 4 * 63


def test_a_pool_smaller_than_the_context_is_allowed_and_rounded_up_to_pages():
    assert settle(EngineConfig(max_kv_tokens=33)).max_kv_tokens == 48


def test_a_step_is_bounded_to_15_ms_on_a_gpu_and_not_on_a_cpu_unless_asked_for():
    assert settle(EngineConfig()).max_step_ms == 15
    assert settle(EngineConfig(), is_cpu=True).max_step_ms == math.inf
    assert settle(EngineConfig(max_step_ms=40), is_cpu=True).max_step_ms == 40
    assert settle(EngineConfig(max_step_ms=math.inf)).max_step_ms == math.inf


def test_the_prefix_cache_is_on_unless_it_is_turned_off():
    assert settle(EngineConfig()).prefix_cache
    assert not settle(EngineConfig(prefix_cache=False)).prefix_cache


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_step_ms", value) for value in (0, -1.0, math.nan, "15", True)],
        *[("prefix_cache", 1), ("prefix_cache", None), ("deterministic", 1), ("offline", "yes")],
    ],
)
def test_an_engine_setting_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name} is out of range: got .*, wanted .*; "):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    ("config", "free_bytes", "words"),
    [
        (EngineConfig(max_model_len=1001), 10**9, "made for"),
        (EngineConfig(max_kv_tokens=10**7), 10**9, "does not fit"),
        (EngineConfig(), 1000, "no room for the KV pool"),
    ],
    ids=["context", "pool", "no-page"],
)
def test_what_cannot_be_settled_is_refused(config, free_bytes, words):
    with pytest.raises(ConfigError, match=words):
        settle(config, free_bytes=free_bytes)
