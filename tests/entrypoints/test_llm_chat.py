"""Chat as its users call it: begin-of-text and tools, over a tiny random checkpoint."""

import shutil

import pytest

from rapid_llm import LLM, RequestError, SamplingParams
from tests.checkpoint.writers import bos_template
from tests.tiny_model import CHAT_TEMPLATE, edit_json, save_checkpoint, tiny_llama

BOS, BOS_ID = "<|bos|>", 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), max_kv_tokens=512, max_num_seqs=4)


@pytest.mark.case("I12")
@pytest.mark.parametrize("writes", [True, False], ids=["template-writes-it", "template-does-not"])
@pytest.mark.parametrize("adds", ["post-processor", "flag", "both", "neither"])
def test_begin_of_text_comes_once_in_a_prompt_and_as_the_template_says_in_a_chat(folder, tmp_path, adds, writes):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "tokenizer_config.json", chat_template="{{ bos_token }}" * writes + CHAT_TEMPLATE)
    if adds in ("post-processor", "both"):
        edit_json(tmp_path / "tokenizer.json", post_processor=bos_template(BOS, BOS_ID))
    if adds in ("flag", "both"):
        edit_json(tmp_path / "tokenizer_config.json", add_bos_token=True)
    llm = LLM(str(tmp_path), max_kv_tokens=256, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "?"}]
    prompts = [*llm.generate(["hi", BOS + "hi"], params), list(llm.stream("hi", params))[-1]]
    chats = [*llm.chat(messages, params), list(llm.stream(messages, params))[-1]]
    added = int(adds != "neither")
    assert [output.prompt_token_ids.count(BOS_ID) for output in prompts] == [added, 1, added]
    assert [output.prompt_token_ids.count(BOS_ID) for output in chats] == [int(writes)] * 2
    assert all(output.prompt_token_ids[0] == BOS_ID for output in (prompts + chats) if BOS_ID in output.prompt_token_ids)


WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
USER = [{"role": "user", "content": "hi"}]


def test_tools_reach_the_template_of_every_conversation_and_of_a_stream(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "tokenizer_config.json", chat_template="{{ tools | tojson if tools else '-' }}" + CHAT_TEMPLATE)
    llm = LLM(str(tmp_path), max_kv_tokens=512, max_num_seqs=4)
    shown = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
    params = SamplingParams(temperature=0.0, max_tokens=1)
    outputs = llm.chat([USER, USER], params, tools=WEATHER) + list(llm.stream(USER, params, WEATHER))[-1:]
    assert [output.prompt for output in outputs] == [shown + "<|user|>hi<|end|><|assistant|>"] * 3
    assert [output.prompt for output in llm.chat(USER, params)] == ["-<|user|>hi<|end|><|assistant|>"]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        pytest.param(lambda llm: llm.chat(USER, tools=WEATHER), "template does not know tools", id="chat"),
        pytest.param(lambda llm: llm.stream(USER, tools=WEATHER), "template does not know tools", id="stream"),
        pytest.param(lambda llm: llm.chat(USER, tools=[]), "tools is empty", id="no-tools"),
        pytest.param(lambda llm: llm.chat(USER, tools=["weather"]), r"tools\[0\] cannot be used", id="names"),
        pytest.param(lambda llm: llm.stream("hi", tools=WEATHER), "tools need a conversation: got str", id="text"),
        pytest.param(lambda llm: llm.stream([1, 2], tools=WEATHER), "tools need a conversation: got list", id="ids"),
    ],
)
def test_tools_that_would_have_no_effect_are_refused(llm, ask, words):
    with pytest.raises(RequestError, match=words):
        ask(llm)
    assert not llm._engine.has_work
