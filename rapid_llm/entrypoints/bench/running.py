"""One run: warm up, send each request when its time comes and a place is free, wait for the answers."""

import asyncio
import contextlib
import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rapid_llm.entrypoints.bench.arrivals import poisson
from rapid_llm.entrypoints.bench.client import Client
from rapid_llm.entrypoints.bench.prompts import bodies
from rapid_llm.entrypoints.bench.settings import Load
from rapid_llm.entrypoints.bench.streamed import Streamed
from rapid_llm.errors import ConfigError, RequestError

_SPARE_FILES = 64


@dataclass(frozen=True)
class Run:
    """What came of a load.

    Attributes:
        load: what was sent.
        model: what requests called it.
        began: when the first was sent, in seconds of time.perf_counter.
        seconds: from there to the last byte, or to the end of the time that was given.
        streams: one for each request that was sent, in their order.
    """

    load: Load
    model: str
    began: float
    seconds: float
    streams: list[Streamed]


async def run(load: Load, api_key: str, note: Callable[[int, int, int], None]) -> Run:
    """Send a load.

    Args:
        load: which.
        api_key: sent with each request; empty sends none.
        note: called as an answer ends, with how many have ended, how many of those failed, and how many are open.

    Raises: ConfigError when the server cannot be reached or the load is none; RequestError when the whole warm-up fails.
    """
    client = Client(load.url, api_key)
    try:
        model = load.model or await _first_model(client, load.url)
        await _warm_up(client, load, model)
        return await _measure(client, load, model, note)
    finally:
        client.close()


async def _first_model(client: Client, url: str) -> str:
    change = "start the server, correct the URL or its key, or name the model with --model"
    try:
        status, body = await client.get("/models")
    except OSError as error:
        raise ConfigError(f"{url}/models does not answer", got=str(error), wanted="a list of models", change=change) from None
    try:
        names = [card["id"] for card in msgspec.json.decode(body)["data"]]
    except (msgspec.DecodeError, KeyError, TypeError):
        names = []
    if status != 200 or not names:
        got = f"status {status}: {body[:300].decode('utf-8', 'replace')}"
        raise ConfigError(f"{url}/models names no model", got=got, wanted="a list of models", change=change)
    return str(names[0])


async def _warm_up(client: Client, load: Load, model: str) -> None:
    asks = bodies(load, model, load.warmup, seed=load.seed + 1)
    places = asyncio.Semaphore(load.most_open)

    async def ask(body: dict[str, object]) -> Streamed:
        async with places:
            return await _timed(client, client.asking(load.path, body), Streamed(time.perf_counter()), load)

    streams = await asyncio.gather(*map(ask, asks))
    if streams and all(stream.error for stream in streams):
        change = "correct what it names; nothing was measured"
        raise RequestError("the request that warms the server up has failed", got=streams[0].error, change=change)


async def _measure(client: Client, load: Load, model: str, note: Callable[[int, int, int], None]) -> Run:
    # Put together before the clock starts: the loop that sends is the one that reads.
    asks = [client.asking(load.path, body) for body in bodies(load, model, load.requests, seed=load.seed)]
    _allow_files(load.most_open)
    places = asyncio.Semaphore(load.most_open)
    streams: list[Streamed] = []
    ended = failed = 0

    async def follow(ask: bytes, streamed: Streamed) -> None:
        nonlocal ended, failed
        try:
            await _timed(client, ask, streamed, load)
        finally:
            places.release()
            ended, failed = ended + 1, failed + bool(streamed.error)
            note(ended, failed, len(streams) - ended)

    began = time.perf_counter()
    seconds = None if math.isinf(load.max_seconds) else load.max_seconds
    with contextlib.suppress(TimeoutError):  # streams know themselves that they were cut off
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
            for ask, after in zip(asks, poisson(load.rate, load.requests, load.seed), strict=True):
                await asyncio.sleep(max(began + after - time.perf_counter(), 0.0))
                await places.acquire()
                streams.append(Streamed(time.perf_counter(), due=began + after))
                tasks.create_task(follow(ask, streams[-1]))
    return Run(load, model, began, max((each.ended for each in streams), default=time.perf_counter()) - began, streams)


async def _timed(client: Client, request: bytes, streamed: Streamed, load: Load) -> Streamed:
    try:
        async with asyncio.timeout(load.timeout):
            await client.follow(request, streamed)
    except TimeoutError:
        streamed.ended, streamed.error = time.perf_counter(), f"no end within {load.timeout:g} seconds"
    except asyncio.CancelledError:
        streamed.ended, streamed.is_cut = time.perf_counter(), True
        raise
    return streamed


def _allow_files(count: int) -> None:
    """Each open request holds a socket: raise this process's bound on open files where it may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError):  # each request that has no socket then says so
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
