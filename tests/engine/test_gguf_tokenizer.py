"""Tokenizers from GGUF metadata against the tokenizers library, set up as Hugging Face's files of the same families set it up."""

# ruff: noqa: RUF001 - texts in many scripts

import importlib
import json
import struct
from array import array
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from rapid_llm.checkpoint.file_reader import FileReader
from rapid_llm.checkpoint.gguf_header import read_gguf_header
from rapid_llm.checkpoint.source import TokenizerMetadata
from rapid_llm.engine.detokenizer import IncrementalDetokenizer
from rapid_llm.engine.tokenizer import Tokenizer
from rapid_llm.errors import CheckpointError
from tests.checkpoint.writers import Gguf

# normalizer, pre_tokenizer and ignore_merges of each family's tokenizer.json
SHIPPED = json.loads((Path(__file__).parents[1] / "data" / "pre_tokenizers.json").read_text())
SAME_FILE = {
    **{family: family for family in SHIPPED},
    "starcoder": "smollm",
    "refact": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "smaug-bpe": "dbrx",
    "joyai-llm": "deepseek-v3",
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TEXTS = [
    "Hello, world!  It's 2024: they're 12 of 1234567 apples (3.14 each); DON'T'VE 'tis o'clock.",
    "  two spaces before, and after  ",
    " one\n\n\nthree newlines\r\n\ttab \t mixed\n ",
    "def f(self, camelCase=True, HTTPServer2=None):\n    return {'a_b': [1, 22, 333, 4444]}  # ok/\n\n",
    "naïve façade – “quotes” … e\u0301 vs é, Å vs A\u030a, \ufb01ne, ½ ² Ⅷ ٣٤٥ m²",
    "你好，世界。今天是2024年5月17日！ カタカナとひらがな 한국어 안녕하세요",
    "Привет, мир! ЁЖ. Γειά σου Κόσμε, ΐ ώ. שלום עולם مرحبا بالعالم हिन्दी ภาษาไทย",
    "🙂🎉👨‍👩‍👧‍👦 🇫🇷 a🙂b \u200b\u00a0\u3000end",
    "$100+20=<120>^2~`x`|y| #tag @me a&b --- *** === !!!???...",
    "",
    " ",
    "\n",
    "a",
    "'s 'S 'LL it'S I'm I'M",
    "0 00 000 0000 00000 x1y22z333 1,234.5",
]
MARKED = "<|start|>user\nhi<|end|> <tool>x</tool> a<|end|><|end|>\n<|start|>"
texts = st.text(st.one_of(st.sampled_from("ab Zé9'\n\t.,!1 23\u0301你の한🙂\r_$-/İſΩ"), st.characters(exclude_categories=["Cs"])))


def tokenizer_of(metadata, **changes):
    values = {"tokenizer.ggml." + key: value for key, value in {**metadata, **changes}.items() if value is not ...}
    return Tokenizer.from_source(TokenizerMetadata(values, Path("model.gguf")))


def refusal_of(metadata, **changes):
    with pytest.raises(CheckpointError, match=r"model\.gguf: ") as refusal:
        tokenizer_of(metadata, **changes)
    return str(refusal.value)


# --- byte-level BPE ---


@cache
def trained(family):
    """A small vocabulary of a family: the library's tokenizer as the family ships it, and the same as GGUF metadata."""
    backend = Backend(models.BPE())
    parts = json.loads(backend.to_str()) | {key: SHIPPED[family][key] for key in ("normalizer", "pre_tokenizer")}
    backend = Backend.from_str(json.dumps(parts))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    backend.train_from_iterator(TEXTS * 2, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special, added = ["<|start|>", "<|end|>"], ["<tool>", "</tool>"]
    # No merges lead to these two: what the word becomes shows whether merges are ignored for whole words.
    tokens = [*tokens, "\u0120unmergeable", "unmergeable", *special, *added]
    model |= {"vocab": {token: i for i, token in enumerate(tokens)}, "ignore_merges": SHIPPED[family]["ignore_merges"]}
    parts = json.loads(backend.to_str()) | {"model": model}
    oracle = Backend.from_str(json.dumps(parts))
    oracle.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    oracle.add_tokens([AddedToken(token, normalized=False) for token in added])
    metadata = {
        "model": "gpt2",
        "pre": family,
        "tokens": tokens,
        "token_type": array("i", [NORMAL] * (len(tokens) - 4) + [CONTROL] * 2 + [USER_DEFINED] * 2),
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
    }
    return oracle, metadata


@pytest.mark.parametrize("pre", SAME_FILE)
def test_a_family_cuts_text_as_its_tokenizer_json_does(pre):
    oracle, metadata = trained(SAME_FILE[pre])
    tokenizer = tokenizer_of(metadata, pre=pre)
    for text in [*TEXTS, MARKED, "unmergeable unmergeable", "\n".join(TEXTS)]:
        assert words_of(tokenizer._backend, text) == words_of(oracle, text)
        assert tokenizer.encode(text) == oracle.encode(text, add_special_tokens=False).ids, text


def words_of(backend, text):
    """A small vocabulary may hide a difference between words; here none is hidden."""
    text = backend.normalizer.normalize_str(text) if backend.normalizer else text
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", SHIPPED)
@given(text=texts)
@settings(deadline=None, max_examples=60)
def test_any_text_gets_the_librarys_ids_and_comes_back(pre, text):
    oracle, tokenizer = trained(pre)[0], cached_tokenizer(pre)
    ids = tokenizer.encode(text)
    assert words_of(tokenizer._backend, text) == words_of(oracle, text)
    assert ids == oracle.encode(text, add_special_tokens=False).ids
    normalized = oracle.normalizer.normalize_str(text) if oracle.normalizer else text
    assert tokenizer.decode(ids, skip_special_tokens=False) == normalized


@cache
def cached_tokenizer(pre):
    return tokenizer_of(trained(pre)[1])


def test_the_pre_tokenizers_that_are_served_are_these():
    message = refusal_of(trained("gpt-2")[1], pre="viking")
    assert "key 'tokenizer.ggml.pre' is not supported: got 'viking'" in message
    wanted = message.partition("wanted ")[2].partition(";")[0]
    assert set(wanted.split(" | ")) == {repr(name) for name in (*SAME_FILE, "default")}


@pytest.mark.parametrize("pre", ["default", ...])
def test_a_file_without_a_family_is_cut_as_llama_cpp_cuts_it(pre, caplog):
    tokenizer = tokenizer_of(trained("gpt-2")[1], pre=pre)
    words = [word for word, _ in tokenizer._backend.pre_tokenizer.pre_tokenize_str("It's $5, or 1234567x  y")]
    assert words == ["It", "'", "s", "\u0120", "$", "5", ",", "\u0120or", "\u0120", "123", "456", "7", "x", "\u0120", "\u0120y"]
    assert ("no key 'tokenizer.ggml.pre'" in caplog.text) == (pre is ...)


@pytest.mark.parametrize(
    ("pre", "key", "bos_id", "expected"),
    [
        pytest.param("llama-bpe", ..., 3, True, id="its-family-does"),
        pytest.param("tekken", ..., 3, True, id="its-family-does-too"),
        pytest.param("llama-bpe", False, 3, False, id="the-file-wins"),
        pytest.param("llama-bpe", ..., ..., False, id="there-is-none"),
        pytest.param("qwen2", ..., 3, False, id="its-family-does-not"),
        pytest.param("qwen2", True, 3, True, id="the-file-asks"),
    ],
)
def test_begin_of_text_of_a_byte_level_file_is_its_familys_way_unless_it_says(pre, key, bos_id, expected):
    tokenizer = tokenizer_of(trained("gpt-2")[1], pre=pre, add_bos_token=key, bos_token_id=bos_id)
    assert tokenizer.adds_bos is expected
    assert tokenizer.encode("a").count(3) == expected


# --- SentencePiece's BPE ---


@cache
def sentencepiece_metadata():
    """Pieces as SentencePiece orders them: control tokens, bytes, merged pieces by score, then characters."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    corpus = [*TEXTS, "<0x0A> <s", "    eight        spaces", "aaaa aaaaaa aabaa"]
    backend.train_from_iterator(corpus * 2, trainers.BpeTrainer(vocab_size=900, show_progress=False, min_frequency=1))
    model = json.loads(backend.to_str())["model"]
    merged = list(dict.fromkeys("".join(merge if isinstance(merge, list) else merge.split(" ")) for merge in model["merges"]))
    spaces = ["\u2581\u2581", "\u2581\u2581\u2581", "\u2581\u2581\u2581\u2581"]
    merged += [piece for piece in spaces if piece not in merged]
    rare = set("🙂👨‍Ⅷ한")  # only their bytes stand for these
    characters = [piece for piece in model["vocab"] if len(piece) == 1 and piece not in rare]
    merged = [piece for piece in merged if not rare & set(piece)]
    control = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    user, unused = ["<tool>", "[INST]"], ["<pad0>"]
    tokens = [*control, *merged, *characters, *user, *unused]
    ranked = len(merged) + len(characters)
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * ranked, USER_DEFINED, USER_DEFINED, UNUSED]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": array("f", [0.0] * len(control) + [-float(i) for i in range(ranked)] + [0.0, 0.0, -1000.0]),
        "token_type": array("i", kinds),
    }


@cache
def converted(add_prefix_space=True):
    return converted_from(sentencepiece_metadata(), add_prefix_space)


def converted_from(metadata, add_prefix_space=True):
    """The library's tokenizer, put together by transformers' converter of SentencePiece models, and ours."""
    module = importlib.import_module("transformers.convert_slow_tokenizer")
    tokens, kinds = metadata["tokens"], metadata["token_type"]
    vocab, scores = {token: i for i, token in enumerate(tokens)}, dict(zip(tokens, metadata["scores"], strict=True))
    never_merged = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (UNKNOWN, CONTROL, BYTE)]
    merges = module.generate_merges(vocab, scores, skip_tokens=never_merged)
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    converter = SimpleNamespace(original_tokenizer=SimpleNamespace(legacy=True, add_prefix_space=add_prefix_space))
    backend.normalizer = module.LlamaConverter.normalizer(converter, None)
    backend.decoder = module.LlamaConverter.decoder(converter, "\u2581", add_prefix_space)
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            backend.add_tokens([AddedToken(token, normalized=False, special=kind != USER_DEFINED)])
    return backend, tokenizer_of(metadata, add_space_prefix=add_prefix_space)


SPM_TEXTS = [*TEXTS, "<s>[INST] hi [/INST] ho </s><s>[INST]x", "a <tool> b<tool>c <unk>", "aaaaaaa baaab", "x" + " " * 23 + "y"]


@pytest.mark.parametrize("add_prefix_space", [True, False])
def test_a_vocabulary_with_scores_gives_the_ids_of_the_converted_tokenizer(add_prefix_space):
    oracle, tokenizer = converted(add_prefix_space)
    for text in [*SPM_TEXTS, "\n".join(SPM_TEXTS)]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == oracle.encode(text, add_special_tokens=False).ids, text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip), text


@pytest.mark.parametrize("add_prefix_space", [True, False])
@given(text=texts)
@settings(deadline=None, max_examples=200)
def test_any_text_gets_the_converted_tokenizers_ids_and_streams_back(add_prefix_space, text):
    oracle, tokenizer = converted(add_prefix_space)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == oracle.encode(text, add_special_tokens=False).ids
    plain = text.replace("\u2581", " ")  # the mark itself is read as a space
    assert tokenizer.decode(ids) == plain
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join([*(detokenizer.push([token]) for token in ids), detokenizer.finish()]) == plain
    continued = IncrementalDetokenizer(tokenizer, continues=True)
    mark = " " if add_prefix_space and text else ""
    assert "".join([*(continued.push([token]) for token in ids), continued.finish()]) == mark + plain


def test_pieces_with_the_best_score_merge_first():
    metadata = sentencepiece_metadata()
    letters = {"tokens": [*metadata["tokens"], "qz", "zq"], "token_type": metadata["token_type"] + array("i", [1, 1])}
    assert "q" in letters["tokens"]
    for scores, expected in (((-1.0, -2.0), ["\u2581", "qz", "q"]), ((-2.0, -1.0), ["\u2581", "q", "zq"])):
        tokenizer = tokenizer_of(metadata, **letters, scores=metadata["scores"] + array("f", scores))
        ids = tokenizer.encode("qzq", add_special_tokens=False)
        assert [letters["tokens"][token] for token in ids] == expected


def test_equal_scores_merge_in_the_order_of_the_converted_tokenizer():
    metadata = sentencepiece_metadata()
    oracle, tokenizer = converted_from(metadata | {"scores": array("f", [0.0] * len(metadata["scores"]))})
    _, unequal = converted()
    changed = False
    for text in SPM_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == oracle.encode(text, add_special_tokens=False).ids, text
        changed = changed or ids != unequal.encode(text, add_special_tokens=False)
    assert changed


def test_what_no_piece_covers_becomes_bytes_and_text_never_becomes_one():
    metadata = sentencepiece_metadata()
    tokenizer = tokenizer_of(metadata)
    pieces = [metadata["tokens"][token] for token in tokenizer.encode("🙂", add_special_tokens=False)]
    assert pieces == ["\u2581", *(f"<0x{byte:02X}>" for byte in "🙂".encode())]
    written = [metadata["tokens"][token] for token in tokenizer.encode("<0x0A>", add_special_tokens=False)]
    assert "<0x0A>" not in written
    # nor where pieces would make one
    more = ["<0", "x0", "A>", "x0A>"]
    tokenizer = tokenizer_of(
        metadata,
        tokens=metadata["tokens"] + more,
        scores=metadata["scores"] + array("f", [9.0, 9.0, 9.0, 8.0]),
        token_type=metadata["token_type"] + array("i", [1] * 4),
    )
    ids = tokenizer.encode("<0x0A>", add_special_tokens=False)
    assert ids[-2:] == [len(metadata["tokens"]), len(metadata["tokens"]) + 3]
    assert tokenizer.decode(ids) == "<0x0A>"


def test_a_control_token_is_special_and_a_users_token_is_text():
    metadata = sentencepiece_metadata()
    tokenizer = tokenizer_of(metadata)
    ids = tokenizer.encode("<s>a<tool></s><unk>", add_special_tokens=False)
    assert [ids[0], *ids[-3:]] == [1, metadata["tokens"].index("<tool>"), 2, 0]
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s> a<tool></s><unk>"
    assert metadata["tokens"].index("<pad0>") not in tokenizer.encode("<pad0>")


@pytest.mark.parametrize(
    ("keys", "bos", "eos", "adds"),
    [
        pytest.param({}, "<s>", "</s>", True, id="defaults"),
        pytest.param({"add_bos_token": False}, "<s>", "</s>", False, id="the-file-adds-none"),
        pytest.param({"bos_token_id": 2, "eos_token_id": 1}, "</s>", "<s>", True, id="the-file-names-others"),
    ],
)
def test_begin_and_end_of_text_of_a_sentencepiece_file(keys, bos, eos, adds):
    tokenizer = tokenizer_of(sentencepiece_metadata(), **keys)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.adds_bos) == (bos, eos, adds)
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [tokenizer.bos_id] * adds + plain
    assert tokenizer.encode(bos + "hi") == [tokenizer.bos_id, *plain]
    assert tokenizer.encode("hi")[-1] not in tokenizer.eos_ids


def test_a_file_on_disk_gives_the_same_tokenizer(tmp_path):
    metadata = sentencepiece_metadata()
    scores = metadata["scores"]
    plain = {key: list(value) for key, value in metadata.items() if key in ("tokens", "token_type")} | {"model": "llama"}
    raw = {"tokenizer.ggml.scores": (9, struct.pack("<IQ", 6, len(scores)) + scores.tobytes())}
    file = tmp_path / "model.gguf"
    file.write_bytes(Gguf({f"tokenizer.ggml.{key}": value for key, value in plain.items()}, raw_metadata=raw).to_bytes())
    reader = FileReader(file)
    tokenizer = Tokenizer.from_source(TokenizerMetadata(read_gguf_header(reader).metadata, file))
    reader.close()
    expected = tokenizer_of(metadata)
    assert [tokenizer.encode(text) for text in SPM_TEXTS] == [expected.encode(text) for text in SPM_TEXTS]


# --- refusals ---


def without(metadata, piece, **changes):
    place = metadata["tokens"].index(piece)
    cut = {key: metadata[key][:place] + metadata[key][place + 1 :] for key in ("tokens", "scores", "token_type")}
    return {**cut, **changes}


SPM, GPT2 = sentencepiece_metadata(), trained("gpt-2")[1]
NUMBER = len(SPM["tokens"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"model": "t5"}, "'tokenizer.ggml.model' is not supported: got 't5', wanted 'gpt2'", id="unigram"),
        pytest.param({"model": "bert"}, "got 'bert'", id="wordpiece"),
        pytest.param({"model": "rwkv"}, "got 'rwkv'", id="rwkv"),
        pytest.param({"model": "none"}, "got 'none'", id="none"),
        pytest.param({"model": 3}, "got 3", id="number"),
        pytest.param({"scores": ...}, "'tokenizer.ggml.scores' is not supported: got no such key", id="no-scores"),
        pytest.param({"scores": SPM["scores"][1:]}, f"wanted {NUMBER:,} numbers", id="too-few-scores"),
        pytest.param({"scores": "x"}, "'tokenizer.ggml.scores' is not supported: got str", id="scores-text"),
        pytest.param({"scores": ["x"]}, "'tokenizer.ggml.scores' is not supported: got list", id="scores-texts"),
        pytest.param({"scores": SPM["scores"][:-1] + array("f", [float("nan")])}, "no number, wanted finite", id="nan"),
        pytest.param({"scores": SPM["scores"][:-1] + array("f", [float("inf")])}, "infinite", id="infinite"),
        pytest.param({"token_type": ...}, "'tokenizer.ggml.token_type' is not supported: got no such key", id="no-kinds"),
        pytest.param({"token_type": SPM["token_type"][1:]}, f"got {NUMBER - 1:,} of type 'i'", id="too-few-kinds"),
        pytest.param({"token_type": array("f", [1.0] * NUMBER)}, "of type 'f'", id="kinds-fractions"),
        pytest.param({"token_type": array("i", [7] * NUMBER)}, "got 7 to 7, wanted 0 to 6", id="kind-unheard-of"),
        pytest.param({"token_type": array("i", [-1] + [1] * (NUMBER - 1))}, "got -1 to 1", id="kind-negative"),
        pytest.param(without(SPM, "<0x0A>"), "got no <0x0A>, wanted a token for each byte", id="byte-missing"),
        pytest.param({"unknown_token_id": NUMBER}, "'tokenizer.ggml.unknown_token_id' is not supported", id="unk-past-the-end"),
        pytest.param({"unknown_token_id": "x"}, "'tokenizer.ggml.unknown_token_id' is no token id", id="unk-text"),
        pytest.param({"bos_token_id": NUMBER}, "a special token is unknown", id="bos-past-the-end"),
        pytest.param({"tokens": [*SPM["tokens"][:-1], "<s>"]}, "got 1 tokens twice", id="twice"),
        pytest.param({"tokens": ...}, "'tokenizer.ggml.tokens' is not supported: got no such key", id="no-tokens"),
        pytest.param({"tokens": ["", *SPM["tokens"][1:]]}, "an empty control token", id="empty-control"),
        pytest.param({"tokens": [*SPM["tokens"][:-1], "y" * 513]}, "got a piece of 513 characters", id="endless-piece"),
        pytest.param({"add_space_prefix": 1}, "'tokenizer.ggml.add_space_prefix' cannot be used", id="flag-number"),
        pytest.param({"add_bos_token": "yes"}, "'tokenizer.ggml.add_bos_token' cannot be used", id="flag-text"),
        pytest.param({"remove_extra_whitespaces": True}, "'tokenizer.ggml.remove_extra_whitespaces'", id="spaces-collapse"),
    ],
)
def test_a_broken_sentencepiece_file_is_refused_by_key(changes, message):
    assert message in refusal_of(SPM, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"pre": 7}, "'tokenizer.ggml.pre' is not supported: got 7", id="pre-number"),
        pytest.param({"pre": ["llama-bpe"]}, "'tokenizer.ggml.pre' is not supported: got ['llama-bpe']", id="pre-list"),
        pytest.param({"merges": ...}, "'tokenizer.ggml.merges' is not supported: got no such key", id="no-merges"),
        pytest.param({"merges": ["a b c"]}, "'tokenizer.ggml.merges' is not supported", id="merge-of-three"),
        pytest.param({"token_type": array("i", [99] * len(GPT2["tokens"]))}, "wanted 0 to 6", id="kind-unheard-of"),
    ],
)
def test_a_broken_byte_level_file_is_refused_by_key(changes, message):
    assert message in refusal_of(GPT2, **changes)


odd = st.sampled_from([None, True, 5, -1, 2**40, 1.5, "x", [], [""], array("f", [float("nan")]), array("i"), array("i", [1])])


@given(model=st.sampled_from(["gpt2", "llama"]), data=st.data())
@settings(deadline=None, max_examples=200)
def test_any_value_under_any_key_is_a_tokenizer_or_a_refusal(model, data):
    metadata = SPM if model == "llama" else GPT2
    names = ["bos_token_id", "unknown_token_id", "add_space_prefix", "add_bos_token", "eot_token_id", *metadata]
    changes = data.draw(st.dictionaries(st.sampled_from(names), odd, min_size=1, max_size=2))
    try:
        tokenizer = tokenizer_of(metadata, **changes)
    except CheckpointError as refusal:
        assert "model.gguf" in str(refusal)  # noqa: PT017 - either outcome is right
        return
    tokenizer.decode(tokenizer.encode("ab <s>"))


@pytest.mark.case("J5")
@pytest.mark.parametrize(("kind", "ends"), [(CONTROL, True), (NORMAL, False)], ids=["control", "text"])
def test_a_control_token_that_ends_a_turn_by_its_name_ends_answers(kind, ends):
    _, metadata = trained("qwen2")
    place = len(metadata["tokens"])
    changes = {"tokens": [*metadata["tokens"], "<|im_end|>"], "token_type": metadata["token_type"] + array("i", [kind])}
    assert (place in tokenizer_of(metadata, **changes).eos_ids) == ends
