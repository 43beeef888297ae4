"""guidellm puts a load on the server: every request is completed, and its report counts tokens as the server does.

guidellm and what it needs lie in a folder beside the environment, which ``make test`` fills: requirements-guidellm.txt says why.
"""

import json
import os
import re

import pytest

from tests.entrypoints.server.serve import ROOT
from tests.scripted_engine import say

[VERSION] = re.findall(r"^guidellm==(.+)$", (ROOT / "requirements-guidellm.txt").read_text(), flags=re.MULTILINE)
FOLDER = ROOT / ".cache" / f"guidellm-{VERSION}"
SAID = ["é" * count for count in range(1, 9)]  # each of its two bytes is a token: who counts characters or words counts wrong


def size(text):
    """Its tokens."""
    return len(text.encode())


ROWS = {
    "/v1/chat/completions": [{"prompt": say(text)} for text in SAID],
    "/v1/responses": [{"prompt": say(text)} for text in SAID],
    "/v1/completions": [{"prompt": say(text), "output_tokens_count": size(text) + 2} for text in SAID],
}


def counted(served):
    return [served.metric(name) for name in ("prompt_tokens_total", "generated_tokens_total")]


def scenario(url, request_format, report):
    spec = {
        "backend": {"kind": "openai_http", "target": url, "request_format": request_format},
        "profile": {"kind": "concurrent", "streams": [4]},
        "constraints": [{"kind": "max_requests", "count": len(SAID)}],
        "data": [{"kind": "in_memory_dict_list", "data": ROWS[request_format]}],
        "outputs": [{"kind": "json", "path": str(report)}],
    }
    return json.dumps({"spec": spec})


@pytest.fixture(scope="module")
def came(run, served, tmp_path_factory):
    """The benchmark of each path as guidellm reports it, and what the server has counted meanwhile."""
    if not FOLDER.is_dir():
        pytest.skip(f"guidellm is not installed: make {FOLDER.relative_to(ROOT)}/.setup")
    out = tmp_path_factory.mktemp("guidellm")
    scenarios, reports = ([out / f"{kind}-{place}.json" for place in range(len(ROWS))] for kind in ("scenario", "report"))
    for request_format, file, report in zip(ROWS, scenarios, reports, strict=True):
        file.write_text(scenario(served.url, request_format, report))
    before = counted(served)
    run(
        *("datasets", "tests.clients.use_guidellm", *map(str, scenarios)),  # datasets it takes from the extra
        PYTHONPATH=f"{FOLDER}{os.pathsep}{ROOT}",
        HF_HOME=str(out / "home"),
        HF_HUB_OFFLINE="1",
        GUIDELLM__MAX_WORKER_PROCESSES="1",
    )
    grown = [after - earlier for earlier, after in zip(before, counted(served), strict=True)]
    benchmarks = [benchmark for report in reports for benchmark in json.loads(report.read_text())["benchmarks"]]
    return dict(zip(ROWS, benchmarks, strict=True)), grown


def answers(benchmark):
    """Of each request that was completed: prompt tokens, text and tokens of the answer."""
    requests = benchmark["requests"]["successful"]
    return sorted((request["prompt_tokens"], request["output"], request["output_tokens"]) for request in requests)


def test_every_request_is_completed(came):
    benchmarks, _ = came
    totals = {"successful": len(SAID), "errored": 0, "incomplete": 0, "total": len(SAID)}
    assert [benchmark["metrics"]["request_totals"] for benchmark in benchmarks.values()] == [totals] * len(ROWS)


@pytest.mark.parametrize("request_format", ["/v1/chat/completions", "/v1/responses"])
def test_answers_end_where_the_model_ends_them(came, request_format):
    benchmarks, _ = came
    around = 3  # the template's tokens: who speaks, the end, who answers
    assert answers(benchmarks[request_format]) == [(size(say(text)) + around, text, size(text)) for text in SAID]


def test_completions_are_as_long_as_guidellm_asks_past_the_end_of_the_text(came):
    benchmarks, _ = came
    assert answers(benchmarks["/v1/completions"]) == [(size(say(text)), text, size(text) + 2) for text in SAID]


def test_token_counts_are_those_of_the_server(came):
    benchmarks, grown = came
    names = ("prompt_token_count", "output_token_count")
    sums = [sum(of["metrics"][name]["successful"]["total_sum"] for of in benchmarks.values()) for name in names]
    assert sums == grown
