"""Tools from a request to calls: formats by template, choices as grammars that any model follows, errors by field."""

import json

import pytest

from rapid_llm import LLM, ConfigError, RequestError, SamplingParams
from rapid_llm.entrypoints.tools.choice import json_behind_reasoning, plan_tools
from rapid_llm.entrypoints.tools.events import CallArguments, CallStart, Content, Reasoning, joined
from rapid_llm.entrypoints.tools.formats import HERMES, LLAMA3, MISTRAL_LIST, MISTRAL_NAMED, tool_format
from rapid_llm.entrypoints.tools.reasoning import ReasoningParser, begins_inside, marks_reasoning
from tests.scripted_engine import say, script
from tests.tiny_model import END_ID, save_checkpoint, tiny_llama

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Now.", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop"}},
]
FORMATS = {"hermes": HERMES, "llama3": LLAMA3, "mistral-list": MISTRAL_LIST, "mistral-named": MISTRAL_NAMED}
TEMPLATES = {
    "hermes": '{{ tools | tojson }}<tool_call>\n{"name": "..."}\n</tool_call>',
    "llama3": '{{ tools }} {{ \'{"name": "\' }} {{ \'"parameters": \' }} <|python_tag|>',
    "mistral-list": "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS][",
    "mistral-named": "{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = str(save_checkpoint(tiny_llama(max_position_embeddings=1024), tmp_path_factory.mktemp("tiny")))
    return LLM(folder, device="cpu", max_kv_tokens=4096, max_num_seqs=4, prefix_cache=False)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    folder = str(save_checkpoint(tiny_llama(max_position_embeddings=1024), tmp_path_factory.mktemp("scripted")))
    llm = LLM(folder, device="cpu", max_kv_tokens=4096, max_num_seqs=4, prefix_cache=False)
    script(llm._engine, llm.tokenizer, END_ID)
    return llm


def events_of(llm, plan, prompt, **values):
    """What a stream of the answer is read as."""
    params = SamplingParams(
        max_tokens=600, grammar=plan.grammar(llm.tokenizer), skip_special_tokens=not plan.keeps_special_tokens, **values
    )
    parser, events = plan.parser(), []
    for output in llm.stream(prompt, params):
        events += parser.feed(output.outputs[0].delta)
    assert output.outputs[0].finish_reason == "stop"
    return joined(events + parser.finish())


def calls_of(events):
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = [event.text for event in events if isinstance(event, CallArguments)]
    return list(zip(names, map(json.loads, arguments), strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_told_from_the_template(name):
    assert tool_format(TEMPLATES[name]) == FORMATS[name]


def test_a_template_of_another_format_is_of_none_and_a_setting_wins():
    assert tool_format("{{ messages }}") is None
    assert tool_format(None) is None
    assert tool_format("<tool_call>\n<function={{ name }}>") is None
    assert tool_format(TEMPLATES["hermes"], "llama3") == LLAMA3
    with pytest.raises(ConfigError, match=r"tool_format.*got 'xml', wanted hermes \| llama3 \| mistral"):
        tool_format(None, "xml")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_without_a_clue_calls_a_tool_where_it_must(llm, name, seed):
    plan = plan_tools(TOOLS, "required", FORMATS[name], parallel=False)
    events = events_of(llm, plan, "x", seed=seed)
    [(called, arguments)] = calls_of(events)
    assert (called == "get_weather" and arguments["city"] in ("Rome", "Oslo")) or (called, arguments) == ("stop", {})
    assert not any(isinstance(event, Content) for event in events)


@pytest.mark.parametrize("name", FORMATS)
def test_the_tool_that_is_named_is_called_once(llm, name):
    plan = plan_tools(TOOLS, {"type": "function", "function": {"name": "stop"}}, FORMATS[name])
    assert calls_of(events_of(llm, plan, "x", seed=2)) == [("stop", {})]
    assert plan.shown == tuple(TOOLS)


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_may_come_where_one_must(scripted, name):
    written = {
        "hermes": '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        "llama3": '{"name": "stop", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Oslo"}}',
        "mistral-list": '[TOOL_CALLS][{"name": "stop", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Oslo"}}]',
        "mistral-named": '[TOOL_CALLS]stop[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}',
    }[name]
    both = [("stop", {}), ("get_weather", {"city": "Oslo"})]
    for choice in ("auto", "required"):
        found = calls_of(events_of(scripted, plan_tools(TOOLS, choice, FORMATS[name]), say(written), seed=0))
        if (name, choice) == ("mistral-list", "required"):  # its closing bracket is not where the script has it: that is drawn
            assert found[:1] == both[:1]
        else:
            assert found == both
    if name != "mistral-list":  # the closing bracket is not where the script has it
        one = plan_tools(TOOLS, "required", FORMATS[name], parallel=False)
        assert calls_of(events_of(scripted, one, say(written))) == both[:1]


def test_a_model_that_would_rather_talk_must_call_and_one_that_may_talk_does(scripted):
    must, may = (plan_tools(TOOLS, choice, HERMES) for choice in ("required", "auto"))
    assert len(calls_of(events_of(scripted, must, say("It is sunny."), temperature=0.0))) == 1
    assert events_of(scripted, may, say("It is sunny.")) == [Content("It is sunny.")]
    assert may.grammar(scripted.tokenizer) is None


def test_none_shows_no_tools_and_reads_no_calls():
    for plan in (plan_tools(TOOLS, "none", HERMES), plan_tools(None, None, HERMES), plan_tools(TOOLS, "none", None)):
        assert (plan.shown, plan.parser(), plan.keeps_special_tokens) == (None, None, False)


def test_reasoning_comes_before_json_and_before_calls(scripted):
    schema = json.dumps(CITY)
    params = SamplingParams(max_tokens=600, grammar=json_behind_reasoning(schema, scripted.tokenizer))
    [output] = scripted.generate(say('Rome <or> Oslo?</think>\n\n{"city": "Rome"}'), params)
    parser = ReasoningParser(inside=True)
    events = joined(parser.feed(output.outputs[0].text) + parser.finish())
    assert events == [Reasoning("Rome <or> Oslo?"), Content('{"city": "Rome"}')]
    plan = plan_tools(TOOLS, "required", HERMES)
    params = SamplingParams(max_tokens=600, grammar=plan.grammar(scripted.tokenizer, inside=True))
    [output] = scripted.generate(say('Hm.</think>\n\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'), params)
    parser = plan.parser(reasons=True, inside=True)
    events = joined(parser.feed(output.outputs[0].text) + parser.finish())
    assert events == [Reasoning("Hm."), CallStart(0, "stop"), CallArguments(0, "{}")]


def test_whether_a_model_reasons_is_told_from_its_template_and_the_prompt():
    assert marks_reasoning("{% if thinking %}<think>{% endif %}{{ x.split('</think>') }}")
    assert not marks_reasoning("{{ messages }}")
    assert not marks_reasoning(None)
    assert begins_inside("<|assistant|><think>\n")
    assert not begins_inside("<|assistant|><think>\n\n</think>\n\n")


WRONG = {
    "format": ((TOOLS, "auto", None), "format in which this model calls tools is not known.*hermes, llama3, mistral"),
    "no-tools": ((None, "required", HERMES), "tool_choice needs tools"),
    "unknown": ((TOOLS, {"type": "function", "function": {"name": "rain"}}, HERMES), "got 'rain', wanted get_weather | stop"),
    "choice": ((TOOLS, "always", HERMES), "tool_choice cannot be used"),
    "twice": ((TOOLS + TOOLS, "auto", HERMES), r"tools\[2\]\['function'\]\['name'\] is there twice"),
    "name": (([{"type": "function", "function": {"name": "a b"}}], "auto", HERMES), r"tools\[0\].*1 to 64 of A-Z"),
    "parameters": (
        ([{"type": "function", "function": {"name": "a", "parameters": [1]}}], "auto", HERMES),
        r"tools\[0\]\['function'\]\['parameters'\] cannot be used",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_served_is_refused_by_field(name):
    (tools, choice, format_), why = WRONG[name]
    with pytest.raises(RequestError, match=why):
        plan_tools(tools, choice, format_)


def test_parameters_that_are_no_schema_are_refused_where_a_call_must_follow_them(llm):
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "objekt"}}}
    grammar = plan_tools([tool], "required", HERMES).grammar(llm.tokenizer)
    with pytest.raises(RequestError, match="objekt"):
        llm.generate("x", SamplingParams(grammar=grammar))
