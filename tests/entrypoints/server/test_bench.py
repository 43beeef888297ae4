"""``rapid-llm bench serve`` as whoever types it sees it, against this server."""

import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from rapid_llm.entrypoints import cli

FLAGS = ["--requests", "12", "--concurrency", "4", "--input-len", "3", "--output-len", "9", "--ignore-eos"]


def run(capsys, server, *flags):
    code = cli.main(["bench", "serve", "--url", f"{server.url}/v1", *flags])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    "more",
    [["--rate", "200"], ["--endpoint", "completions"], ["--endpoint", "completions", "--prompts", "ids", "--ids-below", "200"]],
    ids=["chat", "text", "ids"],
)
def test_every_request_is_answered_counted_and_written(capsys, server, canary, tmp_path, more):
    files = ["--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.html"), "--goodput", "ttft=60000", "tpot=60000"]
    code, out, err = run(capsys, server, *FLAGS, *more, *files)
    assert (code, err) == (0, "")
    assert "12 whole, 0 failed, 0 cut off" in out
    assert "108 tokens, counted by usage" in out
    assert "100.0% within ttft 60000 ms, tpot 60000 ms" in out
    for name in ("time to first token", "time per output token", "gap between chunks", "whole answer"):
        assert len(re.search(rf"^{name}(.*)$", out, flags=re.MULTILINE)[1].split()) == 6
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["url"] == f"{server.url}/v1"
    assert record["settings"]["requests"] == 12
    assert [each["completion_tokens"] for each in record["each"]] == [9] * 12
    assert {"date", "versions", "throughput", "milliseconds", "goodput"} <= record.keys()
    page = (tmp_path / "run.html").read_text()
    assert page.count("<svg") == 3
    assert "12 whole" in page
    assert re.search(r"(src|href)=|https?://(?!127\.0\.0\.1)|<script", page) is None, "the page asks nobody for anything"


def test_failures_are_counted_shown_and_the_exit_status(capsys, server, canary):
    code, out, _ = run(capsys, server, *FLAGS, "--warmup", "0", "--body", '{"temperature": -1}')
    assert code == 1
    assert "0 whole, 12 failed" in out
    assert "12 x 400: temperature is out of range: got -1" in out
    code, _, err = run(capsys, server, *FLAGS, "--body", '{"temperature": -1}')
    assert code == 2
    assert err.startswith("rapid-llm: the request that warms the server up has failed: got 400: temperature is out of range")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--plot", "x.png"], "plots have no such form: got x.png"),
        (["--requests", "0"], "requests is out of range: got 0"),
        (["--goodput", "speed=3"], "goodput is out of range: got 'speed'"),
        (["--prompts", "ids"], "ids are no chat"),
        (["--prompts", "/nowhere.jsonl"], "cannot read the prompts in /nowhere.jsonl"),
        (["--url", "http://127.0.0.1:1/v1"], "http://127.0.0.1:1/v1/models does not answer"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_sent(capsys, server, flags, words):
    code, out, err = run(capsys, server, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("rapid-llm: ")
    assert words in err


def test_plots_are_an_svg_too(capsys, server, tmp_path):
    assert run(capsys, server, *FLAGS, "--plot", str(tmp_path / "run.svg"))[0] == 0
    picture = ElementTree.fromstring((tmp_path / "run.svg").read_text())
    assert len(picture.findall(".//{http://www.w3.org/2000/svg}polyline")) == 3


def test_the_load_generator_needs_no_torch():
    code = "import sys; sys.modules.update(torch=None, triton=None); import rapid_llm.entrypoints.bench.{} as m; print(m.__doc__)"
    for name in ("running", "plots"):
        done = subprocess.run([sys.executable, "-c", code.format(name)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
