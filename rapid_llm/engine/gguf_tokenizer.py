"""A tokenizer from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece's BPE ("llama").

The keys, their defaults and the names of the pre-tokenizers are llama.cpp's (``src/llama-vocab.cpp``, MIT). How a family's text
is cut is what the tokenizer.json of its models says: llama.cpp rewrites those expressions for its own engine and leaves the
normalizers out. The merges of a "llama" vocabulary are those that transformers' converter derives (Apache-2.0).
"""

import logging
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rapid_llm.checkpoint.source import TokenizerMetadata
from rapid_llm.engine.tokenizer_parts import TokenizerParts, read_flag
from rapid_llm.errors import CheckpointError
from rapid_llm.models.config_keys import read_token_ids

logger = logging.getLogger(__name__)

_INTEGERS = "bBhHiIlLqQ"  # codes of array.array
_UNKNOWN, _CONTROL, _USER_DEFINED, _LAST_KIND = 2, 3, 4, 6
_END_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<end_of_turn>")  # as in llama.cpp (MIT)
_SPACE = "\u2581"  # what SentencePiece writes for a space
_BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
_LONGEST_PIECE = 512  # every cut of a piece is looked up; the longest pieces in use are runs of 31 spaces


# --- pre-tokenizers ---


@dataclass(frozen=True)
class _Family:
    """What a value of ``tokenizer.ggml.pre`` stands for.

    Attributes:
        steps: names of ``_STEPS``, and regular expressions: each match becomes a word, and so does the text between two. One
            step cuts the words of the step before.
        composes: characters are composed first (Unicode NFC).
        whole_words: a word that is a token is taken as it stands, whatever the merges would make of it.
        adds_bos: begin-of-text comes before a plain prompt where the file does not say.
    """

    steps: tuple[str, ...]
    composes: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_STEPS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "digits": lambda: pre_tokenizers.Digits(individual_digits=True),
    "numbers": lambda: pre_tokenizers.Digits(individual_digits=False),
    "punctuation": lambda: pre_tokenizers.Punctuation(behavior="contiguous"),
    "gpt2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "bytes": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
}
"""Steps by name; exactly one of "gpt2" and "bytes" turns characters into GPT-2's alphabet of bytes."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # of English words
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")  # camelCase is two words
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_O200K = "|".join((*(f"{word}{_ENDINGS}?" for word in _CASED), r"\p{N}{1,3}", _SYMBOLS, _REST))
_TEKKEN = "|".join((*_CASED, r"\p{N}", _SYMBOLS, _REST))
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_LETTERS = (  # with case, as Unicode had them when DeepSeek-LLM was made
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"
    "\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_V3 = _Family(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
        r" ?[\p{P}\p{S}]+[\r\n]*|" + _REST,
        "bytes",
    )
)
_LLAMA3 = _Family((_CL100K, "bytes"), whole_words=True, adds_bos=True)
_TIKTOKEN = _Family((_CL100K, "bytes"))
_STARCODER = _Family(("digits", "gpt2"))
_FAMILIES: Mapping[str, _Family] = {
    "default": _Family((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]", "bytes")),  # llama.cpp's own
    "gpt-2": _Family(("gpt2",)),
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "command-r": _Family(("digits", "gpt2"), composes=True),
    "olmo": _Family(("gpt2",), composes=True),
    "falcon": _Family(("punctuation", "gpt2", "numbers", "[0-9][0-9][0-9]")),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "dbrx": _TIKTOKEN,
    "smaug-bpe": _TIKTOKEN,
    "gpt-4o": _Family((_O200K, "bytes")),
    "tekken": _Family((_TEKKEN, "bytes"), whole_words=True, adds_bos=True),
    "qwen2": _Family((_CL100K.replace("{1,3}", ""), "bytes"), composes=True),
    "deepseek-llm": _Family(
        (
            r"[\r\n]",
            rf"\s?[{_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            "digits",
            "bytes",
        )
    ),
    "deepseek-coder": _Family((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, "digits", "bytes")),
    "deepseek-v3": _DEEPSEEK_V3,
    "joyai-llm": _DEEPSEEK_V3,
}
TOKENIZERS = f"'gpt2' (byte-level BPE) cut as {', '.join(_FAMILIES)}, and 'llama' (SentencePiece's BPE)"
"""What is read, for the table of what is served."""


def _pre_tokenizer(family: _Family) -> pre_tokenizers.PreTokenizer:
    steps = [_STEPS[step]() if step in _STEPS else pre_tokenizers.Split(Regex(step), "isolated") for step in family.steps]
    return pre_tokenizers.Sequence(steps)


# --- the file ---


class _Keys:
    """Typed look-ups in the metadata; every refusal names file and key."""

    def __init__(self, source: TokenizerMetadata) -> None:
        self.metadata, self.file = source.metadata, source.file

    def refused(self, key: str, got: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: key {key!r} is not supported", got=got, wanted=wanted, change="use another model")

    @cached_property
    def tokens(self) -> list[str]:
        return self.texts("tokenizer.ggml.tokens")

    @cached_property
    def vocab(self) -> dict[str, int]:
        vocab = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(vocab) != len(self.tokens):
            raise self.refused("tokenizer.ggml.tokens", f"{len(self.tokens) - len(vocab)} tokens twice", "each token once")
        return vocab

    def texts(self, key: str) -> list[str]:
        value = self.metadata.get(key)
        if not isinstance(value, list):
            raise self.refused(key, "no such key" if value is None else type(value).__name__, "an array of strings")
        return value

    def numbers(self, key: str, typecodes: str) -> "array[Any] | None":
        """One number a token, of one of the types; None where the key is absent."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, array) or value.typecode not in typecodes or len(value) != len(self.tokens):
            got = f"{len(value):,} of type {value.typecode!r}" if isinstance(value, array) else type(value).__name__
            raise self.refused(key, got, f"{len(self.tokens):,} numbers")
        return value

    def kinds(self) -> "array[Any] | None":
        """What each token is: one of ``_UNKNOWN`` and the like."""
        key = "tokenizer.ggml.token_type"
        kinds = self.numbers(key, _INTEGERS)
        if kinds and not 0 <= min(kinds) <= max(kinds) <= _LAST_KIND:
            raise self.refused(key, f"{min(kinds)} to {max(kinds)}", f"0 to {_LAST_KIND}")
        return kinds

    def token_ids(self, name: str, default: int | None = None) -> tuple[int, ...]:
        ids = read_token_ids(self.metadata, f"tokenizer.ggml.{name}_token_id", self.file)
        return (default,) if not ids and default is not None else ids

    def flag(self, name: str, default: bool) -> bool:
        value = read_flag(self.metadata, f"tokenizer.ggml.{name}", self.file)
        return default if value is None else value


def gguf_parts(source: TokenizerMetadata) -> TokenizerParts:
    """Read the parts from the ``tokenizer.*`` keys.

    Where its keys are missing, a "llama" tokenizer's begin-of-text is token 1 and comes before a plain prompt, its end-of-text is
    token 2. A "gpt2" tokenizer then has neither, and puts a begin-of-text that it does have only if that is its family's way.

    Raises:
        CheckpointError: a key that is missing, broken, or of a kind that is not supported, by name.
    """
    keys = _Keys(source)
    model = keys.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        family = _family(keys)
        backend, adds_bos, bos, eos = _byte_level(keys, family), family.adds_bos, None, None
    elif model == "llama":
        backend, adds_bos, bos, eos = _sentencepiece(keys), True, 1, 2
    else:
        wanted = "'gpt2' (byte-level BPE) | 'llama' (SentencePiece's BPE)"
        raise keys.refused("tokenizer.ggml.model", repr(model)[:80], wanted)
    template = keys.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise keys.refused("tokenizer.chat_template", type(template).__name__, "a string")
    bos_id = next(iter(keys.token_ids("bos", bos)), None)
    ends = (*keys.token_ids("eos", eos), *keys.token_ids("eot"), *keys.token_ids("eom"), *_ends_by_text(keys))
    return TokenizerParts(
        backend=backend,
        where=keys.file,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(ends)),
        adds_bos=keys.flag("add_bos_token", default=adds_bos and bos_id is not None),
        adds_eos=keys.flag("add_eos_token", default=False),
        chat_template=template,
    )


def _ends_by_text(keys: _Keys) -> Iterator[int]:
    """Control tokens that end a turn by their name: older files have no key for them, and answers would not stop."""
    kinds = keys.kinds()
    for token in _END_TEXTS:
        token_id = keys.vocab.get(token)
        if token_id is not None and kinds is not None and kinds[token_id] == _CONTROL:
            yield token_id


def _add_marked_tokens(backend: Backend, keys: _Keys, kinds: "array[Any]") -> None:
    """Tell the backend which tokens are found whole in a text: control tokens (special) and those that users defined."""
    special = [token for token, kind in zip(keys.tokens, kinds, strict=True) if kind in (_UNKNOWN, _CONTROL)]
    added = [token for token, kind in zip(keys.tokens, kinds, strict=True) if kind == _USER_DEFINED]
    if "" in special + added:
        raise keys.refused("tokenizer.ggml.tokens", "an empty control token", "texts")
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])


# --- byte-level BPE ---


def _family(keys: _Keys) -> _Family:
    key = "tokenizer.ggml.pre"
    pre = keys.metadata.get(key)
    if pre is None:
        logger.warning("%s: no key %r: text is cut as llama.cpp does then, which may not be the model's way", keys.file, key)
        pre = "default"
    family = _FAMILIES.get(pre) if isinstance(pre, str) else None
    if family is None:
        raise keys.refused(key, repr(pre)[:80], " | ".join(map(repr, _FAMILIES)))
    return family


def _byte_level(keys: _Keys, family: _Family) -> Backend:
    vocab, kinds = keys.vocab, keys.kinds()
    pairs: Any = [tuple(merge.split(" ")) for merge in keys.texts("tokenizer.ggml.merges")]  # the library checks their length
    try:
        backend = Backend(models.BPE(vocab=vocab, merges=pairs, ignore_merges=family.whole_words))
    except Exception as error:  # the library raises bare Exception for merges that do not fit
        raise keys.refused("tokenizer.ggml.merges", str(error)[:120], "pairs of tokens") from error
    if family.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(family)
    backend.decoder = decoders.ByteLevel()
    if kinds is not None:
        _add_marked_tokens(backend, keys, kinds)
    return backend


# --- SentencePiece's BPE ---


def _sentencepiece(keys: _Keys) -> Backend:
    """Merges by score over the whole text, and one token a byte for what no piece covers.

    The mark of a space goes before each stretch of text between marked tokens, as in llama.cpp and in Llama 2's tokenizer.json.
    Those of some later models ask for it at the beginning only; GGUF has no key for that.
    """
    vocab, kinds, scores = keys.vocab, keys.kinds(), keys.numbers("tokenizer.ggml.scores", "fd" + _INTEGERS)
    if kinds is None or scores is None:
        key = f"tokenizer.ggml.{'token_type' if kinds is None else 'scores'}"
        raise keys.refused(key, "no such key", f"{len(vocab):,} numbers")
    if not all(map(math.isfinite, scores)):
        raise keys.refused("tokenizer.ggml.scores", "one that is infinite or no number", "finite numbers")
    if missing := [piece for piece in _BYTE_PIECES if piece not in vocab]:
        raise keys.refused("tokenizer.ggml.tokens", f"no {missing[0]}", "a token for each byte, <0x00> to <0xFF>")
    unknown = keys.token_ids("unknown", default=0)[0]
    if unknown >= len(vocab):
        raise keys.refused("tokenizer.ggml.unknown_token_id", f"{unknown:,}", f"the id of one of its {len(vocab):,} tokens")
    if keys.flag("remove_extra_whitespaces", default=False):
        raise keys.refused("tokenizer.ggml.remove_extra_whitespaces", "true", "false: spaces stay as they are")
    merges = _merges(keys, kinds, scores)
    model = models.BPE(vocab=vocab, merges=merges, unk_token=keys.tokens[unknown], fuse_unk=True, byte_fallback=True)
    backend = Backend(model)
    before: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    after: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if keys.flag("add_space_prefix", default=True):
        before.insert(0, normalizers.Prepend(_SPACE))
        after.append(decoders.Strip(" ", 1, 0))
    backend.normalizer, backend.decoder = normalizers.Sequence(before), decoders.Sequence(after)
    _add_marked_tokens(backend, keys, kinds)
    return backend


def _merges(keys: _Keys, kinds: "array[Any]", scores: "array[Any]") -> list[tuple[str, str]]:
    """Every cut of a piece into two: best score first, of equals the longest left part, then the longest right part.

    SentencePiece merges the leftmost of equals, which no list of merges can say; 60,391 texts over three vocabularies that it
    trained came out the same.
    """
    whole = set(_BYTE_PIECES)  # these and control tokens are never made from text
    whole.update(token for token, kind in zip(keys.tokens, kinds, strict=True) if kind in (_UNKNOWN, _CONTROL))
    pieces = {token: score for token, score in zip(keys.tokens, scores, strict=True) if token not in whole}
    longest = max(map(len, pieces), default=0)
    if longest > _LONGEST_PIECE:
        raise keys.refused("tokenizer.ggml.tokens", f"a piece of {longest:,} characters", f"at most {_LONGEST_PIECE}")
    merges = []
    for _, equals in groupby(sorted(pieces, key=pieces.__getitem__, reverse=True), key=pieces.__getitem__):
        cuts = [  # the conditions run two million times for a vocabulary of 262,144
            (left, right)
            for piece in equals
            for cut in range(1, len(piece))
            if (left := piece[:cut]) in pieces and (right := piece[cut:]) in pieces
        ]
        merges += sorted(cuts, key=lambda cut: (-len(cut[0]), -len(cut[1])))
    return merges
