"""Over a real model and the real worker: pages that are shared, lost and found again change no answer."""

import math

import pytest

from rapid_llm import LLM, SamplingParams
from rapid_llm.config import PAGE_SIZE
from rapid_llm.engine.step_time import StepLoad
from tests.tiny_model import save_checkpoint, tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=PAGE_SIZE + 3, ignore_eos=True, logprobs=2)
TOLERANCE = 1e-4  # nats: float32 sums over chunks of other sizes are taken in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain(folder):
    """The same model with room for everybody and nothing shared."""
    return load(folder, prefix_cache=False)


def load(folder, **options):
    return LLM(str(folder), device="cpu", **options)


def prompt_of(length, first=0):
    return [(7 * i + i * i + first) % 256 for i in range(length)]


def assert_same(output, expected):
    """Text, ids, log-probs, reasons and counts."""
    mine, its = output.outputs[0], expected.outputs[0]
    assert (mine.text, mine.token_ids, mine.finish_reason, mine.stop_reason) == (
        its.text,
        its.token_ids,
        its.finish_reason,
        its.stop_reason,
    )
    assert output.prompt_token_ids == expected.prompt_token_ids
    for entry, its_entry in zip(mine.logprobs or [], its.logprobs or [], strict=True):
        assert {token: one.logprob for token, one in entry.items()} == pytest.approx(
            {token: one.logprob for token, one in its_entry.items()}, abs=TOLERANCE
        )


@pytest.mark.case("I15")
@pytest.mark.parametrize("length", [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE])
def test_a_prompt_sent_twice_and_then_one_longer_is_answered_as_without_a_cache(folder, plain, length):
    llm = load(folder)
    prompt = prompt_of(length)
    found = []
    for ids in (prompt, prompt, [*prompt, 9]):
        [output], [expected] = llm.generate([ids], GREEDY), plain.generate([ids], GREEDY)
        assert_same(output, expected)
        found.append(output.num_cached_tokens)
        assert expected.num_cached_tokens == 0
    assert found == [0, (length - 1) // PAGE_SIZE * PAGE_SIZE, length // PAGE_SIZE * PAGE_SIZE]


@pytest.mark.case("I15")
def test_a_prompt_that_goes_on_from_an_answer_finds_it(folder, plain):
    llm = load(folder)
    [first] = llm.generate([prompt_of(20)], GREEDY)
    ids = [*first.prompt_token_ids, *first.outputs[0].token_ids, 5]
    [output], [expected] = llm.generate([ids], GREEDY), plain.generate([ids], GREEDY)
    assert_same(output, expected)
    assert output.num_cached_tokens == (20 + GREEDY.max_tokens - 1) // PAGE_SIZE * PAGE_SIZE


def test_a_crowd_that_begins_alike_is_answered_as_each_alone(folder, plain):
    llm = load(folder, max_batched_tokens=48)
    prompts = [[*prompt_of(70), *prompt_of(i + 1, first=i)] for i in range(4)]
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same(output, plain.generate([prompt], GREEDY)[0])
    assert [output.num_cached_tokens for output in outputs] == [0, 64, 64, 64]


def test_steps_of_a_real_worker_teach_what_a_chunk_takes(folder):
    llm = load(folder, max_step_ms=1e-3, max_batched_tokens=128)
    llm.generate([prompt_of(100)], GREEDY)
    step_time = llm._engine.scheduler.step_time
    load_of_a_chunk = StepLoad()
    load_of_a_chunk.add(0, 100)
    assert 0 < step_time.seconds(load_of_a_chunk) < math.inf
    assert step_time.tokens_within(1e-6, StepLoad(), 0, 100) < 100


KINDS = [
    SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=70, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=4, max_tokens=70, stop=["zz", "\x00"], ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=70, logprobs=1, ignore_eos=True),
]


@pytest.mark.case("I14")
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("forced", [False, True], ids=["outgrown", "three-times-each"])
def test_a_pool_too_small_for_everybody_changes_no_answer(folder, plain, monkeypatch, prefix_cache, forced):
    llm = load(folder, max_kv_tokens=7 * PAGE_SIZE, max_batched_tokens=24, prefix_cache=prefix_cache)
    engine, run_step, counts = llm._engine, llm._engine.step, {}

    def step():
        outputs = run_step()
        for request in list(engine.scheduler.running):
            if forced and request.num_preemptions < 3:
                engine.scheduler.preempt(request)
            counts[request.id] = request.num_preemptions
        return outputs

    monkeypatch.setattr(engine, "step", step)
    prompts = [prompt_of(18 + i, first=i) for i in range(len(KINDS))]
    outputs = llm.generate(prompts, KINDS)
    for output, expected in zip(outputs, plain.generate(prompts, KINDS), strict=True):
        assert_same(output, expected)
    assert min(counts.values()) >= 3 if forced else engine.scheduler.num_preemptions >= 2
    assert engine.scheduler.allocator.num_free == 7
