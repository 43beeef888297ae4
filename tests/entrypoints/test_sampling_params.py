"""Every field of SamplingParams changes the result, in every mode that a request may run in, and the same result in all."""

import dataclasses
import string
from functools import partial

import pytest

from rapid_llm import LLM, Grammar, SamplingParams
from tests.tiny_model import END_ID, save_checkpoint, tiny_llama

PROMPT, BOS_ID = "hello hello", 256
MESSAGES = [{"role": "user", "content": "hi"}]
DRAWN = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.7, "seed": 3}
GREEDY = {"max_tokens": 48, "ignore_eos": True, "temperature": 0.0}
ENDING = {"max_tokens": 8, "temperature": 0.0, "logit_bias": {END_ID: 90.0}}

# field -> what it is compared with, and what it is set to
CASES = {
    "temperature": (DRAWN, {"temperature": 0.3}),
    "top_p": (DRAWN, {"top_p": 0.1}),
    "top_k": (DRAWN, {"top_k": 2}),
    "min_p": (DRAWN, {"min_p": 0.9}),
    "seed": (DRAWN, {"seed": 4}),
    "n": (DRAWN, {"n": 3}),
    "max_tokens": (DRAWN, {"max_tokens": 19}),
    "min_tokens": (ENDING, {"min_tokens": 5}),
    "stop": (GREEDY, {"stop": list(string.ascii_letters + string.digits)}),
    "stop_token_ids": (GREEDY, {"stop_token_ids": range(200)}),
    "ignore_eos": (ENDING, {"ignore_eos": True}),
    "presence_penalty": (GREEDY, {"presence_penalty": 2.0}),
    "frequency_penalty": (GREEDY, {"frequency_penalty": 1.5}),
    "repetition_penalty": (GREEDY, {"repetition_penalty": 4.0}),
    "logit_bias": (GREEDY, {"logit_bias": {5: 100, 6: -100}}),
    "bad_words": (GREEDY | {"logit_bias": {65: 100, 66: 90}}, {"bad_words": ["b"]}),
    "logprobs": (DRAWN, {"logprobs": 2}),
    "logprobs_mode": (DRAWN | {"logprobs": 2, "top_k": 40}, {"logprobs_mode": "processed"}),
    "grammar": (DRAWN, {"grammar": Grammar("regex", "[a-f]{8,30}")}),
    "prompt_logprobs": (DRAWN, {"prompt_logprobs": 1}),
    "skip_special_tokens": (GREEDY | {"logit_bias": {BOS_ID: 100}}, {"skip_special_tokens": False}),
}


def params_of(values):
    return SamplingParams(**{name: list(value) if isinstance(value, range) else value for name, value in values.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, device="cpu", max_kv_tokens=1024, max_num_seqs=6)


@pytest.fixture(scope="module")
def overlapped(folder):
    """Each step is planned before the ids of the step before it are known, as on a GPU."""
    llm = LLM(folder, device="cpu", max_kv_tokens=1024, max_num_seqs=6)
    llm._engine.worker.depth = 1
    return llm


def generate(llm, params, prompt=PROMPT):
    return llm.generate(prompt, params)[0]


def chat(llm, params):
    return llm.chat(MESSAGES, params)[0]


def stream(llm, params, prompt=PROMPT):
    """The last output, once every delta is known to add up to its text."""
    texts = {}
    for output in llm.stream(prompt, params):
        for answer in output.outputs:
            texts[answer.index] = texts.get(answer.index, "") + answer.delta
    assert texts == {answer.index: answer.text for answer in output.outputs}
    return output


def in_a_crowd(llm, params, prompt=PROMPT):
    """Between others, some of which adjust their own logits."""
    others = [
        SamplingParams(max_tokens=9, seed=1, repetition_penalty=1.5, bad_words=["no", "bb"]),
        SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=12, seed=2, logit_bias={7: 50}, frequency_penalty=1.0, logprobs=3),
    ]
    return llm.generate(["one", "another one", prompt, "x"], [*others[:2], params, others[2]])[2]


def preempted(llm, params, prompt=PROMPT):
    """As one of three, which loses its pages once it has produced something."""
    engine, requests = llm._engine, []
    add, step = engine.add, engine.step

    def preempting_step():
        for request in requests[2:]:
            if request.slot is not None and len(request.token_ids) > request.prompt_len + 2 and not request.num_preemptions:
                engine.scheduler.preempt(request)
        return step()

    engine.add, engine.step = lambda request: (requests.append(request), add(request)), preempting_step
    try:
        long = SamplingParams(max_tokens=33, temperature=0.0, ignore_eos=True)
        output = llm.generate(["y" * 47, "z" * 47, prompt], [long, long, params])[2]
    finally:
        del engine.add, engine.step
    if any(len(answer.token_ids) > 3 for answer in output.outputs):
        assert any(request.num_preemptions for request in requests[2:])
    return output


def several(llm, params):
    """All answers but the first, which is the one that comes alone."""
    output = generate(llm, dataclasses.replace(params, n=params.n + 1))
    assert len(output.outputs) == params.n + 1
    return dataclasses.replace(output, outputs=output.outputs[1:])


MODES = {
    "generate": generate,
    "stream": stream,
    "chat": chat,
    "stream of a chat": partial(stream, prompt=MESSAGES),
    "one of several": several,
    "in a crowd": in_a_crowd,
    "preempted": preempted,
    "overlapped": in_a_crowd,
    "overlapped stream": stream,
}


def seen(output):
    """Everything that a user sees of an output but its id."""
    answers = [
        (answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason, answer.logprobs) for answer in output.outputs
    ]
    return answers, output.prompt_logprobs, output.error


def run(mode, params, llm, overlapped):
    engine = {"overlapped": overlapped, "overlapped stream": overlapped}.get(mode, llm)
    return MODES[mode](engine, params)


def test_every_field_has_a_case():
    assert set(CASES) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.case("H10")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("field", CASES)
def test_a_field_changes_the_result_in_every_mode(field, mode, llm, overlapped):
    base, change = CASES[field]
    assert set(change) == {field}
    plain = run(mode, params_of(base), llm, overlapped)
    changed = run(mode, params_of(base | change), llm, overlapped)
    assert seen(changed) != seen(plain)


@pytest.mark.case("H10")
@pytest.mark.parametrize("field", CASES)
def test_a_field_has_the_same_effect_in_every_mode(field, llm, overlapped):
    base, change = CASES[field]
    params = params_of(base | change)
    expected = generate(llm, params)
    for mode in ("stream", "in a crowd", "preempted", "overlapped", "overlapped stream"):
        output = run(mode, params, llm, overlapped)
        assert_same(output, expected)


def assert_same(output, expected):
    """Texts and ids to the bit; log-probs but for the order in which a batch adds up."""
    assert output.error == expected.error
    for answer, other in zip(output.outputs, expected.outputs, strict=True):
        assert (answer.text, answer.token_ids, answer.finish_reason) == (other.text, other.token_ids, other.finish_reason)
        assert_close(answer.logprobs, other.logprobs)
    assert_close(output.prompt_logprobs, expected.prompt_logprobs)


def assert_close(entries, expected):
    for entry, other in zip(entries or (), expected or (), strict=True):
        assert (entry is None) == (other is None)
        if entry is not None and other is not None:
            assert {token: item.logprob for token, item in entry.items()} == pytest.approx(
                {token: item.logprob for token, item in other.items()}, abs=1e-4
            )


def test_the_first_of_several_answers_is_the_one_that_comes_alone(llm):
    alone = generate(llm, SamplingParams(**DRAWN))
    several = generate(llm, SamplingParams(**DRAWN, n=3, prompt_logprobs=0))
    assert [answer.index for answer in several.outputs] == [0, 1, 2]
    assert several.outputs[0].token_ids == alone.outputs[0].token_ids
    assert len({tuple(answer.token_ids) for answer in several.outputs}) == 3
    assert len(several.prompt_logprobs) == len(several.prompt_token_ids)
    again = generate(llm, SamplingParams(**DRAWN, n=3))
    assert [answer.token_ids for answer in again.outputs] == [answer.token_ids for answer in several.outputs]


def test_leaving_a_stream_of_several_answers_frees_them_all(llm):
    for _ in llm.stream(PROMPT, SamplingParams(n=4, ignore_eos=True)):
        break
    assert not llm._engine.has_work
    assert not llm._live
    assert llm._engine.scheduler.allocator.num_free == llm._engine.config.num_pages


def test_preemption_rebuilds_counts_and_bans_from_all_tokens(folder, llm):
    """Several sequences with every kind of adjustment, in a pool so small that they take each other's pages over and over."""
    prompts = [f"prompt number {i} of several" for i in range(5)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True, **kind)
        for kind in (
            {"repetition_penalty": 1.7},
            {"presence_penalty": 1.0, "frequency_penalty": 0.5},
            {"logit_bias": {65 + i: 40 for i in range(20)}, "bad_words": ["ab", "abc", "qr"], "frequency_penalty": 0.7},
            {"min_tokens": 60, "stop_token_ids": list(range(100))},
            {},
        )
    ]
    small = LLM(folder, device="cpu", max_kv_tokens=112, max_num_seqs=4)
    small._engine.worker.depth = 1
    expected = [generate(llm, its, prompt) for prompt, its in zip(prompts, params, strict=True)]
    for output, its in zip(small.generate(prompts, params), expected, strict=True):
        assert_same(output, its)
