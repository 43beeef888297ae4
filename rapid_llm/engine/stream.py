"""One request and its answers as an asyncio reader follows them: the newest state whenever it looks, however slowly that is."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from rapid_llm.engine.embedding import EmbeddingRequest
from rapid_llm.engine.output import CompletionOutput, RequestOutput
from rapid_llm.engine.request import TokenOutput
from rapid_llm.engine.text import TextRequest
from rapid_llm.errors import RapidError

Follower = TextRequest | EmbeddingRequest
"""The text half of a sequence: of an answer, or of a prompt that becomes a vector."""


class OutputReader:
    """Hands out states of an output that grows: copies, each with the text that is new since the one before as ``delta``."""

    def __init__(self, answers: Sequence[Follower]) -> None:
        self._answers, self._output = answers, answers[0].output
        self._read: dict[int, int] = {}  # characters that were handed out, by answer

    def state(self) -> RequestOutput:
        """The output as it is now."""
        for answer in self._answers:
            answer.catch_up()
        return replace(self._output, outputs=[self._since_last(answer) for answer in self._output.outputs])

    def _since_last(self, answer: CompletionOutput) -> CompletionOutput:
        read, self._read[answer.index] = self._read.get(answer.index, 0), len(answer.text)
        logprobs = None if answer.logprobs is None else list(answer.logprobs)
        return replace(answer, token_ids=list(answer.token_ids), logprobs=logprobs, delta=answer.text[read:])


class OutputStream:
    """Takes steps' outputs as they come and hands out states.

    Nothing is queued: a reader that is slower than the engine gets fewer and larger pieces, so that it costs no memory and nobody
    waits for it.
    """

    def __init__(self, answers: Sequence[Follower]) -> None:
        self.answers = [StreamedAnswer(answer, self) for answer in answers]
        self._reader = OutputReader(answers)
        self._news = asyncio.Event()
        self._error: RapidError | None = None

    def wake(self) -> None:
        """Let the reader look."""
        self._news.set()

    def end(self) -> None:
        """Nothing more will come: answers that are not complete end as aborted."""
        for answer in self.answers:
            answer.end()

    def fail(self, error: RapidError) -> None:
        """Let the reader have ``error`` in place of what is left."""
        self._error = error
        self._news.set()

    async def next(self) -> RequestOutput:
        """Wait for something new; a copy of the state in which ``delta`` is the text since the last one.

        Raises: what the request failed with.
        """
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error
        return self._reader.state()


class StreamedAnswer:
    """What the engine tells of one answer."""

    def __init__(self, request: Follower, stream: OutputStream) -> None:
        self._request, self._stream = request, stream

    def take(self, output: TokenOutput) -> bool:
        """One step's share; True when a stop string ended the answer, so that the engine must be told."""
        ended = self._request.take(output)
        self._stream.wake()
        return ended

    def fail(self, error: RapidError) -> None:
        """Let the reader have ``error`` in place of what is left."""
        self._stream.fail(error)

    def end(self) -> None:
        """End as aborted, unless it is complete."""
        self._request.abort()
        self._stream.wake()
