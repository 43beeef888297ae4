"""The server as whoever runs it sees it: start, signals, a dying engine, clients that leave, what is left behind."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest

from rapid_llm import LLM, SamplingParams
from tests.entrypoints.server.serve import Server

TEXT = "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "short", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
SHORT_PARAMS = {name: value for name, value in SHORT.items() if name != "prompt"}


def text_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def begin(server, **ask):
    """A request that was sent, and the first bytes of its stream where there is one."""
    body = json.dumps({**LONG, **ask}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    client.sendall(head + body)
    if ask.get("stream"):
        client.recv(64)
    return client


def wait_until(condition):
    while not condition():
        pass


def num_answers(server):
    """Running and queued. Sixty-four of them take seconds, eight at a time."""
    return server.metric("requests_running") + server.metric("requests_waiting")


def is_idle(server):
    names = ("requests_running", "requests_waiting", "kv_pages_used")
    return [server.metric(name) for name in names] == [0, 0, 0]


def ended_by(server, reason):
    text = server.http.get("/metrics").text
    found = re.search(rf'^rapid_llm_requests_total{{finish_reason="{reason}"}} (\S+)$', text, flags=re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.fixture
def own(folder):
    """Makes servers for this test alone."""
    made = []

    def make(*flags, **variables):
        made.append(Server(folder, "--max-kv-tokens", "1024", *flags, **variables))
        return made[-1]

    yield make
    for server in made:
        server.close()


def test_the_port_answers_while_the_engine_loads_and_this_process_has_no_torch(own):
    server = own()
    answer = server.http.get("/ready")
    assert answer.status_code == 503
    assert answer.json()["status"] == "starting"
    server.ready()
    assert server.http.get("/ready").status_code == 200
    if Path("/proc/self/maps").exists():
        assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_what_the_port_waits_for_is_not_what_only_the_engine_needs():
    code = "import sys, rapid_llm.entrypoints.server.run; print({'torch', 'numpy', 'tokenizers', 'jinja2'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_sigterm_lets_open_answers_end_and_exits_0(own):
    server = own().ready()
    clients = [begin(server, stream=stream, n=8) for stream in (True, False)]
    wait_until(lambda: num_answers(server) == 16)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("draining")
    stream, whole = map(read_all, clients)
    assert b"[DONE]" in stream
    assert b'"finish_reason":"length"' in stream
    assert b'"completion_tokens":1600' in whole
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(server.url + "/ready", trust_env=False)
    assert server.process.wait(60) == 0


def read_all(client):
    data = b""
    while piece := client.recv(2**16):
        data += piece
    client.close()
    return data


def test_sigterm_while_the_engine_loads_and_a_second_one_end_it_too(own):
    assert own().end() == 0
    server = own("--drain-seconds", "600").ready()
    client = begin(server, stream=True, n=8)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("draining")
    assert server.end() == 0
    client.close()


def test_a_killed_engine_ends_streams_with_an_error_and_is_started_again(own, llm):
    server = own("--max-restarts", "1").ready()
    [expected] = llm.generate("short", SamplingParams(**SHORT_PARAMS))
    assert text_of(server.post(TEXT, **SHORT)) == expected.outputs[0].text
    with server.http.stream("POST", TEXT, json={**LONG, "stream": True, "n": 8}) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(engine_of(server), signal.SIGKILL)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("engine_died", "server_error")
    answer = server.http.get("/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "restarting")
    refused = server.post(TEXT, **SHORT)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    server.wait_for("ready", 2)
    assert server.http.get("/ready").status_code == 200
    assert text_of(server.post(TEXT, **SHORT)) == expected.outputs[0].text
    assert server.metric("engine_restarts_total") == 1
    os.kill(engine_of(server), signal.SIGKILL)
    assert server.process.wait(60) == 2, "a server whose engine dies again and again gives up"


def engine_of(server):
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    [engine] = {int(pid) for file in children for pid in file.read_text().split()}
    return engine


def test_a_start_that_cannot_be_ends_with_the_words_of_the_command(own):
    server = own("--max-model-len", "999999")
    assert server.process.wait(60) == 2
    server._reader.join(60)
    assert any(line["event"].startswith("rapid-llm: max_model_len is too long: got 999999") for line in server.log)


def test_every_line_of_the_log_is_json_those_of_the_engines_process_too(folder, tmp_path):
    model = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "what_nobody_knows": 1}))
    server = Server(str(model), "--max-kv-tokens", "256")
    try:
        server.ready()
        assert server.end() == 0
        server._reader.join(60)
    finally:
        server.close()
    assert [line for line in server.log[:-1] if "level" not in line] == []
    said = [line for line in server.log[:-1] if line["logger"] == "rapid_llm.engine"]
    assert any("what_nobody_knows" in line["event"] for line in said)


@pytest.mark.case("I1")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("when", ["running", "queued"])
def test_a_client_that_leaves_ends_its_request(server, canary, stream, when):
    before = ended_by(server, "abort")
    others = [begin(server, stream=True, n=64)] if when == "queued" else []
    client = begin(server, stream=stream and when == "running", n=64)
    wait_until(lambda: num_answers(server) == 64 * (1 + len(others)))
    client.close()
    for other in others:
        other.close()
    wait_until(lambda: is_idle(server))
    wait_until(lambda: ended_by(server, "abort") - before == 1 + len(others))


@pytest.mark.case("I16")
def test_after_twenty_clients_left_at_once_the_gauges_are_zero_without_new_traffic(server, canary):
    before, monotonic = ended_by(server, "abort"), server.metric("generated_tokens_total")
    clients = [begin(server, prompt=f"number {i}", n=64) for i in range(20)]
    wait_until(lambda: num_answers(server) > 19 * 64)
    for client in clients:
        client.close()
    wait_until(lambda: is_idle(server))
    wait_until(lambda: ended_by(server, "abort") - before == 20)
    assert server.metric("generated_tokens_total") >= monotonic


@pytest.fixture(scope="module")
def small(folder):
    """Ten pages, two sequences, chunks of 16 tokens: everybody gives way to somebody."""
    flags = ["--max-kv-tokens", "160", "--max-num-seqs", "4", "--max-batched-tokens", "16", "--max-step-ms", "inf"]
    server = Server(folder, *flags)
    yield server.ready()
    server.close()


@pytest.mark.case("I6")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "prompt", ["hello", "a prompt of far more tokens than one chunk of sixteen holds"], ids=["short", "long"]
)
def test_usage_stands_in_one_last_chunk_and_is_that_of_a_whole_answer(small, n, prompt):
    ask = {**SHORT, "prompt": prompt, "n": n}
    for again in range(2):  # the second time most of a long prompt is found in the prefix cache
        whole = small.post(TEXT, **ask).json()["usage"]
        assert whole["prompt_tokens"] == len(prompt)
        assert whole["completion_tokens"] == 8 * n
        assert whole["total_tokens"] == len(prompt) + 8 * n
        assert bool(whole["prompt_tokens_details"]["cached_tokens"]) == (again == 1 and prompt != "hello") or n == 3
        events = small.events(TEXT, **ask, stream_options={"include_usage": True})
        assert events.pop() == "[DONE]"
        last = events.pop()
        assert last["choices"] == []
        tokens = {name: last["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        assert tokens == {name: whole[name] for name in tokens}
        assert all(event["usage"] is None for event in events)
        counted = small.events(TEXT, **ask, stream_options={"include_usage": True, "continuous_usage_stats": True})
        counts = [event["usage"]["completion_tokens"] for event in counted[:-1] if event["choices"]]
        assert counts == sorted(counts)
        assert counts[-1] == counted[-2]["usage"]["completion_tokens"]
        assert {event["usage"]["prompt_tokens"] for event in counted[:-1]} == {counted[-2]["usage"]["prompt_tokens"]}
        for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
            assert all("usage" not in event for event in small.events(TEXT, **ask, **options)[:-1])


@pytest.mark.case("I9")
def test_what_can_never_fit_the_pool_is_refused_and_those_behind_it_are_served(small):
    refused = small.post(TEXT, **{**LONG, "prompt": "x" * 50, "max_tokens": 190})
    assert refused.status_code == 400
    assert "does not fit the KV pool" in refused.json()["error"]["message"]
    for _ in range(5):
        assert small.post(TEXT, **SHORT).json()["usage"]["completion_tokens"] == 8


@pytest.mark.case("I14")
@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions"], ids=["text", "chat"])
def test_answers_that_give_way_to_each_other_are_those_of_a_large_pool(small, llm, path):
    before = small.metric("preemptions_total")
    values = {"max_tokens": 100, "temperature": 0.8, "ignore_eos": True, "stop": ["zzz"], "repetition_penalty": 1.2}
    results = {}

    def ask(seed):
        prompt = {"prompt": f"{seed}"} if path == TEXT else {"messages": [{"role": "user", "content": f"{seed}"}]}
        answer = http.client.HTTPConnection("127.0.0.1", small.port, timeout=60)
        body = json.dumps({**prompt, **values, "seed": seed, "top_p": 1.0, "top_k": 0})
        answer.request("POST", path, body, {"Content-Type": "application/json"})
        results[seed] = json.loads(answer.getresponse().read())
        answer.close()

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, body in results.items():
        params = SamplingParams(**values, seed=seed)
        prompt = f"{seed}" if path == TEXT else [{"role": "user", "content": f"{seed}"}]
        [expected] = llm.generate(prompt, params) if path == TEXT else llm.chat(prompt, params)
        choice = body["choices"][0]
        assert (choice["text"] if path == TEXT else choice["message"]["content"]) == expected.outputs[0].text
        assert body["usage"]["completion_tokens"] == len(expected.outputs[0].token_ids)
    assert small.metric("preemptions_total") > before


@pytest.mark.case("I15")
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_a_prompt_sent_twice_and_then_one_longer_is_answered_as_by_a_fresh_engine(small, folder, length):
    fresh = LLM(folder, device="cpu", max_kv_tokens=256, prefix_cache=False)
    ids = [(7 * i + length) % 256 for i in range(length)]
    for prompt in (ids, ids, [*ids, 9]):
        [expected] = fresh.generate([prompt], SamplingParams(**SHORT_PARAMS))
        assert text_of(small.post(TEXT, **{**SHORT, "prompt": prompt})) == expected.outputs[0].text


@pytest.mark.case("I2")
@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions"], ids=["text", "chat"])
def test_a_stop_string_of_any_length_is_never_half_told(server, path):
    ask = {"max_tokens": 40, "seed": 5, "temperature": 1.0, "ignore_eos": True, "top_p": 1.0, "top_k": 0}
    ask |= {"prompt": "hello"} if path == TEXT else {"messages": [{"role": "user", "content": "hello"}]}

    def said(one):
        return one["text"] if path == TEXT else one["message"]["content"]

    whole = said(server.post(path, **ask).json()["choices"][0])
    for length in range(1, 6):
        for stop in (whole[10 : 10 + length], [whole[10 : 10 + length], whole[9 : 9 + length] + "x"]):
            answer = server.post(path, **ask, stop=stop).json()["choices"][0]
            needle = stop if isinstance(stop, str) else stop[0]
            assert said(answer) == whole[: whole.index(needle)]
            assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", needle)
            text = ""
            for event in server.events(path, **ask, stop=stop)[:-1]:
                part = event["choices"][0]
                text += part["text"] if path == TEXT else part["delta"].get("content") or ""
                assert needle not in text
            assert text == said(answer)
