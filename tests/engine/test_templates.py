import re

import pytest

from rapid_llm.engine.templates import render
from rapid_llm.errors import RequestError

USER = [{"role": "user", "content": "hi"}]
CHATML = (
    "{% for message in messages %}\n    {% if message['role'] == 'x' %}{% continue %}{% endif %}\n"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": "<é>", "a": [1, 2]}}}]
TALK = [*USER, {"role": "x", "content": "skipped"}, {"role": "assistant", "content": "ho & <b>'q'</b>"}]
TEMPLATES = [
    pytest.param(CHATML, id="blocks-and-loop-controls"),
    pytest.param("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}{{ messages[-1].content }}", id="tokens"),
    pytest.param("{{ tools | tojson }} {{ tools | tojson(indent=2) }}", id="tojson"),
    pytest.param(
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %};{% endfor %}", id="generation-tag"
    ),
    pytest.param(
        "{% set x = 'a' %}{% for m in messages %}{% generation %}{% set x = 'b' + x %}{{ x }}{{ loop.index }}{% endgeneration %}"
        "{{ x }}{% endfor %}",
        id="generation-scope",
    ),
    pytest.param(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", id="namespace"
    ),
    pytest.param("{{ strftime_now('%Y')[:2] }}{{ '%s-%s' % (1, 2) }}{{ missing }}", id="strftime-format-undefined"),
    pytest.param(
        "{% macro say(m) %}{{ m.role | upper }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% break %}{% endfor %}\n",
        id="macro",
    ),
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_template_renders_as_in_transformers(template, add_generation_prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    tools = TOOLS if "tools" in template else None
    expected, _ = render_jinja_template(
        conversations=[TALK],
        tools=tools,
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    actual = render(TALK, template, bos_token="<s>", eos_token="</s>", add_generation_prompt=add_generation_prompt, tools=tools)
    assert [actual] == expected


def test_a_token_that_the_model_lacks_renders_as_nothing():
    assert render(USER, "{{ bos_token }}{% if eos_token is defined %}x{% endif %}") == ""


@pytest.mark.case("I12")
@pytest.mark.parametrize(
    ("messages", "message"),
    [
        pytest.param([], "messages is empty", id="empty"),
        pytest.param("hi", "messages cannot be used: got str 'hi'", id="string"),
        pytest.param({"role": "user"}, "messages cannot be used: got dict", id="one-message-bare"),
        pytest.param(None, "messages cannot be used: got NoneType", id="none"),
        pytest.param(["hi"], r"messages[0] cannot be used: got str 'hi'", id="list-of-strings"),
        pytest.param([*USER, {"content": "x"}], "messages[1]['role'] cannot be used: got NoneType", id="no-role"),
        pytest.param([{"role": "", "content": "x"}], "messages[0]['role'] cannot be used", id="empty-role"),
        pytest.param([{"role": "user"}], "messages[0]['content'] cannot be used: got NoneType", id="no-content"),
        pytest.param(
            [{"role": "user", "content": 5}], "messages[0]['content'] cannot be used: got int 5, wanted a string", id="number"
        ),
        pytest.param([{"role": "user", "content": [{"type": "image"}]}], "messages[0]['content'] cannot be used", id="parts"),
    ],
)
def test_messages_of_another_form_are_refused_with_what_came(messages, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        render(messages, CHATML)


def test_content_may_be_missing_beside_tool_calls():
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert render(messages, "{{ messages[0].tool_calls[0].name }}") == "f"


def test_a_key_that_is_null_is_not_there():
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}, *USER]
    template = "{% for m in messages %}{{ 'content' in m }} {{ m.name is defined }} {{ m.tool_calls is defined }};{% endfor %}"
    assert render(messages, template) == "False False True;True False False;"
    assert messages[0]["content"] is None


# --- tools ---


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        pytest.param([], "tools is empty: wanted a list of", id="empty"),
        pytest.param("weather", "tools cannot be used: got str 'weather'", id="string"),
        pytest.param(TOOLS[0], "tools cannot be used: got dict", id="one-tool-bare"),
        pytest.param(5, "tools cannot be used: got int 5", id="number"),
        pytest.param([*TOOLS, "f"], "tools[1] cannot be used: got str 'f'", id="name-alone"),
        pytest.param([{"function": {"name": "f"}}], "tools[0]['type'] cannot be used: got NoneType None", id="no-type"),
        pytest.param([{"type": "web", "function": {"name": "f"}}], "tools[0]['type'] cannot be used: got str 'web'", id="type"),
        pytest.param([{"type": "function", "name": "f"}], "tools[0]['function'] cannot be used: got NoneType", id="flat"),
        pytest.param([{"type": "function", "function": {}}], "tools[0]['function']['name'] cannot be used", id="no-name"),
        pytest.param(
            [{"type": "function", "function": {"name": ""}}], "tools[0]['function']['name'] cannot be used", id="empty-name"
        ),
    ],
)
def test_tools_of_another_form_are_refused_with_what_came(tools, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        render(USER, "{{ tools | tojson }}", tools=tools)


@pytest.mark.parametrize(
    ("template", "knows"),
    [
        pytest.param("{% if tools %}{{ tools[0].function.name }}{% endif %}", True, id="asks"),
        pytest.param(
            "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools[0].function.name }}", True, id="fills"
        ),
        pytest.param("{% macro show() %}{{ tools[0].function.name }}{% endmacro %}{{ show() }}", True, id="in-a-macro"),
        pytest.param("{{ messages[0].content }}", False, id="never-named"),
        pytest.param("{{ messages[0].tools }}{{ 'tools' }}{# tools #}", False, id="only-an-attribute-a-text-a-comment"),
        pytest.param("{% set tools = 'f' %}{{ tools }}", False, id="its-own-name"),
        pytest.param("{% for tools in messages %}{{ tools.role }}{% endfor %}", False, id="a-loops-name"),
    ],
)
def test_a_template_that_does_not_know_tools_refuses_them(template, knows):
    if knows:
        assert render(USER, template, tools=TOOLS) == "f"
        return
    with pytest.raises(RequestError, match="the model's chat template does not know tools: got 1 of them"):
        render(USER, template, tools=TOOLS)
    render(USER, template)


# --- what a template cannot do ---


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param(
            "{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate", id="raise_exception"
        ),
        pytest.param("{% if %}", "TemplateSyntaxError", id="syntax"),
        pytest.param("{{ messages[0].a.b.c }}", "UndefinedError", id="undefined"),
        pytest.param("{{ messages[0]['content'] + 5 }}", "TypeError", id="type"),
        pytest.param("{{ 1 / 0 }}", "ZeroDivisionError", id="division"),
        pytest.param("{{ tools | tojson(indent=messages) }}", "TypeError", id="tojson"),
        pytest.param("{{ messages.append(1) }}", "SecurityError", id="mutation"),
        pytest.param("{{ messages[0].update(role='x') }}", "SecurityError", id="mutation-of-a-message"),
        pytest.param("{{ ''.__class__.__mro__ }}", "SecurityError", id="escape"),
        pytest.param("{{ lipsum.__globals__['os'] }}", "SecurityError", id="escape-by-globals"),
        pytest.param("{{ cycler.__init__.__globals__ }}", "SecurityError", id="escape-by-init"),
        pytest.param("{{ namespace(a=1).__class__.__mro__ }}", "SecurityError", id="escape-by-namespace"),
        pytest.param("{{ (messages | map(attribute='__class__') | first).__mro__ }}", "SecurityError", id="escape-by-filter"),
        pytest.param("{{ dict.__subclasses__() }}", "SecurityError", id="escape-by-type"),
        pytest.param("{% import 'os' as os %}", "TypeError: no loader", id="import"),
        pytest.param("{% include '/etc/passwd' %}", "TypeError: no loader", id="include"),
        pytest.param("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError: Range too big", id="endless-range"),
        pytest.param("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError", id="recursion"),
    ],
)
def test_a_template_that_fails_is_a_refusal_that_tells_why(template, message):
    with pytest.raises(RequestError, match="the chat template cannot be used on these messages") as refusal:
        render([dict(USER[0])], template)
    assert message in str(refusal.value)


@pytest.mark.parametrize("template", ["{{ messages.__class__ }}", "{{ '{0.__class__}'.format(messages) }}"])
def test_an_attribute_that_begins_with_an_underscore_renders_as_nothing(template):
    assert render(USER, template) == ""


@pytest.mark.parametrize("template", [None, ""])
def test_a_model_without_a_template_says_so(template):
    with pytest.raises(RequestError, match="the model has no chat template"):
        render(USER, template)


def test_the_text_half_imports_neither_torch_nor_jinja_until_it_must():
    import subprocess
    import sys

    code = (
        "import sys\n"
        "import rapid_llm.engine.templates, rapid_llm.engine.tokenizer, rapid_llm.engine.detokenizer, rapid_llm.engine.stop\n"
        "import rapid_llm.checkpoint.open, rapid_llm.models.config\n"
        "print([name for name in ('torch', 'triton', 'jinja2', 'transformers', 'safetensors') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
