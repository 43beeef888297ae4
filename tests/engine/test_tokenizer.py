import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.checkpoint.embedded import find_embedded_model
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.checkpoint.source import TokenizerFolder, TokenizerMetadata
from rapid_llm.engine.templates import render
from rapid_llm.engine.tokenizer import Tokenizer, end_ids
from rapid_llm.errors import CheckpointError, RequestError
from tests.checkpoint.writers import (
    BYTE_TOKENS,
    END,
    Gguf,
    bos_template,
    gguf_metadata,
    llama_config,
    tokenizer_json,
    write_folder,
    write_tokenizer,
)

REFERENCES = json.loads((Path(__file__).parents[1] / "data" / "references.json").read_text())
BOS = "<|bos|>"
BOS_ID, END_ID = 256, 257


def from_folder(folder, *, bos_token_id=None, **parts):
    return Tokenizer.from_source(TokenizerFolder(write_tokenizer(folder, **parts), bos_token_id))


def from_metadata(**changes):
    return Tokenizer.from_source(TokenizerMetadata(as_read(gguf_metadata(**changes)), Path("model.gguf")))


def as_read(metadata):
    """Metadata as the header reader gives it: numbers as arrays."""
    from array import array

    is_numbers = {key: isinstance(value, list) and value and isinstance(value[0], int) for key, value in metadata.items()}
    return {key: array("i", value) if is_numbers[key] else value for key, value in metadata.items()}


def refusal_of(make, *args, **kwargs):
    with pytest.raises(CheckpointError) as refusal:
        make(*args, **kwargs)
    return str(refusal.value)


# --- the embedded model ---


@pytest.fixture(scope="module")
def embedded():
    return Tokenizer.from_checkpoint(open_checkpoint(find_embedded_model()))


@pytest.mark.real_model
@pytest.mark.parametrize(
    "reference", REFERENCES["references"] + REFERENCES["stable"], ids=lambda entry: str(entry.get("id", "stable"))
)
def test_prompts_and_answers_of_the_embedded_model_equal_the_references(embedded, reference):
    prompt = reference.get("prompt", reference)
    rendered = (
        prompt["text"] if "text" in prompt else render(prompt["messages"], embedded.chat_template, bos_token=embedded.bos_token)
    )
    assert rendered == reference.get("rendered", rendered)
    assert embedded.encode(rendered, add_special_tokens="text" in prompt) == reference["prompt_ids"]
    assert embedded.decode(reference["output_ids"], skip_special_tokens=False) == reference["output_text"]


@pytest.mark.real_model
def test_special_tokens_of_the_embedded_model_are_known(embedded):
    assert (embedded.bos_id, embedded.bos_token) == (1, "<|im_start|>")
    assert (embedded.eos_ids, embedded.eos_token) == ((2, 0), "<|im_end|>")
    assert embedded.vocab_size == 49152
    assert not embedded.adds_bos
    assert embedded.encode("2024") == [embedded.encode(digit)[0] for digit in "2024"]  # digits one by one
    assert embedded.decode([1, 2, *embedded.encode("hi")]) == "hi"


# --- encoding and begin-of-text ---


@given(text=st.text())
@settings(deadline=None)
def test_any_text_comes_back(text):
    tokenizer = from_metadata()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("post_processor", "flag", "expected"),
    [
        pytest.param(None, None, False, id="neither"),
        pytest.param(bos_template(BOS, BOS_ID), None, True, id="by-post-processor"),
        pytest.param(None, True, True, id="by-flag"),
        pytest.param(bos_template(BOS, BOS_ID), True, True, id="both-give-one"),
        pytest.param(bos_template(BOS, BOS_ID), False, False, id="flag-wins"),
    ],
)
@pytest.mark.case("I12")
def test_begin_of_text_comes_exactly_once(tmp_path, post_processor, flag, expected):
    config = {"bos_token": BOS, "eos_token": END} | ({} if flag is None else {"add_bos_token": flag})
    tokenizer = from_folder(tmp_path, config=config, added=(BOS, END), post_processor=post_processor)
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.adds_bos is expected
    assert tokenizer.encode("hi") == ([BOS_ID] if expected else []) + plain
    assert tokenizer.encode("") == ([BOS_ID] if expected else [])
    assert tokenizer.encode(BOS + "hi") == [BOS_ID, *plain]
    assert BOS_ID not in plain


def test_an_end_of_text_token_after_the_prompt_is_put_only_when_asked_for(tmp_path):
    assert from_folder(tmp_path / "no", added=(BOS, END)).encode("a")[-1] != END_ID
    asked = from_folder(tmp_path / "yes", added=(BOS, END), config={"eos_token": END, "add_eos_token": True})
    assert asked.encode("a")[-1] == END_ID


def test_settings_of_a_training_run_do_not_cut_or_pad_prompts(tmp_path):
    write_tokenizer(tmp_path)
    parts = tokenizer_json()
    parts["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    parts["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    tokenizer = Tokenizer.from_source(TokenizerFolder(tmp_path))
    assert [len(tokenizer.encode(text)) for text in ("", "ab", "abcdef")] == [0, 2, 6]


@pytest.mark.parametrize(("text", "got"), [("\ud800", "lone surrogates"), (None, "NoneType"), (b"hi", "bytes"), (["hi"], "list")])
def test_what_is_no_text_is_refused(text, got):
    with pytest.raises(RequestError, match=f"the text cannot be encoded: got {got}"):
        from_metadata().encode(text)


@pytest.mark.case("G12")
@pytest.mark.parametrize("unknown", [257, 5000, 2**31, 2**32, 2**70, -1])
def test_an_unknown_id_gives_no_text(unknown):
    tokenizer = from_metadata()
    assert tokenizer.decode([unknown, *tokenizer.encode("hi"), unknown]) == "hi"
    assert tokenizer.token_text(unknown) == ""


# --- special tokens and end ids ---


def test_special_tokens_may_be_named_by_string_or_object_in_either_file(tmp_path):
    config = {"bos_token": {"content": BOS, "lstrip": False}}
    write_tokenizer(tmp_path, config=config, added=(BOS, END))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": END, "bos_token": "!"}))
    tokenizer = Tokenizer.from_source(TokenizerFolder(tmp_path))
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.eos_ids, tokenizer.eos_token) == (BOS_ID, BOS, (END_ID,), END)


def test_the_model_config_names_begin_of_text_where_the_tokenizer_does_not(tmp_path):
    assert from_folder(tmp_path / "a", bos_token_id=BOS_ID, added=(BOS, END)).bos_token == BOS
    assert from_folder(tmp_path / "b", bos_token_id=9999).bos_id is None


def test_a_special_token_that_is_no_token_is_refused(tmp_path):
    assert "eos_token is no token: got '</s>'" in refusal_of(from_folder, tmp_path, config={"eos_token": "</s>"})


def test_a_flag_without_its_token_is_refused(tmp_path):
    assert "add_bos_token is set: got no such token" in refusal_of(from_folder, tmp_path, config={"add_bos_token": True})


@pytest.mark.case("J5")
@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        pytest.param(1, {"eos_token_id": [2, 3]}, {1, 2, 3, 256}, id="int-and-list"),
        pytest.param([1, 4], {"eos_token_id": 2}, {1, 2, 4, 256}, id="list-and-int"),
        pytest.param(None, {"eos_token_id": None}, {256}, id="nulls"),
        pytest.param(..., None, {256}, id="tokenizer-alone"),
        pytest.param(1, {"temperature": 0.5}, {1, 256}, id="generation-without-it"),
    ],
)
def test_end_ids_are_the_union_of_all_files(tmp_path, config_eos, generation, expected):
    write_folder(tmp_path, config=llama_config(eos_token_id=config_eos), generation=generation, tokenizer={})
    source = open_checkpoint(tmp_path)
    assert end_ids(source, Tokenizer.from_checkpoint(source)) == expected


@pytest.mark.case("J5")
def test_gguf_end_ids_are_of_text_of_turn_and_of_message():
    keys = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    assert from_metadata(**keys).eos_ids == (256, 5, 6)


# --- templates ---


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, None, id="none"),
        pytest.param({"tokenizer_config.json": {"chat_template": "A"}}, "A", id="string"),
        pytest.param(
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
                }
            },
            "D",
            id="default-of-a-list",
        ),
        pytest.param({"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "R"}]}}, "R", id="list-of-one"),
        pytest.param(
            {"tokenizer_config.json": {"chat_template": [{"name": "x", "template": "X"}, {"name": "y", "template": "Y"}]}},
            None,
            id="no-telling",
        ),
        pytest.param({"tokenizer_config.json": {"chat_template": "A"}, "chat_template.jinja": "Bé"}, "Bé", id="file-wins"),
        pytest.param({"tokenizer_config.json": {}, "chat_template.json": {"chat_template": "J"}}, "J", id="json-file"),
    ],
)
def test_the_chat_template_is_found(tmp_path, files, expected):
    write_tokenizer(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert Tokenizer.from_source(TokenizerFolder(tmp_path)).chat_template == expected


@pytest.mark.parametrize("value", [7, [], ["A"], [{"name": "default"}], {"default": "A"}])
def test_a_chat_template_of_another_form_is_refused(tmp_path, value):
    assert "key 'chat_template' cannot be used" in refusal_of(from_folder, tmp_path, config={"chat_template": value})


# --- refusals ---


def test_a_folder_without_tokenizer_json_says_how_to_write_one(tmp_path):
    message = refusal_of(Tokenizer.from_source, TokenizerFolder(tmp_path))
    assert "has no tokenizer.json" in message
    assert "save_pretrained" in message


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}', "\0"])
def test_a_broken_tokenizer_json_is_refused(tmp_path, text):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    assert "tokenizer.json cannot be used" in refusal_of(Tokenizer.from_source, TokenizerFolder(tmp_path))


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        pytest.param({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece", id="WordPiece"),
        pytest.param(
            {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}, "Fuse ByteFallback", id="order"
        ),
        pytest.param(
            {
                "type": "Sequence",
                "decoders": [
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 0, "stop": 1},
                ],
            },
            "ByteFallback Fuse Strip",
            id="strip-at-the-end",
        ),
    ],
)
def test_an_unsupported_decoder_is_refused_by_name(tmp_path, decoder, name):
    assert f"the tokenizer's decoder is not supported: got {name}" in refusal_of(from_folder, tmp_path, decoder=decoder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"tokenizer.ggml.model": "t5"}, "key 'tokenizer.ggml.model' is not supported: got 't5'", id="unigram"),
        pytest.param({"tokenizer.ggml.model": ...}, "key 'tokenizer.ggml.model' is not supported: got None", id="no-model"),
        pytest.param({"tokenizer.ggml.pre": "viking"}, "got 'viking', wanted 'default' | 'gpt-2' | 'smollm'", id="pre"),
        pytest.param(
            {"tokenizer.ggml.tokens": ...}, "key 'tokenizer.ggml.tokens' is not supported: got no such key", id="no-tokens"
        ),
        pytest.param({"tokenizer.ggml.tokens": [*BYTE_TOKENS, "!"]}, "got 1 tokens twice", id="token-twice"),
        pytest.param({"tokenizer.ggml.merges": ["a"]}, "key 'tokenizer.ggml.merges'", id="merge-of-one"),
        pytest.param({"tokenizer.ggml.merges": ["a b"]}, "key 'tokenizer.ggml.merges'", id="merge-to-no-token"),
        pytest.param({"tokenizer.ggml.token_type": [1, 3]}, "wanted 257 numbers", id="types-too-few"),
        pytest.param({"tokenizer.ggml.eos_token_id": 9999}, "a special token is unknown: got id 9999", id="eos-past-the-end"),
        pytest.param({"tokenizer.ggml.eos_token_id": "x"}, "is no token id", id="eos-text"),
        pytest.param({"tokenizer.ggml.add_bos_token": 1}, "wanted true or false", id="flag-number"),
        pytest.param({"tokenizer.ggml.add_bos_token": True}, "add_bos_token is set: got no such token", id="flag-without-token"),
        pytest.param({"tokenizer.chat_template": 5}, "key 'tokenizer.chat_template'", id="template-number"),
    ],
)
def test_gguf_tokenizers_of_another_kind_are_refused_by_key(changes, message):
    text = refusal_of(from_metadata, **changes)
    assert message in text
    assert "model.gguf" in text


def test_gguf_pre_tokenizers_differ_in_digits():
    tokens = [*BYTE_TOKENS, END, "12"]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 256 + [3, 1], "tokenizer.ggml.merges": ["1 2"]}
    assert len(from_metadata(**changes, **{"tokenizer.ggml.pre": "smollm"}).encode("12")) == 2
    for pre in ("gpt-2", ...):
        assert from_metadata(**changes, **{"tokenizer.ggml.pre": pre}).encode("12") == [257]


def test_user_defined_tokens_are_found_whole_and_are_not_special():
    changes = {"tokenizer.ggml.tokens": [*BYTE_TOKENS, END, "<tool>"], "tokenizer.ggml.token_type": [1] * 256 + [3, 4]}
    tokenizer = from_metadata(**changes)
    assert tokenizer.encode(f"a<tool>{END}")[1:] == [257, 256]
    assert tokenizer.decode([257, 256]) == "<tool>"


@pytest.fixture(scope="module")
def fuzzed_file(tmp_path_factory):
    short = {"tokenizer.ggml.tokens": ["a", "b", "ab", END], "tokenizer.ggml.token_type": [1, 1, 1, 3], "llama.vocab_size": 4}
    ends = {"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.bos_token_id": 3}
    more = {"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "{{ messages }}"}
    return tmp_path_factory.mktemp("fuzz") / "model.gguf", Gguf(gguf_metadata(**short, **ends, **more)).to_bytes()


@given(flips=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=4))
@settings(deadline=None, max_examples=400)
def test_flipped_bytes_of_gguf_metadata_give_an_error_or_a_tokenizer(fuzzed_file, flips):
    path, whole = fuzzed_file
    content = bytearray(whole)
    for place, value in flips:
        content[place % len(content)] = value
    path.write_bytes(content)
    try:
        tokenizer = Tokenizer.from_checkpoint(open_checkpoint(path))
    except CheckpointError:
        return
    tokenizer.decode(tokenizer.encode("ab"))
