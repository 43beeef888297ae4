"""``kv_dtype="fp8_e4m3"``: the same answers whatever is shared, recomputed or run beside; close to those of a plain pool."""

import pytest

from rapid_llm import LLM, ConfigError, SamplingParams
from rapid_llm.entrypoints.cli import main
from tests.tiny_model import save_checkpoint, tiny_model

SHARED = [(7 * i) % 256 for i in range(64)]
PROMPTS = [SHARED + [(11 * number + 5 * i) % 256 for i in range(20)] for number in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request, tmp_path_factory):
    return str(save_checkpoint(tiny_model(request.param), tmp_path_factory.mktemp("tiny")))


def start(folder, **options):
    return LLM(folder, device="cpu", **{"kv_dtype": "fp8_e4m3", "max_kv_tokens": 1024} | options)


def texts(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_texts_are_the_same_with_the_prefix_cache_and_without(folder):
    shared, alone = start(folder), start(folder, prefix_cache=False)
    first = shared.generate(PROMPTS[:1], GREEDY)
    found = shared.generate(PROMPTS, GREEDY)
    assert all(output.num_cached_tokens >= 64 for output in found)
    assert texts(found) == texts(alone.generate(PROMPTS, GREEDY))
    assert texts(first) == texts(found[:1])


def test_texts_are_the_same_when_sequences_give_way_to_each_other(folder):
    wide, narrow = start(folder), start(folder, max_kv_tokens=192, prefix_cache=False, max_batched_tokens=48)
    assert texts(narrow.generate(PROMPTS, GREEDY)) == texts(wide.generate(PROMPTS, GREEDY))


def test_one_sequence_is_answered_from_its_recorded_step_as_by_the_layers(folder):
    recorded, by_layers = start(folder), start(folder)
    by_layers._engine.worker.forward.enabled = False
    assert texts(recorded.generate(PROMPTS[:1], GREEDY)) == texts(by_layers.generate(PROMPTS[:1], GREEDY))


def test_logprobs_stay_close_to_those_of_a_plain_pool(folder):
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    rounded, plain = (start(folder, kv_dtype=kv_dtype).generate(PROMPTS, params) for kv_dtype in ("fp8_e4m3", None))
    differences = []
    for one, other in zip(rounded, plain, strict=True):
        pairs = zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)
        differences += [abs(next(iter(a.values())).logprob - next(iter(b.values())).logprob) for a, b in pairs]
    assert 0 < sum(differences) / len(differences) < 0.1  # it is rounded, and by no more than e4m3's three bits


def test_deterministic_is_kept(folder):
    llm = start(folder, deterministic=True)
    crowd = llm.generate(PROMPTS, GREEDY)
    alone = [start(folder, deterministic=True, max_batched_tokens=16).generate([prompt], GREEDY)[0] for prompt in PROMPTS[:2]]
    assert [each.outputs[0].logprobs for each in crowd[:2]] == [each.outputs[0].logprobs for each in alone]


@pytest.mark.parametrize("kv_dtype", ["fp8", "auto", "int8", 8])
def test_an_unknown_kv_dtype_is_refused_with_those_that_are_known(folder, kv_dtype):
    with pytest.raises(ConfigError, match=r"kv_dtype is not supported: got .*, wanted fp8_e4m3"):
        start(folder, kv_dtype=kv_dtype)


def test_the_flag_has_the_settings_name(folder, capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--kv-dtype", "fp8", "x"])
    assert "fp8_e4m3" in capsys.readouterr().err
