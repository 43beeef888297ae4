"""Log-probs in the two forms that clients of chat and of completions read."""

import codecs
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rapid_llm.engine.output import CompletionOutput, Logprob
from rapid_llm.entrypoints.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from rapid_llm.entrypoints.protocol.completions import CompletionLogprobs

if TYPE_CHECKING:
    from rapid_llm.engine.tokenizer import Tokenizer

Entry = Mapping[int, Logprob]


def chat_logprobs(answer: CompletionOutput, since: int, most: int, tokenizer: "Tokenizer") -> ChatLogprobs | None:
    """Of the tokens of ``answer`` from number ``since`` on; None unless they were asked for."""
    if answer.logprobs is None:
        return None
    pairs = zip(answer.token_ids[since:], answer.logprobs[since:], strict=True)
    return ChatLogprobs([_with_likeliest(token, entry, most, tokenizer) for token, entry in pairs])


def _with_likeliest(token: int, entry: Entry, most: int, tokenizer: "Tokenizer") -> TokenLogprob:
    top = [TopLogprob(*_text_and_bytes(its, one, tokenizer)) for its, one in likeliest(entry, most)]
    text, value, data = _text_and_bytes(token, entry[token], tokenizer)
    return TokenLogprob(text, value, data, top)


def likeliest(entry: Entry, most: int) -> list[tuple[int, Logprob]]:
    """The ``most`` likeliest tokens of an entry, in their order."""
    ranked = [(token, one) for token, one in entry.items() if one.rank is not None and one.rank <= most]
    return sorted(ranked, key=lambda pair: pair[1].rank or 0)


def _text_and_bytes(token: int, one: Logprob, tokenizer: "Tokenizer") -> tuple[str, float, list[int]]:
    data = tokenizer.bytes_of([token], skip_special_tokens=False)
    return token_text(data), one.logprob, list(data)


def token_text(data: bytes) -> str:
    """A token's text; where its bytes are no text alone, what they are, so that no two tokens read alike."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobsWriter:
    """Lists for one answer as it grows; offsets go on from piece to piece."""

    def __init__(self, most: int, tokenizer: "Tokenizer") -> None:
        self._most, self._tokenizer = most, tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def lists(self, token_ids: Sequence[int], entries: Sequence[Entry | None]) -> CompletionLogprobs:
        """Of further tokens."""
        lists = CompletionLogprobs([], [], [], [])
        for token, entry in zip(token_ids, entries, strict=True):
            data = self._tokenizer.bytes_of([token], skip_special_tokens=False)
            lists.tokens.append(token_text(data))
            lists.token_logprobs.append(None if entry is None else entry[token].logprob)
            lists.top_logprobs.append(None if entry is None else self._top(entry))
            lists.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(data))
        return lists

    def _top(self, entry: Entry) -> dict[str, float]:
        texts = {token: token_text(self._tokenizer.bytes_of([token], skip_special_tokens=False)) for token in entry}
        return {texts[token]: one.logprob for token, one in likeliest(entry, self._most)}
