"""Many clients at once, and clients that mean no good: everybody else is answered as if they were not there."""

import asyncio
import json
import random
import string

import pytest

from rapid_llm import SamplingParams
from rapid_llm.entrypoints.bench.client import Client
from tests.entrypoints.server.test_operations import is_idle, wait_until

SEED = 20_261_130
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def test_a_hundred_streams_at_once_lose_nothing(server, llm):
    asks = [{"prompt": f"prompt {i}", "seed": i, "max_tokens": 4 + i % 9, "ignore_eos": True} for i in range(100)]

    async def scenario():
        client = Client(f"{server.url}/v1")
        streams = await asyncio.gather(*(client.stream("/completions", ask, keeps_text=True) for ask in asks))
        client.close()
        return streams

    streams = asyncio.run(scenario())
    params = [SamplingParams(**{name: value for name, value in ask.items() if name != "prompt"}) for ask in asks]
    outputs = llm.generate([ask["prompt"] for ask in asks], params)
    for result, output in zip(streams, outputs, strict=True):
        assert (result.status, result.error) == (200, "")
        assert result.text == output.outputs[0].text
        assert result.completion_tokens == len(output.outputs[0].token_ids)


async def talk(port, data, *, read=True, pause=False):
    """Send bytes as they are; the status of what comes back, None where nothing does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if pause:
            await reader.read(1)
            return None
        line = await reader.readline() if read else b""
        return int(line.split()[1]) if line else None
    except (ConnectionError, BrokenPipeError):
        return None
    finally:
        writer.close()


def request(body, path=TEXT, length=None):
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def anything(draw, depth=0):
    """A JSON value that nobody asked for."""
    kind = draw.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [anything(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 7:
        return {"".join(draw.choices(string.ascii_letters, k=3)): anything(draw, depth + 1) for _ in range(draw.randrange(3))}
    text = "".join(chr(draw.choice((32, 97, 233, 0x2713, 0x1F600))) for _ in range(draw.randrange(5)))
    return [None, True, draw.randrange(-(2**70), 2**70), draw.uniform(-1e308, 1e308), text, draw.randrange(-3, 300)][kind]


FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "n",
    "seed",
    "stop",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "bad_words",
    "stream",
    "echo",
)


def wrong_types(draw):
    path = draw.choice((TEXT, CHAT, "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"))
    body = {field: anything(draw) for field in draw.sample(FIELDS, 2)}
    body |= {
        draw.choice(("prompt", "messages", "input", "tools", "tokens", "model")): anything(draw),
        "max_tokens": draw.choice((1, anything(draw))),
    }
    return request(json.dumps(body).encode(), path)


def invalid_utf8(draw):
    return request(b'{"prompt": "' + draw.randbytes(draw.randrange(1, 40)) + b'"}')


def half_a_request(draw):
    whole = request(json.dumps({"prompt": "half", "max_tokens": 200}).encode())
    return whole[: draw.randrange(1, len(whole))]


def garbage(draw):
    return draw.randbytes(draw.randrange(1, 400)) + b"\r\n\r\n"


def huge_head(draw):
    return b"GET /ready HTTP/1.1\r\nX: " + b"a" * draw.choice((10_000, 200_000)) + b"\r\n\r\n"


def huge_body(draw):
    return request(b'{"prompt": "' + b"a" * draw.randrange(100_000), length=draw.choice((2**25, 2**40)))


def chunks_that_lie(draw):
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + draw.choice((b"zz\r\n", b"-1\r\n", b"ffffffffffffffff\r\n", b'5\r\n{"pro\r\n0\r\n\r\n'))


def endless_head(draw):
    return b"GET /ready HTTP/1.1\r\nX: " + b"a" * 2**18


ANSWERED = {"wrong types": wrong_types, "invalid UTF-8": invalid_utf8, "huge bodies": huge_body, "endless heads": endless_head}
UNANSWERED = {"half requests": half_a_request, "garbage": garbage, "huge heads": huge_head, "chunks": chunks_that_lie}


@pytest.mark.case("I1")
def test_hostile_clients_get_no_5xx_and_change_nobody_elses_answer(server, canary):
    draw = random.Random(SEED)
    long = json.dumps({"prompt": "long", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()

    async def scenario():
        port, statuses = server.port, []
        for name in (*ANSWERED, *UNANSWERED):
            make = ANSWERED.get(name) or UNANSWERED[name]
            talks = [talk(port, make(draw), read=name in ANSWERED) for _ in range(60)]
            statuses += await asyncio.gather(*talks)
            await asyncio.to_thread(canary)
        slow = [asyncio.create_task(talk(port, request(long), pause=True)) for _ in range(20)]
        gone = [talk(port, request(long), read=False) for _ in range(200)]
        await asyncio.gather(asyncio.to_thread(canary), *gone, *slow)
        return statuses

    statuses = {status for status in asyncio.run(scenario()) if status is not None}
    assert statuses <= {200, 400, 404, 413, 431}, statuses
    assert {400, 413, 431} <= statuses
    wait_until(lambda: is_idle(server))
