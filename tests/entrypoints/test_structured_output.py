"""Answers under a grammar: valid whatever the model would say, alone and in a crowd, and nobody else notices."""

import asyncio
import json
import re

import pytest

from rapid_llm import LLM, AsyncLLM, Grammar, RequestError, SamplingParams
from rapid_llm.engine import grammar as grammars
from tests.tiny_model import END_ID, save_checkpoint, tiny_llama

CONTEXT = 1024
QUIET = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)

SCHEMAS = {
    "object": {
        "type": "object",
        "properties": {
            "ok": {"type": "boolean"},
            "size": {"enum": ["S", "M", "L"]},
            "count": {"type": "integer", "maximum": 999},
        },
        "required": ["ok", "size", "count"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 4},
    "string": {"type": "string", "minLength": 3, "maxLength": 12},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "nested": {
        "$defs": {
            "leaf": {"type": "object", "properties": {"v": {"type": "null"}}, "required": ["v"], "additionalProperties": False}
        },
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"const": 1}]}},
        "required": ["left", "right"],
        "additionalProperties": False,
    },
}
CHECKS = {
    "object": lambda value: (
        set(value) == {"ok", "size", "count"}
        and isinstance(value["ok"], bool)
        and value["size"] in "SML"
        and isinstance(value["count"], int)
        and value["count"] <= 999
    ),
    "array": lambda value: 2 <= len(value) <= 4 and all(0 <= number <= 9 for number in value),
    "string": lambda value: 3 <= len(value) <= 12,
    "pattern": lambda value: re.fullmatch("[A-Z]{2}-[0-9]{3}", value),
    "nested": lambda value: value["left"] == {"v": None} and value["right"] in ({"v": None}, 1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_checkpoint(tiny_llama(max_position_embeddings=CONTEXT), tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module", params=[0, 1], ids=["in-step", "overlapped"])
def llm(request, folder):
    llm = LLM(folder, device="cpu", max_kv_tokens=4096, max_num_seqs=6)
    llm._engine.worker.depth = request.param
    return llm


def schema(name):
    return Grammar("json_schema", json.dumps(SCHEMAS[name]))


def under(source, kind="regex", **values):
    return SamplingParams(**{"max_tokens": 400, "temperature": 1.5, "grammar": Grammar(kind, source), **values})


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_weights_write_json_by_the_schema(llm, name):
    params = SamplingParams(temperature=1.3, seed=5, n=4, max_tokens=700, grammar=schema(name))
    [output] = llm.generate("Say something:", params)
    for answer in output.outputs:
        assert answer.finish_reason == "stop"
        assert CHECKS[name](json.loads(answer.text)), answer.text


def test_any_json_object_is_one(llm):
    # What may be written without an end is ended by a bias towards closing it.
    closing = {ord(char) - 33: 6.0 for char in '}"]'}
    params = SamplingParams(seed=1, max_tokens=700, grammar=Grammar("json_object"), logit_bias=closing)
    [output] = llm.generate("x", params)
    assert output.outputs[0].finish_reason == "stop"
    assert isinstance(json.loads(output.outputs[0].text), dict)


def test_a_regex_and_a_lark_grammar_are_followed_across_characters_of_several_tokens(llm):
    [word] = llm.generate("x", under("[äöü€]{4}-(ja|nein)"))
    assert re.fullmatch("[äöü€]{4}-(ja|nein)", word.outputs[0].text)
    [sum_] = llm.generate("x", under('start: num ("+" num)~3\nnum: /[1-9]/', kind="lark"))
    assert re.fullmatch(r"[1-9](\+[1-9]){3}", sum_.outputs[0].text)


def test_the_answer_ends_where_nothing_more_may_follow_and_no_token_is_spent_on_it(llm):
    [output] = llm.generate("x", under("abc", ignore_eos=True, min_tokens=9))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abc", "stop")
    assert len(output.outputs[0].token_ids) == 3


def test_where_it_may_end_the_end_of_text_is_allowed_unless_it_is_to_be_ignored(llm):
    ending = {END_ID: 50.0}
    assert llm.generate("x", under("a{2,9}", logit_bias=ending))[0].outputs[0].text == "aa"
    assert llm.generate("x", under("a{2,9}", logit_bias=ending, min_tokens=5))[0].outputs[0].text == "a" * 5
    assert llm.generate("x", under("a{2,9}", logit_bias=ending, ignore_eos=True))[0].outputs[0].text == "a" * 9


def test_special_tokens_are_in_no_text_unless_the_grammar_names_them(llm):
    every_special = dict.fromkeys(range(256, 261), 100.0)
    values = {"logit_bias": every_special, "skip_special_tokens": False}
    [output] = llm.generate("x", under("(.|\n){20}", **values))
    assert not set(output.outputs[0].token_ids) & set(every_special)
    [named] = llm.generate("x", under('start: "a" <|user|> "b"', kind="lark", **values))
    assert named.outputs[0].text == "a<|user|>b"


def test_stops_lengths_bans_and_logprobs_count_under_a_grammar(llm):
    assert llm.generate("x", under("a{3}b{3}", stop="ab"))[0].outputs[0].text == "aa"
    short = llm.generate("x", under("a{30}", max_tokens=4))[0].outputs[0]
    assert (short.text, short.finish_reason) == ("aaaa", "length")
    assert llm.generate("x", under("[ab]{6}", bad_words="b"))[0].outputs[0].text == "a" * 6
    reported = llm.generate("x", under("a{3}", logprobs=3, logprobs_mode="processed"))[0].outputs[0]
    assert [len(entry) for entry in reported.logprobs] == [1, 1, 1]
    assert reported.cumulative_logprob == pytest.approx(0.0, abs=1e-6)


@pytest.mark.case("H5")
def test_a_grammar_and_bans_that_leave_nothing_end_that_request_alone(llm):
    alone = llm.generate(["left", "middle", "right"], QUIET)
    outputs = llm.generate(["left", "x", "right"], [QUIET, under("b+", bad_words="b"), QUIET])
    assert outputs[1].outputs[0].finish_reason == "error"
    assert "every token was banned" in outputs[1].error
    assert [outputs[0].outputs[0].text, outputs[2].outputs[0].text] == [alone[0].outputs[0].text, alone[2].outputs[0].text]


def test_neighbours_write_what_they_write_alone(llm):
    alone = [llm.generate(prompt, QUIET)[0].outputs[0].token_ids for prompt in ("left", "right")]
    params = [QUIET, under("[a-z]{30}", seed=1), QUIET, under("[0-9]{12}", seed=2)]
    outputs = llm.generate(["left", "x", "right", "y"], params)
    assert [outputs[0].outputs[0].token_ids, outputs[2].outputs[0].token_ids] == alone
    assert re.fullmatch("[a-z]{30}", outputs[1].outputs[0].text)
    assert re.fullmatch("[0-9]{12}", outputs[3].outputs[0].text)


def test_preempted_answers_go_on_where_they_were(folder):
    llm = LLM(folder, device="cpu", max_kv_tokens=96, max_num_seqs=4)
    params = [under("[a-z]{40}", seed=seed, max_tokens=60) for seed in range(4)]
    crowd = llm.generate(["w", "x", "y", "z"], params)
    assert llm._engine.scheduler.num_preemptions
    roomy = LLM(folder, device="cpu", max_kv_tokens=4096).generate(["w", "x", "y", "z"], params)
    assert [output.outputs[0].text for output in crowd] == [output.outputs[0].text for output in roomy]


BAD = {
    "no-json": (lambda: Grammar("json_schema", '{"type": '), "no JSON"),
    "a-list": (lambda: Grammar("json_schema", "[1]"), "got list"),
    "type": (lambda: Grammar("json_schema", '{"type": "objekt"}'), "objekt"),
    "keyword": (lambda: Grammar("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
    "reference": (lambda: Grammar("json_schema", '{"$ref": "#/nowhere"}'), "nowhere"),
    "unsatisfiable": (lambda: Grammar("json_schema", '{"type": "integer", "minimum": 5, "maximum": 1}'), "minimum"),
    "regex": (lambda: Grammar("regex", "(a"), "unclosed group"),
    "lark": (lambda: Grammar("lark", "start: nothing_such"), "nothing_such"),
    "special": (lambda: Grammar("lark", "start: <|nope|>"), "nope"),
    "deep": (lambda: Grammar("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000), "recursion|nesting"),
    "long": (lambda: Grammar("regex", "a" * 100_001), "100,001 characters, wanted at most 100,000"),
    "kind": (lambda: Grammar("xml", "<a/>"), "json_schema | json_object"),
    "no-source": (lambda: Grammar("regex"), "the regex as a string"),
    "a-source": (lambda: Grammar("json_object", "{}"), "no source"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_grammar_that_cannot_be_used_is_refused_and_says_why(llm, name):
    make, why = BAD[name]
    with pytest.raises(RequestError, match=rf"grammar.*({why})"):
        llm.generate(["fine", "x"], [QUIET, SamplingParams(grammar=make())])
    assert not llm._engine.has_work


def test_a_grammar_that_takes_too_long_is_refused(folder, monkeypatch):
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.0)
    llm = LLM(folder, device="cpu", max_kv_tokens=512)
    monkeypatch.setattr(llm._engine.grammars, "_tokens", grammars.Future())  # never done
    with pytest.raises(RequestError, match="takes too long to compile"):
        llm.generate("x", under("a"))


def test_compiled_grammars_are_kept_up_to_a_number(llm, monkeypatch):
    monkeypatch.setattr(grammars, "CACHED", 3)
    compiler = llm._engine.grammars
    first = compiler.compile(Grammar("regex", "first"))
    for number in range(2):
        compiler.compile(Grammar("regex", f"other{number}"))
    assert compiler.compile(Grammar("regex", "first")) is first
    for number in range(3):
        compiler.compile(Grammar("regex", f"more{number}"))
    assert len(compiler._cache) == 3
    assert compiler.compile(Grammar("regex", "first")) is not first


def test_an_engine_process_serves_grammars_and_refuses_bad_ones_alone(folder):
    async def answer(llm, params):
        async for output in llm.generate("x", params):
            last = output
        return last.outputs[0].text

    async def main():
        async with AsyncLLM(folder, device="cpu", max_kv_tokens=2048) as llm:
            many = [under(f"{letter}{{9}}!", n=1, seed=1) for letter in "abcdef"]
            tasks = [*(answer(llm, params) for params in many), answer(llm, under("(a")), answer(llm, QUIET)]
            return await asyncio.gather(*tasks, return_exceptions=True)

    *texts, refused, quiet = asyncio.run(main())
    assert texts == [letter * 9 + "!" for letter in "abcdef"]
    assert isinstance(refused, RequestError)
    assert "unclosed group" in str(refused)
    assert len(quiet) > 0
