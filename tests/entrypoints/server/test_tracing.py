"""OpenTelemetry traces of ``rapid-llm serve``, as a collector receives them."""

import gzip
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from rapid_llm.entrypoints import cli
from tests.entrypoints.server.serve import Server

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP."""

    def __init__(self):
        self.resources, self.spans, self.paths = [], [], set()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def take(self, body):
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(values(group.resource.attributes))
            self.spans += [span for scope in group.scope_spans for span in scope.spans]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.add(self.path)
        self.server.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def values(attributes):
    found = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.shutdown()
    collector.server_close()


def test_each_request_is_a_span_that_goes_on_with_its_clients_trace(folder, collector):
    server = Server(folder, "--max-kv-tokens", "256", "--otlp-endpoint", collector.url, OTEL_RESOURCE_ATTRIBUTES="team=blue")
    try:
        server.ready()
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        ask = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0.5, "top_p": 0.75}
        ask |= {"ignore_eos": True, "model": "tiny"}
        answer = server.http.post(CHAT, json=ask, headers=headers)
        assert answer.status_code == 200, answer.text
        server.events(TEXT, prompt="hello", max_tokens=3, ignore_eos=True)
        assert server.post(TEXT, prompt="x", temperature=-1).status_code == 400
        server.http.get("/health")
        logged = server.wait_for("request")
        assert logged["trace_id"] == TRACE
        assert server.end() == 0, "what has not been sent yet is sent before the end"
    finally:
        server.close()
    assert collector.paths == {"/v1/traces"}
    assert collector.resources[0]["service.name"] == "rapid-llm"
    assert collector.resources[0]["team"] == "blue"
    # A stream's span may end after those of requests that its client sent on the last event.
    chat, text, refused = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert (chat.trace_id.hex(), chat.parent_span_id.hex(), chat.name) == (TRACE, PARENT, f"POST {CHAT}")
    found = values(chat.attributes)
    usage = answer.json()["usage"]
    expected = {
        "http.request.method": "POST", "url.path": CHAT, "url.scheme": "http", "http.response.status_code": 200,
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "rapid_llm", "gen_ai.response.id": answer.json()["id"],
        "gen_ai.request.model": "tiny", "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.75,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"], "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ["length"], "rapid_llm.request_id": answer.headers["x-request-id"],
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    seconds = (chat.end_time_unix_nano - chat.start_time_unix_nano) / 1e9
    assert 0 < found["gen_ai.latency.time_in_queue"] < found["gen_ai.latency.time_to_first_token"] < seconds
    assert text.trace_id.hex() != TRACE
    assert values(text.attributes)["gen_ai.request.stream"] is True
    assert values(text.attributes)["gen_ai.usage.output_tokens"] == 3
    assert values(refused.attributes)["http.response.status_code"] == 400


def test_the_variables_of_opentelemetry_name_the_collector_too(folder, collector):
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_SERVICE_NAME": "mine",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    }
    server = Server(folder, "--max-kv-tokens", "256", **variables)
    try:
        server.ready().post(TEXT, prompt="hello", max_tokens=3)
        assert server.end() == 0
    finally:
        server.close()
    assert [span.name for span in collector.spans] == [f"POST {TEXT}"]
    assert collector.resources[0]["service.name"] == "mine"


WITHOUT = "import sys; sys.modules['opentelemetry'] = None; from rapid_llm.entrypoints.cli import main; sys.exit(main())"


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_without_the_packages_a_start_says_what_to_install(monkeypatch, by):
    url = "http://127.0.0.1:4318"
    command = [sys.executable, "-c", WITHOUT, "serve", *(["--otlp-endpoint", url] if by == "flag" else [])]
    if by == "variable":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("rapid-llm: traces cannot be sent without OpenTelemetry: got ")
    assert "pip install 'rapid-llm[otel]'" in done.stderr


@pytest.mark.parametrize("off", [{}, {"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}], ids=str)
def test_nothing_of_it_is_imported_where_nobody_asks(monkeypatch, off):
    if off:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    for name, value in off.items():
        monkeypatch.setenv(name, value)
    code = (
        "import sys, json; from rapid_llm.config import EngineConfig; from rapid_llm.entrypoints.server.app import build_app\n"
        "from rapid_llm.entrypoints.server.settings import ServerConfig; build_app(EngineConfig(), ServerConfig(), print)\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('opentelemetry')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_an_endpoint_that_is_no_url_is_refused(capsys):
    assert cli.main(["serve", "--otlp-endpoint", "localhost:4317"]) == 2
    assert "otlp_endpoint is out of range: got 'localhost:4317', wanted a URL such as" in capsys.readouterr().err
