import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from rapid_llm.checkpoint.source import TokenizerFolder
from rapid_llm.engine.detokenizer import IncrementalDetokenizer
from rapid_llm.engine.tokenizer import Tokenizer
from tests.checkpoint.writers import END, tokenizer_json, write_tokenizer

# Byte-level: ids 0 to 255 are bytes, 256 is the first two bytes of many emoji in one token, 257 "Ġa", 258 and 259 are special.
MERGES = (("ð", "Ł"), ("Ġ", "a"))
SENTENCEPIECE = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = write_tokenizer(tmp_path_factory.mktemp("byte_level"), merges=MERGES, added=(END, "<| 終|>"))
    return Tokenizer.from_source(TokenizerFolder(folder)), Backend.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """Pieces of text, then one token a byte."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    pieces = ["<unk>", "<s>", "▁", "▁a", "a", "b", "▁▁", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    parts = tokenizer_json(decoder=SENTENCEPIECE, added=())
    parts["model"] = {"type": "BPE", "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": [], "byte_fallback": True}
    parts["pre_tokenizer"] = None
    parts["added_tokens"] = tokenizer_json(added=("<s>",))["added_tokens"]
    parts["added_tokens"][0]["id"] = 1
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    return Tokenizer.from_source(TokenizerFolder(folder)), Backend.from_file(str(folder / "tokenizer.json")), pieces


def streamed(tokenizer, pieces, skip_special_tokens):
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


ids = st.one_of(st.integers(0, 259), st.sampled_from([256, 258, 259, 300, 2**31, 2**40, 0xF0, 0x9F]))
cut_ids = st.lists(st.lists(ids, max_size=5), max_size=12)


@pytest.mark.case("G12")
@given(pieces=cut_ids, skip=st.booleans())
@settings(deadline=None, max_examples=400)
def test_pieces_join_to_the_text_of_all_ids_and_to_the_librarys(byte_level, pieces, skip):
    tokenizer, backend = byte_level
    together = [token for piece in pieces for token in piece]
    whole = tokenizer.decode(together, skip_special_tokens=skip)
    assert "".join(streamed(tokenizer, pieces, skip)) == whole
    assert whole == backend.decode([token for token in together if token < 2**32], skip_special_tokens=skip)


@given(text=st.text(), cuts=st.lists(st.integers(0, 60), max_size=8))
@settings(deadline=None)
def test_no_piece_holds_a_part_of_a_character(byte_level, text, cuts):
    tokenizer, _ = byte_level
    together = tokenizer.encode(text, add_special_tokens=False)
    edges = [0, *sorted(min(cut, len(together)) for cut in cuts), len(together)]
    pieces = streamed(tokenizer, [together[a:b] for a, b in pairwise(edges)], False)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert pieces[-1] == ""


def test_a_character_appears_with_its_last_byte(byte_level):
    tokenizer, _ = byte_level
    one_by_one = [[token] for token in tokenizer.encode("é🎉 a", add_special_tokens=False)]
    assert streamed(tokenizer, one_by_one, True) == ["", "é", "", "", "🎉", " a", ""]


def test_an_answer_that_ends_inside_a_character_ends_in_a_replacement(byte_level):
    tokenizer, _ = byte_level
    detokenizer = IncrementalDetokenizer(tokenizer)
    first_two = tokenizer.encode("🎉", add_special_tokens=False)[:2]
    assert detokenizer.push(first_two) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.push([ord("a")]) == "a"


def test_endless_broken_bytes_flow_on(byte_level):
    tokenizer, _ = byte_level
    broken = tokenizer._backend.token_to_id("ÿ")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert all(detokenizer.push([broken]) == "\ufffd" for _ in range(1000))


@given(
    text=st.text(st.sampled_from("ab é🎉終")),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    bos=st.booleans(),
    skip=st.booleans(),
)
@settings(deadline=None)
def test_sentencepiece_text_is_the_librarys_with_its_first_space_dropped(sentencepiece, text, cuts, bos, skip):
    tokenizer, backend, pieces = sentencepiece
    known = {piece: i for i, piece in enumerate(pieces)}
    together = [1] if bos else []
    for character in text.replace(" ", "▁"):
        together += [known[character]] if character in known else [known[f"<0x{byte:02X}>"] for byte in character.encode()]
    edges = [0, *sorted(min(cut, len(together)) for cut in cuts), len(together)]
    shown = streamed(tokenizer, [together[a:b] for a, b in pairwise(edges)], skip)
    assert (
        "".join(shown)
        == tokenizer.decode(together, skip_special_tokens=skip)
        == backend.decode(together, skip_special_tokens=skip)
    )


def test_token_text_keeps_the_space_that_a_text_would_drop(sentencepiece):
    tokenizer, _, pieces = sentencepiece
    assert tokenizer.token_text(pieces.index("▁a")) == " a"
    assert tokenizer.decode([pieces.index("▁a")]) == "a"


def test_a_continuation_keeps_the_space_between_it_and_its_prompt(sentencepiece):
    tokenizer, _, pieces = sentencepiece
    ids = [pieces.index("▁a"), pieces.index("▁"), pieces.index("b")]
    for continues, expected in ((True, " a b"), (False, "a b")):
        detokenizer = IncrementalDetokenizer(tokenizer, continues=continues)
        for _ in range(2):  # ready for another sequence after the first
            assert "".join([*(detokenizer.push([token]) for token in ids), detokenizer.finish()]) == expected
