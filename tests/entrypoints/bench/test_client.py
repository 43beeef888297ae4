"""The client of the load generator: whatever a server sends is read right, or said to be wrong."""

import asyncio
import shutil
import ssl
import subprocess
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm import ConfigError
from rapid_llm.entrypoints.bench.client import Client
from rapid_llm.entrypoints.bench.events import EventReader
from rapid_llm.entrypoints.bench.streamed import Streamed
from tests.entrypoints.bench.scripted_server import chunked, serving, whole

CHAT = (
    b'data: {"id":"1","choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"usage":null}\n\n'
    b": a comment that keeps a proxy awake\n\n"
    b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"well"}}]}\n\n'
    b'event: message\r\ndata:{"choices":[{"index":0,"delta":{"content":"gr\xc3\xbc\xc3\x9f"}}]}\r\n\r\n'
    b'data: {"choices":[{"index":0,\ndata: "delta":{},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7,"total_tokens":10}}\n\n'
    b"data: [DONE]\n\n"
)
TEXT = b'data: {"choices":[{"text":"a","index":0}]}\n\ndata: {"choices":[{"text":"b","finish_reason":"stop"}]}\n\n'


def ask(*answers, count=1, url="http://127.0.0.1:{}/v1", tls=None):
    """What came of requests, one after another, and the requests as the server saw them."""

    async def scenario():
        async with serving(*answers, tls=tls) as (port, requests):
            client = Client(url.format(port), "secret")
            streams = [await client.stream("/completions", {"prompt": "x"}, keeps_text=True) for _ in range(count)]
            client.close()
            return streams, requests

    return asyncio.run(scenario())


def read(pieces):
    reader = EventReader(streamed := Streamed(0.0), keeps_text=True)
    reader.begin(200, "text/event-stream")
    for piece in pieces:
        reader.feed(piece)
    reader.end()
    return streamed


@given(st.lists(st.integers(0, len(CHAT)), max_size=30))
@settings(deadline=None)
def test_a_stream_cut_anywhere_reads_the_same(cuts):
    edges = [0, *sorted(cuts), len(CHAT)]
    found = read([CHAT[start:end] for start, end in pairwise(edges)])
    assert (found.text, len(found.arrivals), found.error) == ("grüß", 2, "")
    assert (found.prompt_tokens, found.completion_tokens, found.tokens) == (3, 7, 7)


def test_without_a_count_by_the_server_parts_are_counted():
    found = read([TEXT])
    assert (found.text, found.completion_tokens, found.tokens, found.error) == ("ab", None, 2, "")


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_chunks_of_any_size_are_put_together_and_the_connection_is_used_again(size):
    streams, requests = ask(chunked(CHAT, size), count=3)
    assert [(each.text, each.error, each.status) for each in streams] == [("grüß", "", 200)] * 3
    assert {number for number, *_ in requests} == {1}
    _, line, head, body = requests[0]
    assert line == b"POST /v1/completions HTTP/1.1"
    assert b"\r\nAuthorization: Bearer secret\r\n" in head
    assert body == b'{"stream":true,"stream_options":{"include_usage":true},"prompt":"x"}'


def test_an_answer_that_ends_with_its_connection_is_whole():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    streams, requests = ask([head + TEXT, None], count=2)
    assert [(each.text, each.error) for each in streams] == [("ab", "")] * 2
    assert [number for number, *_ in requests] == [1, 2]


def test_an_interim_answer_is_passed_over():
    streams, _ = ask(b"HTTP/1.1 100 Continue\r\n\r\n" + whole(TEXT), count=2)
    assert [(each.text, each.error) for each in streams] == [("ab", "")] * 2


def test_a_connection_that_the_server_closed_while_idle_costs_no_request():
    streams, requests = ask([whole(TEXT), None], count=3)
    assert [each.error for each in streams] == ["", "", ""]
    assert len(requests) == 3


BROKEN = [
    pytest.param([whole(TEXT)[:-20], None], "the connection broke off", id="half-a-body"),
    pytest.param([chunked(TEXT, 9)[:-5], None], "the connection broke off", id="half-of-chunks"),
    pytest.param([None], "the connection broke off", id="nothing"),
    pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", "what the server sends is no HTTP", id="no-http"),
    pytest.param(whole(TEXT.split(b"\n\n")[0] + b"\n\n"), "the stream ended before its answer did", id="no-end"),
    pytest.param(whole(b"data: {nonsense}\n\ndata: [DONE]\n\n"), "an event cannot be read", id="no-json"),
    pytest.param(whole(b'data: {"error":{"message":"too hot"}}\n\ndata: [DONE]\n\n'), "broke off: too hot", id="error-event"),
    pytest.param(whole(b"{}", kind=b"application/json"), "no stream of events but application/json", id="no-stream"),
    pytest.param(whole(b'{"error":{"message":"slow\\ndown"}}', b"429 X", b"application/json"), "429: slow down", id="refusal"),
    pytest.param(whole(b'{"object":"error","message":"no such"}', b"404 X", b"application/json"), "404: no such", id="flat"),
    pytest.param(whole(b"<html>bad\ngateway", b"502 Bad", b"text/html"), "502: <html>bad gateway", id="proxy"),
    pytest.param(whole(b"", b"500 X", b"text/plain"), "500: no words", id="silent"),
]


@pytest.mark.parametrize(("answer", "words"), BROKEN)
def test_what_is_no_whole_answer_is_an_error_in_words(answer, words):
    [streamed], _ = ask(answer)
    assert words in streamed.error
    assert streamed.ended >= streamed.asked


def test_nobody_there_is_an_error_in_words():
    async def scenario():
        async with serving(b"") as (port, _):
            pass
        return await Client(f"http://127.0.0.1:{port}").stream("/x", {})

    assert "Connect call failed" in asyncio.run(scenario()).error


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x/v1", "http://", "http://x:99999/v1", "http://x/v1?key=1"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="URL"):
        Client(url)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https_is_spoken_and_a_stranger_is_not_trusted(tmp_path, monkeypatch):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-addext"]
    make += ["subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate), "-days", "2"]
    subprocess.run(make, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    [refused], _ = ask(chunked(TEXT, 9), url="https://localhost:{}/v1", tls=tls)
    assert "certificate" in refused.error
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    [streamed], _ = ask(chunked(TEXT, 9), url="https://localhost:{}/v1", tls=tls)
    assert (streamed.text, streamed.error) == ("ab", "")
