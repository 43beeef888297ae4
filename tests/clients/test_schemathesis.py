"""schemathesis sends what /openapi.json allows and what it forbids: every answer is one that the document describes."""

import json
import threading

import pytest

from tests.entrypoints.server.scripted_serve import COMMAND
from tests.entrypoints.server.serve import Server
from tests.scripted_engine import say

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("response_headers_conformance", "unsupported_method"),
)
SONG = "the canary sings"


@pytest.fixture(scope="module")
def small(folder):
    """Of a short context, since an answer may be as long as that allows."""
    flags = ("--no-prefix-cache", "--max-kv-tokens", "2048", "--max-num-seqs", "4", "--max-model-len", "96")
    server = Server(str(folder), *flags, command=COMMAND)
    yield server.ready()
    server.close()


def sing(server):
    answer = server.post("/v1/completions", prompt=say(SONG), max_tokens=40)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.case("H10")
def test_every_answer_is_one_that_the_openapi_page_describes_and_nobody_elses_changes(small, run, tmp_path):
    page = small.http.get("/openapi.json").json()
    for schema in page["components"]["schemas"].values():
        if schema.get("additionalProperties") is False:
            schema["properties"].pop("model", None)  # there is one name that is right
    (tmp_path / "openapi.json").write_text(json.dumps(page))
    songs, has_ended = [], threading.Event()

    def keep_singing():
        while not has_ended.is_set():
            songs.append(sing(small))

    canary = threading.Thread(target=keep_singing)
    canary.start()
    try:
        run(
            *("schemathesis", "schemathesis.cli", "run", str(tmp_path / "openapi.json"), "--url", small.url, "--no-color"),
            *("--seed", "1", "--max-examples", "10", "--phases", "coverage,fuzzing", "--checks", ",".join(CHECKS)),
            *("--suppress-health-check", "all"),
        )
    finally:
        has_ended.set()
        canary.join()
    assert set(songs) == {SONG}
    assert [line for line in small.log if line.get("level") == "error"] == []
