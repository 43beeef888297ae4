"""Chat templates in the formats of the model families, rendered and tokenized: the ids are transformers' ids."""

import json
from functools import cache
from pathlib import Path

import pytest
from jinja2 import TemplateError
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from rapid_llm.checkpoint.source import TokenizerFolder
from rapid_llm.engine.templates import render
from rapid_llm.engine.tokenizer import Tokenizer
from rapid_llm.errors import RequestError

FOLDER = Path(__file__).parents[1] / "data" / "chat_templates"
MARKS = {
    "llama3": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    "llama2": ["<s>", "</s>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"],
    "chatml_tools": ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>"],
}
"""Special tokens: begin-of-text, end-of-text, others."""
KNOWS_TOOLS = ["llama3", "mistral", "chatml_tools"]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place: °C & <wind>",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {}}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, **arguments):
    return {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(text):
    return {"role": "tool", "content": text, "tool_call_id": "abcdefghi", "name": "weather"}


SYSTEM = {"role": "system", "content": "  You are terse.\n"}
CONVERSATIONS = {
    "one-turn": [user("Hi, who's there? ")],
    "system": [SYSTEM, user("hi")],
    "many-turns": [SYSTEM, user("a"), assistant("b "), user(" c\n"), assistant("d 🙂"), user("é?")],
    "ends-with-assistant": [user("a"), assistant("<think>\nhm\n</think>\n\nb")],
    "thoughts-of-earlier-turns": [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c")],
    "tool-call": [user("Warm in Łódź?"), assistant(None, tool_calls=[call("weather", place="Łódź", days=[1, 2.5])])],
    "tool-result": [
        user("Warm?"),
        assistant("", tool_calls=[call("weather", place="a\"b'")]),
        answer('{"t": 21}'),
        assistant("Yes."),
        user("And now?"),
    ],
    "two-calls-two-results": [
        SYSTEM,
        user("Both?"),
        assistant("Looking.", tool_calls=[call("weather", place="x"), call("clock")]),
        answer("21"),
        answer("noon"),
    ],
    "roles-out-of-order": [user("a"), user("b")],
    "unknown-role": [user("a"), {"role": "critic", "content": "b"}],
}


@cache
def backend_of(family):
    """Llama 2 and Mistral have pieces of text and byte tokens, the others bytes in GPT-2's alphabet; all put begin-of-text
    before a text."""
    marks = MARKS[family]
    if family in ("llama2", "mistral"):
        text = [chr(code) for code in range(0x21, 0x7F)] + ["\u2581", "\u2581a", "er", "\u2581\u2581"]
        tokens = ["<unk>", *marks, *(f"<0x{byte:02X}>" for byte in range(256)), *text]
        merges = [("\u2581", "a"), ("e", "r"), ("\u2581", "\u2581")]
        vocab = {token: i for i, token in enumerate(tokens)}
        backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(parts)
    else:
        tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "er", "\u0120a", *marks]
        vocab = {token: i for i, token in enumerate(tokens)}
        backend = Backend(models.BPE(vocab, [("e", "r"), ("\u0120", "a")]))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in marks])
    bos = marks[0]
    backend.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, vocab[bos])])
    return backend


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Our tokenizer and transformers' of each family."""
    from transformers import PreTrainedTokenizerFast

    made = {}
    for family, (bos, eos, *_) in MARKS.items():
        folder, template = tmp_path_factory.mktemp(family), (FOLDER / f"{family}.jinja").read_text()
        backend_of(family).save(str(folder / "tokenizer.json"))
        config = {"bos_token": bos, "eos_token": eos, "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        theirs = PreTrainedTokenizerFast(tokenizer_object=backend_of(family), **config)
        made[family] = Tokenizer.from_source(TokenizerFolder(folder)), theirs
    return made


def chat_ids(tokenizer, messages, **options):
    text = render(messages, tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token, **options)
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("tools", [None, [WEATHER], [WEATHER, CLOCK]], ids=["no-tools", "one-tool", "two-tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", MARKS)
def test_a_conversation_gets_the_ids_that_transformers_gives_it(pairs, family, conversation, add_generation_prompt, tools):
    ours, theirs = pairs[family]
    messages, options = CONVERSATIONS[conversation], {"tools": tools, "add_generation_prompt": add_generation_prompt}
    if tools and family not in KNOWS_TOOLS:
        with pytest.raises(RequestError, match="the model's chat template does not know tools"):
            chat_ids(ours, messages, **options)
        return
    try:
        expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    except (TemplateError, TypeError, AttributeError) as error:
        with pytest.raises(RequestError) as refusal:
            chat_ids(ours, messages, **options)
        assert str(error) in str(refusal.value)  # noqa: PT017 - both refuse, for one reason
        return
    assert chat_ids(ours, messages, **options) == expected


@pytest.mark.parametrize(("family", "times"), [("llama3", 1), ("llama2", 3), ("mistral", 1), ("chatml_tools", 0)])
def test_begin_of_text_comes_as_often_as_the_template_writes_it(pairs, family, times):
    tokenizer, _ = pairs[family]
    assert tokenizer.adds_bos  # before a plain prompt, that is
    assert chat_ids(tokenizer, CONVERSATIONS["many-turns"]).count(tokenizer.bos_id) == times


def test_a_family_refuses_what_its_template_refuses_and_nothing_else(pairs):
    served = {name: set() for name in CONVERSATIONS}
    for name, messages in CONVERSATIONS.items():
        for family, (tokenizer, _) in pairs.items():
            try:
                chat_ids(tokenizer, messages)
            except RequestError:
                continue
            served[name].add(family)
    assert served["one-turn"] == served["many-turns"] == set(MARKS)
    assert served["tool-result"] == set(KNOWS_TOOLS)
    assert served["roles-out-of-order"] == {"llama3", "chatml_tools"}


@pytest.mark.parametrize("family", KNOWS_TOOLS)
def test_the_model_reads_its_tools(pairs, family):
    tokenizer, _ = pairs[family]
    text = tokenizer.decode(chat_ids(tokenizer, CONVERSATIONS["one-turn"], tools=[WEATHER]), skip_special_tokens=False)
    assert '"name": "weather"' in text
    assert "The weather of a place: °C & <wind>" in text
