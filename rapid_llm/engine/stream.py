"""One request as an asyncio reader follows it: the newest state whenever it looks, however slowly that is."""

import asyncio
from dataclasses import replace

from rapid_llm.engine.output import CompletionOutput, RequestOutput
from rapid_llm.engine.request import TokenOutput
from rapid_llm.engine.text import TextRequest
from rapid_llm.errors import RapidError


class OutputStream:
    """Takes steps' outputs as they come and hands out states.

    Nothing is queued: a reader that is slower than the engine gets fewer and larger pieces, so that it costs no memory and nobody
    waits for it.
    """

    def __init__(self, request: TextRequest) -> None:
        self._request = request
        self._news = asyncio.Event()
        self._error: RapidError | None = None
        self._read: dict[int, int] = {}  # characters that the reader has, by answer

    def take(self, output: TokenOutput) -> bool:
        """One step's share; True when a stop string ended the answer, so that the engine must be told."""
        ended = self._request.take(output)
        self._news.set()
        return ended

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
        output = self._request.output
        return replace(output, outputs=[self._since_last(answer) for answer in output.outputs])

    def _since_last(self, answer: CompletionOutput) -> CompletionOutput:
        read, self._read[answer.index] = self._read.get(answer.index, 0), len(answer.text)
        logprobs = None if answer.logprobs is None else list(answer.logprobs)
        return replace(answer, token_ids=list(answer.token_ids), logprobs=logprobs, delta=answer.text[read:])
