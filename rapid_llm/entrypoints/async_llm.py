"""AsyncLLM: many streams of one engine, which runs in a process of its own. This side never imports torch."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from rapid_llm.checkpoint.locate import locate
from rapid_llm.config import EngineConfig, PoolingParams, ResolvedConfig, SamplingParams
from rapid_llm.engine.client import EngineClient
from rapid_llm.engine.frontend import Encoded, Frontend, Message, Prompt, Tool, open_model
from rapid_llm.engine.messages import Progress, Start, Stats
from rapid_llm.engine.output import RequestOutput
from rapid_llm.engine.request import TokenRules
from rapid_llm.engine.stream import Follower, OutputStream
from rapid_llm.errors import RapidError, RequestError
from rapid_llm.kernels.dispatcher.served_kernel import ServedKernel
from rapid_llm.ledger import StartupLedger

_COMMAND = (sys.executable, "-m", "rapid_llm.entrypoints.engine_process")


class AsyncLLM:
    """A model ready to answer many at once, from an event loop.

    The engine is a process of its own: work for clients never delays its steps, and where it dies, open streams raise
    EngineDiedError and ``restart`` brings another. Use it as ``async with AsyncLLM(...) as llm``, which waits until it is ready;
    or call ``start`` and, at the end, ``close``.

    Args:
        model, device, dtype, max_model_len, options: as for LLM; the engine of several GPUs is one AsyncLLM for each
            (device="cuda:1").
        progress: called from the event loop when a start-up phase begins and as bytes of it are done.
        download_progress: called while a model is downloaded, from another thread, with bytes done, bytes in all, seconds so far.
        on_line: called with each line that the engine's process writes; None passes them on to standard error.

    Raises: ConfigError on a setting that is unknown or out of range.

    Attributes:
        progress: the newest start-up report; None before the first.
        ledger: what each second to the first output went to, the engine's included once it is ready; of the newest start.
        kernels: what serves each op, and why; empty before the engine is ready for the first time.
    """

    def __init__(
        self,
        model: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        max_model_len: int | None = None,
        *,
        progress: Callable[[Progress], None] | None = None,
        download_progress: Callable[[int, int, float], None] | None = None,
        on_line: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        given = {"model": model, "device": device, "dtype": dtype, "max_model_len": max_model_len, **options}
        self.config = EngineConfig.from_options(given)
        self.ledger = StartupLedger()
        self.progress: Progress | None = None
        self.kernels: list[ServedKernel] = []
        self._on_progress, self._on_download, self._on_line = progress, download_progress, on_line
        self._numbers = count()
        self._engine: tuple[EngineClient, asyncio.Task[Frontend]] | None = None
        self._open: dict[str, _Open] = {}

    async def __aenter__(self) -> "AsyncLLM":
        try:
            await self.start()
            await self.ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Find the model, start the engine's process and load the tokenizer beside it. Returns once the process runs.

        Raises: CheckpointError when there is no such model.
        """
        path = await asyncio.to_thread(locate, self.config, self.ledger, self._note_download)
        client = EngineClient(_COMMAND, Start(self.config, str(path)), self._note, self._on_line)
        with self.ledger.phase("start engine process"):
            await client.start()
        self._engine = (client, asyncio.create_task(self._prepare(path, client)))

    async def ready(self) -> ResolvedConfig:
        """Wait until requests are served; the engine's sizes.

        Raises: ConfigError, CheckpointError, NoKernelError as LLM does; EngineDiedError when the process just ended.
        """
        return (await self.frontend()).limits

    async def restart(self) -> None:
        """Start another engine process in place of one that has died (or lives). Open streams end with EngineDiedError."""
        await self.close()
        self.ledger = StartupLedger(time.time())
        await self.start()

    async def drain(self) -> None:
        """Take no more requests, wait until those that run have ended, then until the process has; as SIGTERM to it does."""
        await self._client().drain()

    async def close(self) -> None:
        """End the engine process. Open streams end with EngineDiedError."""
        if self._engine is not None:
            client, frontend = self._engine
            await client.close()
            await asyncio.wait({frontend})

    @property
    def has_ended(self) -> bool:
        """Whether the engine's process has ended, so that ``restart`` is what is left."""
        return self._client().error is not None

    async def ended(self) -> RapidError:
        """Wait until the engine's process has ended; why it did."""
        return await self._client().ended()

    async def frontend(self) -> Frontend:
        """The text half, once the engine is ready: its tokenizer, templates and limits.

        Raises: as ``ready`` does.
        """
        self._client()
        return await asyncio.shield(cast("tuple[EngineClient, asyncio.Task[Frontend]]", self._engine)[1])

    @property
    def process_id(self) -> int:
        """Of the engine's process."""
        return self._client().process_id

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Continue a prompt as it stands, and yield the answer, or its ``n`` answers, as they grow.

        Each item is a state of its own: ``.outputs[0].text`` is everything so far, ``.outputs[0].delta`` what is new since the
        item before, however many steps that are. Cancelling the task that reads, or ``aclose``, ends the request before the
        engine's next step; so does leaving the loop, as soon as the event loop has closed what was left (contextlib.aclosing does
        it on the spot).

        Args:
            prompt: a text or a list of token ids.
            params: None is SamplingParams().
            request_id: a name for ``abort`` and for the outputs; None takes a number.

        Raises: RequestError before the first item when anything is refused; EngineDiedError when the engine's process ends.
        """
        begin = partial(_begin, params=params or SamplingParams(), continues=True)
        return self._follow(partial(Frontend.encode, prompt=prompt), begin, request_id)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        tools: Sequence[Tool] | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Answer one conversation through the model's chat template; items and errors as of ``generate``.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            params: None takes the sampling values of the model's generation_config.
            tools: functions that the model may call, shown to it by its template.
            request_id: as for ``generate``.
        """
        encode = partial(Frontend.encode_chat, messages=messages, tools=tools)
        return self._follow(encode, partial(_begin, params=params, continues=False), request_id)

    async def embed(self, prompt: Prompt, params: PoolingParams | None = None, request_id: str | None = None) -> RequestOutput:
        """Turn a prompt into a vector, ``.embedding`` of what comes back, as ``LLM.embed`` does. Cancelling ends the request.

        Args:
            prompt: a text or a list of token ids.
            params: None is PoolingParams().
            request_id: as for ``generate``.

        Raises: as ``generate`` does.
        """
        begin = partial(_begin_embedding, params=params or PoolingParams())
        async with aclosing(self._follow(partial(Frontend.encode, prompt=prompt), begin, request_id)) as outputs:
            return await anext(outputs)

    def abort(self, request_id: str) -> None:
        """End a request: its stream yields a last item whose finish_reason is "abort". Unknown and ended ids are no error."""
        if (request := self._open.pop(request_id, None)) is not None:
            request.end()

    async def stats(self) -> Stats:
        """Queue, running requests, pool pages and the last step's time, as they are between two steps.

        Raises: EngineDiedError.
        """
        return await self._client().stats()

    def silence(self) -> float:
        """Seconds for which the engine has not answered a question about itself: what the step that runs has taken, or more.

        Asks it, unless it owes an answer; so a second call some time after the first tells whether steps still end.
        """
        return self._client().silence()

    async def _follow(
        self, encode: Callable[[Frontend], Encoded], begin: "_Begin", request_id: str | None
    ) -> AsyncGenerator[RequestOutput]:
        name = next(name for name in map(str, self._numbers) if name not in self._open) if request_id is None else request_id
        if name in self._open:
            raise RequestError(f"request id {name!r} is in use", change="choose another id")
        request = self._open[name] = _Open(self._client())
        try:
            frontend = await self.frontend()
            encoded = await asyncio.to_thread(encode, frontend)  # a long prompt takes a while, and others are streaming
            rules, followers = begin(frontend, name, encoded)
            stream = OutputStream(followers)
            request.begin(stream, encoded[1], rules)
            finished = False
            while not finished:
                output = await stream.next()
                finished = output.finished
                self.ledger.mark_first_token()
                yield output
        finally:
            request.leave()
            if self._open.get(name) is request:
                del self._open[name]

    async def _prepare(self, path: Path, client: EngineClient) -> Frontend:
        source, tokenizer = await asyncio.to_thread(open_model, path, self.ledger)
        ready = await client.ready()
        self.ledger.include("engine", ready.zero, ready.phases, ready.notes)
        self.kernels = ready.kernels
        return Frontend(source, tokenizer, ready.limits)

    def _client(self) -> EngineClient:
        if self._engine is None:
            raise RequestError("the engine has not been started", change="use `async with`, or await start() first")
        return self._engine[0]

    def _note_download(self, done: int, total: int, seconds: float) -> None:
        self.progress = Progress("download", done, total)
        if self._on_download is not None:
            self._on_download(done, total, seconds)

    def _note(self, progress: Progress) -> None:
        self.progress = progress
        if self._on_progress is not None:
            self._on_progress(progress)


_Begin = Callable[[Frontend, str, Encoded], tuple[list[TokenRules], Sequence[Follower]]]
"""Both halves of a request under an id, of each of its answers."""


def _begin(
    frontend: Frontend, name: str, encoded: Encoded, *, params: SamplingParams | None, continues: bool
) -> tuple[list[TokenRules], Sequence[Follower]]:
    params = frontend.default_chat_params() if params is None else params
    return frontend.rules(encoded[1], params), frontend.follow(name, encoded, params, continues=continues)


def _begin_embedding(
    frontend: Frontend, name: str, encoded: Encoded, *, params: PoolingParams
) -> tuple[list[TokenRules], Sequence[Follower]]:
    rules, follower = frontend.embed(name, encoded, params)
    return [rules], [follower]


class _Open:
    """A request whose stream is read: it may be ended while its prompt is still being encoded."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._stream: OutputStream | None = None
        self._sent_as: list[str] = []
        self._is_ended = False

    def begin(self, stream: OutputStream, token_ids: list[int], rules: list[TokenRules]) -> None:
        self._stream = stream
        if self._is_ended:
            self.end()
        else:
            pairs = zip(rules, stream.answers, strict=True)
            self._sent_as = [self._client.add(token_ids, its_rules, answer) for its_rules, answer in pairs]

    def leave(self) -> None:
        for sent_as in self._sent_as:
            self._client.abort(sent_as)

    def end(self) -> None:
        self._is_ended = True
        self.leave()
        if self._stream is not None:
            self._stream.end()
