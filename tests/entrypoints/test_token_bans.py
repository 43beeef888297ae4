"""Tokens that may not be said, and what happens where none may: that request ends, nobody else notices."""

import math
import string

import pytest

from rapid_llm import LLM, RequestError, SamplingParams
from tests.tiny_model import END_ID, VOCAB_SIZE, save_checkpoint, tiny_llama

QUIET = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3)
CROWD = ["left of it", "the middle one", "right of it"]
EVERYTHING = dict.fromkeys(range(VOCAB_SIZE), -100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module", params=[0, 1], ids=["in-step", "overlapped"])
def llm(request, folder):
    llm = LLM(folder, device="cpu", max_kv_tokens=1024, max_num_seqs=4)
    llm._engine.worker.depth = request.param
    return llm


def beside(llm, params, steps, damage=lambda: None):
    """What comes of a request, and that its neighbours are bit by bit those of a quiet request in its place.

    Both run for as many ``steps``: how a sum is rounded hangs on the number of sequences beside.
    """
    quiet = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    expected = llm.generate(CROWD, [QUIET, quiet, QUIET])
    damage()
    outputs = llm.generate(CROWD, [QUIET, params, QUIET])
    for place in (0, 2):
        assert outputs[place].outputs == expected[place].outputs
    return outputs[1]


BANNED = [
    pytest.param({"logit_bias": EVERYTHING}, id="bias"),
    pytest.param({"logit_bias": {token: -100 for token in EVERYTHING if token != END_ID}, "min_tokens": 2}, id="min-tokens"),
    pytest.param({"logit_bias": {token: -100 for token in EVERYTHING if token != 65}, "bad_words": ["b"]}, id="bad-word"),
    pytest.param({"logit_bias": EVERYTHING, "frequency_penalty": 1.0, "logprobs": 2, "temperature": 0.0}, id="logprobs"),
]


@pytest.mark.case("H5")
@pytest.mark.parametrize("values", BANNED)
def test_a_request_whose_every_token_is_banned_ends_alone_and_says_so(llm, values):
    output = beside(llm, SamplingParams(max_tokens=8, **values), steps=1 + llm._engine.worker.depth)
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].token_ids == []
    assert "every token was banned" in output.error
    assert output.finished


class Damaged:
    """A sampler that finds a NaN in the second of three rows, from a step on."""

    def __init__(self, sampler, step):
        self._sampler, self._left = sampler, step

    def __getattr__(self, name):
        return getattr(self._sampler, name)

    def __call__(self, logits, slots, positions, drawn=None, masks=None):
        self._left -= 1
        if self._left < 0 and len(slots) == 3:
            logits = logits.clone()
            logits[1, 9] = math.nan
        return self._sampler(logits, slots, positions, drawn, masks)


@pytest.mark.case("H4")
@pytest.mark.parametrize("values", [{}, {"logit_bias": EVERYTHING | {8: 50, 10: 0}}], ids=["plain", "with-bans"])
def test_damaged_logits_are_told_from_banned_ones(folder, values):
    llm = LLM(folder, device="cpu", max_kv_tokens=1024, max_num_seqs=4)
    llm._engine.worker.depth = 1

    def damage():
        llm._engine.worker.sampler = Damaged(llm._engine.worker.sampler, step=5)

    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, **values)
    output = beside(llm, params, steps=7, damage=damage)  # the sixth finds no number, the seventh is under way by then
    assert output.outputs[0].finish_reason == "error"
    assert "NaN" in output.error
    assert len(output.outputs[0].token_ids) == 5


def test_one_answer_that_fails_leaves_the_others(folder):
    llm = LLM(folder, device="cpu", max_kv_tokens=1024, max_num_seqs=4)
    llm._engine.worker.sampler = Damaged(llm._engine.worker.sampler, step=3)
    [output] = llm.generate("hello", SamplingParams(n=3, max_tokens=9, seed=1, ignore_eos=True))
    assert [answer.finish_reason for answer in output.outputs] == ["length", "error", "length"]
    assert output.error
    assert output.finished


FIELDS = {
    "logit_bias": lambda token: {token: 5.0},
    "stop_token_ids": lambda token: [token],
}


@pytest.mark.case("I11")
@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**31, 2**63, "AI", 1.5, True, None], ids=repr)
@pytest.mark.parametrize("field", FIELDS)
def test_an_id_that_is_not_the_models_is_refused_by_field_and_range(llm, field, token):
    with pytest.raises(RequestError, match=rf"{field}.*(?:>= 0|ids from 0 to {VOCAB_SIZE - 1})"):
        llm.generate("hello", SamplingParams(**{field: FIELDS[field](token)}))
    assert not llm._engine.has_work


@pytest.mark.case("I11")
@pytest.mark.parametrize("token", [0, VOCAB_SIZE - 1])
@pytest.mark.parametrize("value", [100.0, -100.0, 3.0])
def test_a_bias_at_either_end_of_the_vocabulary_leaves_the_neighbours_alone(llm, token, value):
    output = beside(llm, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logit_bias={token: value}), steps=8)
    assert (output.outputs[0].token_ids == [token] * 8) == (value == 100.0)
    assert value != -100.0 or token not in output.outputs[0].token_ids


LETTERS = {ord(letter) - 33: 60.0 for letter in string.ascii_lowercase}  # the byte tokenizer begins at "!"


def letters(llm, prompt="hello", **values):
    [output] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logit_bias=LETTERS, **values))
    assert len(output.outputs[0].text) == 30
    return output.outputs[0].text


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_bad_word_is_never_said_and_nothing_changes_before_it(llm, length):
    plain = letters(llm)
    word = plain[4 : 4 + length]
    changed = letters(llm, bad_words=["zz", word])
    assert word not in changed
    end = plain.index(word) + length - 1
    assert changed[:end] == plain[:end]


def test_a_bad_word_may_begin_in_the_prompt(llm):
    following = letters(llm, "helloo")[0]
    assert letters(llm, "helloo", bad_words=["oo" + following])[0] != following
    assert letters(llm, "helloo", bad_words=["xo" + following])[0] == following


def test_bad_words_of_different_lengths_stand_side_by_side(llm):
    plain = letters(llm)
    words = [plain[2:4], plain[7:12], "q"]
    alone = [letters(llm, bad_words=[word]) for word in words]
    params = [
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logit_bias=LETTERS, bad_words=word) for word in words
    ]
    assert [output.outputs[0].text for output in llm.generate(["hello"] * 3, params)] == alone


@pytest.mark.parametrize(
    ("word", "words"),
    [("x" * 33, "bad_words is out of range: got .*33 tokens, wanted 1 to 32 tokens"), ("", "bad_words is out of range")],
    ids=["long", "empty"],
)
def test_a_bad_word_that_cannot_be_watched_for_is_refused(llm, word, words):
    with pytest.raises(RequestError, match=words):
        llm.generate("hello", SamplingParams(bad_words=[word]))


def test_min_tokens_hold_off_every_end(llm):
    ending = {END_ID: 90.0, 70: 80.0}
    [soon] = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=9, logit_bias=ending))
    assert (soon.outputs[0].token_ids, soon.outputs[0].finish_reason) == ([], "stop")
    params = SamplingParams(temperature=0.0, max_tokens=9, logit_bias=ending, min_tokens=4, stop_token_ids=[70])
    [late] = llm.generate("hello", params)
    assert len(late.outputs[0].token_ids) == 4
    assert not {END_ID, 70} & set(late.outputs[0].token_ids)
    assert late.outputs[0].finish_reason == "stop"


def test_a_stop_string_counts_only_behind_the_first_tokens(llm):
    plain = letters(llm)
    stop = plain[3:5]
    later = plain.index(stop, 5) if stop in plain[5:] else None
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logit_bias=LETTERS, stop=stop, min_tokens=4)
    [output] = llm.generate("hello", params)
    assert output.outputs[0].text == (plain if later is None else plain[:later])
    early = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logit_bias=LETTERS, stop=stop, min_tokens=3)
    assert llm.generate("hello", early)[0].outputs[0].text == plain[: plain.index(stop, 3)]


def test_more_tokens_than_there_is_room_for_are_refused(llm):
    with pytest.raises(RequestError, match=r"min_tokens is out of range: got 57 behind 200 prompt tokens, wanted at most 56"):
        llm.generate("x" * 200, SamplingParams(min_tokens=57))
    with pytest.raises(RequestError, match=r"min_tokens is out of range: got 5, wanted an integer from 0 to 4"):
        SamplingParams(max_tokens=4, min_tokens=5)
