"""The app in this process, over an engine whose start and steps can be held up."""

import asyncio
import os
import re
import signal
from contextlib import asynccontextmanager

import httpx2
import pytest

from rapid_llm.config import EngineConfig
from rapid_llm.entrypoints import async_llm
from rapid_llm.entrypoints.server import exchange, serving
from rapid_llm.entrypoints.server.app import ROUTES, build_app
from rapid_llm.entrypoints.server.openapi import OPERATIONS, document
from rapid_llm.entrypoints.server.settings import ServerConfig
from rapid_llm.errors import ConfigError
from tests.engine.fake_process import CRASH, HANG
from tests.entrypoints.server.fake_engine import COMMAND

ASK = {"prompt": "hi", "max_tokens": 3, "seed": 1}


@pytest.fixture(autouse=True)
def _fake_engine(monkeypatch):
    monkeypatch.setattr(async_llm, "_COMMAND", COMMAND)


@asynccontextmanager
async def running(folder, ready=True, **config):
    """A client of the app, and what its endpoints share."""
    app = build_app(EngineConfig(model=folder), ServerConfig(**config), lambda error: None)
    inner = app._app
    async with inner.router.lifespan_context(inner):
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            if ready:
                await until_ready(client)
            yield client, inner.state.serving


async def until_ready(client):
    while (await client.get("/ready")).status_code != 200:
        await asyncio.sleep(0)


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 120))


@pytest.mark.case("I17")
def test_while_the_engine_loads_everything_that_needs_it_says_503_and_how_far_it_is(folder, tmp_path, monkeypatch):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("GATE", str(gate))

    async def scenario():
        async with running(folder, ready=False) as (client, _):
            progress = {}
            while progress.get("done") != 3_000_000:
                await asyncio.sleep(0)
                answer = await client.get("/ready")
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                progress = answer.json()
            assert progress == {"status": "starting", "phase": "weights", "done": 3_000_000, "total": 4_000_000}
            assert (await client.get("/health")).json() == {"status": "live"}
            assert "rapid_llm_ready 0.0" in (await client.get("/metrics")).text
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/tokenize")):
                answer = await client.request(method, path, json=ASK if method == "POST" else None)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert answer.json()["error"]["code"] == "engine_starting"
                assert "got starting: weights, 3 of 4 MB" in answer.json()["error"]["message"]
            with open(gate, "w"):
                pass
            await until_ready(client)
            assert (await client.get("/ready")).json()["status"] == "ready"
            assert (await client.post("/v1/completions", json=ASK)).status_code == 200

    run(scenario())


@pytest.mark.case("I17")
def test_a_step_that_hangs_turns_health_red(folder, monkeypatch):
    monkeypatch.setattr(serving, "STUCK_SECONDS", 0.0)

    async def scenario():
        async with running(folder) as (client, shared):
            hanging = asyncio.create_task(client.post("/v1/completions", json={"prompt": [5, HANG], "max_tokens": 3}))
            while not shared.num_open or (answer := await client.get("/health")).status_code == 200:
                await asyncio.sleep(0)
            assert "has not ended for" in answer.json()["status"]
            os.kill(shared.llm().process_id, signal.SIGKILL)
            assert (await hanging).status_code == 503

    run(scenario())


def test_a_step_that_fails_answers_503_and_the_next_engine_serves(folder):
    async def scenario():
        async with running(folder) as (client, _):
            answer = await client.post("/v1/completions", json={"prompt": [5, CRASH], "max_tokens": 3})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_died"
            assert "gone" not in answer.text, "what the engine said last is for the log"
            await until_ready(client)
            assert (await client.post("/v1/completions", json=ASK)).status_code == 200
            assert "rapid_llm_engine_restarts_total 1.0" in (await client.get("/metrics")).text

    run(scenario())


def said(body):
    """The text of an answer, or of a stream's events together."""
    return "".join(re.findall(r'"text":"(.*?)"', body))


@pytest.mark.case("I16")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_metrics_that_fail_harm_no_answer(folder, stream):
    async def scenario():
        async with running(folder) as (client, shared):
            expected = await client.post("/v1/completions", json={**ASK, "stream": stream})
            await asyncio.sleep(0)
            failures = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
            shared.metrics.requests = None
            answer = await client.post("/v1/completions", json={**ASK, "stream": stream})
            assert answer.status_code == 200
            assert said(answer.text) == said(expected.text)
            await asyncio.sleep(0)
            assert len(failures) == 1

    run(scenario())


def test_past_the_places_requests_are_sent_away_and_come_in_again_later(folder):
    async def scenario():
        async with running(folder, max_requests=3) as (client, shared):
            with shared.places(2):
                answer = await client.post("/v1/completions", json={**ASK, "n": 2})
                assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
                assert "got 2 more beside 2, wanted at most 3" in answer.json()["error"]["message"]
                assert (await client.post("/v1/completions", json=ASK)).status_code == 200
            assert (await client.post("/v1/completions", json={**ASK, "n": 3})).status_code == 200
            assert shared.num_open == 0
            lines = (await client.get("/metrics")).text.splitlines()
            assert 'rapid_llm_http_answers_total{status="429"} 1.0' in lines

    run(scenario())


def test_keys_are_asked_for_everywhere_but_at_the_probes(folder):
    async def scenario():
        async with running(folder, api_key=["one", "zwei-ä"]) as (client, _):
            for headers in ({}, {"Authorization": "Bearer two"}, {"Authorization": "one"}, {"Authorization": "Basic one"}):
                for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/nothing"):
                    answer = await client.get(path, headers=headers)
                    assert answer.status_code == 401
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                    assert "x-request-id" in answer.headers
            for key in ("Bearer one", "bearer one"):
                assert (await client.get("/v1/models", headers={"Authorization": key})).status_code == 200
            for path in ("/health", "/ready"):
                assert (await client.get(path)).status_code == 200

    run(scenario())


@pytest.mark.parametrize(("origins", "allowed"), [((), None), ("https://a.example", "https://a.example")], ids=["off", "on"])
def test_pages_of_other_origins_may_call_only_where_that_is_said(folder, origins, allowed):
    async def scenario():
        async with running(folder, cors_origins=origins) as (client, _):
            answer = await client.get("/v1/models", headers={"Origin": "https://a.example"})
            assert answer.headers.get("access-control-allow-origin") == allowed
            asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
            assert (await client.options("/v1/completions", headers=asked)).status_code == (200 if allowed else 405)

    run(scenario())


def test_a_bug_is_an_answer_with_a_trace_in_the_log_only(folder, monkeypatch):
    async def scenario():
        async with running(folder) as (client, shared):
            monkeypatch.setattr(shared, "places", None)
            answer = await client.post("/v1/completions", json=ASK)
            assert answer.status_code == 500
            assert answer.json()["error"] == {
                "message": "the server has failed; its log says how.", "type": "server_error",
                "param": None, "code": "internal_error",
            }  # fmt: skip

    run(scenario())


def test_a_client_that_reads_nothing_is_taken_for_gone(folder, monkeypatch):
    monkeypatch.setattr(exchange, "SEND_SECONDS", 0.0)
    sent, asked = [], [{"type": "http.request", "body": b'{"prompt": "hi", "stream": true}', "more_body": False}]

    async def send(message):
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive():
        return asked.pop() if asked else await asyncio.Event().wait()

    async def scenario():
        async with running(folder) as (client, shared):
            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
            await client._transport.app(scope, receive, send)
            assert sent == ["http.response.start", "http.response.body"]
            assert shared.num_open == 0
            assert (await shared.llm().stats()).running == 0

    run(scenario())


def test_the_openapi_page_holds_every_path_and_every_schema_it_points_to():
    page = document()
    assert {(method.upper(), path.replace("{name}", "{name:path}")) for method, path, *_ in OPERATIONS} == {
        (method, path) for method, path, _ in ROUTES if path != "/openapi.json"
    }
    schemas = set(page["components"]["schemas"])

    def pointed_to(part):
        if isinstance(part, dict):
            if "$ref" in part:
                yield part["$ref"].rpartition("/")[2]
            for value in part.values():
                yield from pointed_to(value)
        elif isinstance(part, list):
            for value in part:
                yield from pointed_to(value)

    assert set(pointed_to(page)) <= schemas
    assert page["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70000), ("port", "8000"), ("host", ""), ("api_key", ""), ("api_key", [3]), ("max_requests", 0),
        ("max_body_bytes", 1.5), ("drain_seconds", -1), ("max_restarts", -1), ("log_requests", 1), ("cors_origins", {"a": 1}),
        ("served_model_name", ""), ("tool_format", "xml"), ("tool_format", []),
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name} is out of range"):
        ServerConfig(**{name: value})
