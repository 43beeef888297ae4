"""The events of a stream, as OpenAI's API and its kin send them -> a Streamed."""

import time

import msgspec

from rapid_llm.entrypoints.bench.streamed import Streamed

_LONGEST_REFUSAL = 64 * 1024
_EVENTS = "text/event-stream"
_NOTHING = msgspec.Raw(b"null")


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = _NOTHING


class _ErrorDetail(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _ErrorDetail | None = None
    message: str | None = None


_decode = msgspec.json.Decoder(_Event).decode


class EventReader:
    """Takes an answer's bytes as they come.

    Args:
        streamed: what is filled in.
        keeps_text: whether its text is kept.
    """

    def __init__(self, streamed: Streamed, *, keeps_text: bool) -> None:
        self._streamed, self._keeps_text = streamed, keeps_text
        self._rest = b""
        self._data: list[bytes] = []
        self._is_stream = self._is_whole = False

    def begin(self, status: int, content_type: str) -> None:
        """The head has come."""
        self._streamed.status = status
        self._is_stream = status == 200 and content_type.lower().startswith(_EVENTS)
        if status == 200 and not self._is_stream:
            self._streamed.error = f"the answer is no stream of events but {content_type or 'of no type'}"

    def feed(self, data: bytes) -> None:
        """A part of the body, cut anywhere."""
        if not self._is_stream:
            self._rest = (self._rest + data)[:_LONGEST_REFUSAL]
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line.rstrip(b"\r"))

    def end(self) -> None:
        """The last byte has come."""
        self._streamed.ended = time.perf_counter()
        if self._is_stream:
            self._dispatch()
            if not self._is_whole and not self._streamed.error:
                self._streamed.error = "the stream ended before its answer did"
        elif self._streamed.status != 200:
            self._streamed.error = f"{self._streamed.status}: {_words(self._rest)}"

    def _line(self, line: bytes) -> None:
        if not line:
            self._dispatch()
        elif line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))

    def _dispatch(self) -> None:
        data, self._data = b"\n".join(self._data), []
        if data == b"[DONE]":
            self._is_whole = True
        elif data:
            try:
                self._take(_decode(data))
            except msgspec.DecodeError as error:
                self._streamed.error = f"an event cannot be read: {error}"

    def _take(self, event: _Event) -> None:
        if event.error != _NOTHING:
            told = _words(b'{"error":%b}' % bytes(event.error))
            self._streamed.error = f"the stream broke off: {told}"
        if event.usage is not None:
            self._streamed.prompt_tokens = event.usage.prompt_tokens
            self._streamed.completion_tokens = event.usage.completion_tokens
        is_news = False
        for choice in event.choices or ():
            self._is_whole |= choice.finish_reason is not None
            text, delta = choice.text or "", choice.delta
            if delta is not None:
                text += delta.content or ""
                is_news |= bool(delta.reasoning_content or delta.reasoning or delta.tool_calls)
            is_news |= bool(text)
            if self._keeps_text:
                self._streamed.text += text
        if is_news:
            self._streamed.arrivals.append(time.perf_counter())


def _words(body: bytes) -> str:
    """What an error's body says: its message where it has OpenAI's form or its like, else its beginning."""
    try:
        refusal = msgspec.json.decode(body, type=_Refusal)
    except msgspec.DecodeError:
        refusal = _Refusal()
    words = refusal.error.message if refusal.error else refusal.message
    return " ".join((words or body.decode("utf-8", "replace")).split())[:300] or "no words"
