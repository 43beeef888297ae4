"""Whoever looks at an answer, and whenever: its text is that of its ids."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.checkpoint.source import TokenizerFolder
from rapid_llm.config import SamplingParams
from rapid_llm.engine.output import RequestOutput
from rapid_llm.engine.request import TokenOutput
from rapid_llm.engine.stream import OutputReader
from rapid_llm.engine.text import follow
from rapid_llm.engine.tokenizer import Tokenizer
from rapid_llm.errors import RequestError
from rapid_llm.step import SampledToken
from tests.checkpoint.writers import write_tokenizer

STOPS = [pytest.param(None, id="no-stop-string"), pytest.param(["never said"], id="a-stop-string")]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """Ids 0 to 255 are bytes."""
    return Tokenizer.from_source(TokenizerFolder(write_tokenizer(tmp_path_factory.mktemp("byte_level"))))


def answer_to(tokenizer, **params):
    output = RequestOutput("a", None, [1], [])
    [request] = follow(output, SamplingParams(**params), tokenizer, continues=True)
    return request, OutputReader([request])


def bring(request, token_id, reason=None):
    return request.take(TokenOutput("a", SampledToken(token_id), reason))


@pytest.mark.parametrize("stop", STOPS)
@given(text=st.text(min_size=1, max_size=20), looks=st.sets(st.integers(0, 60)), min_tokens=st.integers(0, 8))
@settings(deadline=None)
def test_every_look_shows_the_text_of_the_ids_so_far(byte_level, stop, text, looks, min_tokens):
    request, reader = answer_to(byte_level, stop=stop, min_tokens=min_tokens, max_tokens=100)
    ids, said = byte_level.encode(text, add_special_tokens=False), ""
    for place, token_id in enumerate(ids):
        bring(request, token_id, "length" if place == len(ids) - 1 else None)
        if place in looks:
            shown = reader.state().outputs[0]
            said += shown.delta
            assert (shown.token_ids, shown.text) == (ids[: place + 1], said)
            assert stop or shown.text.rstrip("\ufffd") == byte_level.decode(ids[: place + 1]).rstrip("\ufffd")
    assert request.answer.text == text  # the answer that `generate` gives, which nobody looked at before
    assert said + reader.state().outputs[0].delta == text


def test_a_stop_string_ends_the_answer_with_its_last_token_though_nobody_looks(byte_level):
    request, _ = answer_to(byte_level, stop=["cd"])
    assert [bring(request, token_id) for token_id in byte_level.encode("abcd", add_special_tokens=False)] == [False] * 3 + [True]
    assert (request.answer.text, request.answer.finish_reason, request.answer.stop_reason) == ("ab", "stop", "cd")


@pytest.mark.parametrize("end", [lambda request: request.abort(), lambda request: request.fail(RequestError("no"))])
def test_an_answer_that_ends_early_has_the_text_of_its_ids(byte_level, end):
    request, _ = answer_to(byte_level)
    for token_id in byte_level.encode("abc", add_special_tokens=False):
        bring(request, token_id)
    end(request)
    assert request.answer.text == "abc"
