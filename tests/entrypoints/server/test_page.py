"""The page's files, what they are served with, and GET /engine. What a browser makes of them: tests/page."""

import asyncio
import os
import re
import signal

import pytest

from rapid_llm.entrypoints import async_llm
from rapid_llm.entrypoints.server.page import FOLDER, page_files
from tests.entrypoints.server.fake_engine import COMMAND
from tests.entrypoints.server.test_app import run, running, until_ready

HTML = (FOLDER / "index.html").read_text()


@pytest.fixture(autouse=True)
def _fake_engine(monkeypatch):
    monkeypatch.setattr(async_llm, "_COMMAND", COMMAND)


def test_the_page_is_served_while_nothing_is_ready_and_without_a_key(folder):
    async def scenario():
        async with running(folder, ready=False, api_key="one") as (client, _):
            assert (await client.get("/engine")).status_code == 401
            for path, file in page_files().items():
                answer = await client.get(path)
                assert (answer.status_code, answer.content) == (200, file.content)
                assert answer.headers["content-type"].partition(";")[0] == file.media_type
                assert answer.headers["content-security-policy"].startswith("default-src 'self'; ")
                assert "unsafe" not in answer.headers["content-security-policy"]
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert answer.headers["cache-control"] == "no-cache"
                again = await client.get(path, headers={"If-None-Match": answer.headers["etag"]})
                assert (again.status_code, again.content) == (304, b"")
                stale = await client.get(path, headers={"If-None-Match": '"another"'})
                assert stale.content == file.content

    run(scenario())


@pytest.mark.parametrize(
    "path", ["/page/nothing.js", "/page/../app.py", "/page/%2e%2e/settings.py", "/page/index.html", "/page/"]
)
def test_only_the_files_of_the_page_are_served(folder, path):
    async def scenario():
        async with running(folder) as (client, _):
            answer = await client.get(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "unknown_path"
            assert (await client.post("/")).status_code == 405

    run(scenario())


def test_every_file_that_the_page_names_is_there_and_nothing_is_named_twice_or_elsewhere():
    texts = {path: file.content.decode() for path, file in page_files().items()}
    named = {f"/{name}" for name in re.findall(r'(?:href|src)="([^#"]+)"', HTML)}
    for text in texts.values():
        named |= {f"/page/{name}" for name in re.findall(r'from "\./(.+?)"', text)}
    assert named | {"/"} == set(texts)
    for path, text in texts.items():
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert "innerHTML" not in text, path
    assert not re.search(r"<style|<script>|\sstyle=|\son\w+=", HTML), "what the page's own policy would not run"


def test_the_view_tells_how_far_the_start_is_then_limits_load_and_start(folder, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "gate")
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))

    async def scenario():
        async with running(folder, ready=False, served_model_name="tiny") as (client, _):
            view = {}
            while view.get("readiness", {}).get("done") != 3_000_000:
                await asyncio.sleep(0)
                answer = await client.get("/engine")
                assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
                view = answer.json()
            assert view["readiness"] == {"status": "starting", "phase": "weights", "done": 3_000_000, "total": 4_000_000}
            assert (view["model"], view["load"], view["limits"], view["kernels"]) == ("tiny", None, None, [])
            with open(tmp_path / "gate", "w"):
                pass
            await until_ready(client)
            before = (await client.get("/engine")).json()
            ask = {"prompt": "hi", "max_tokens": 7, "ignore_eos": True}
            assert (await client.post("/v1/completions", json=ask)).status_code == 200
            after = (await client.get("/engine")).json()
            assert after["readiness"]["status"] == "ready"
            assert after["limits"] == {"max_model_len": 4096, "max_num_seqs": 64, "kv_tokens": 512 * 16}
            assert after["load"]["generated_tokens"] - before["load"]["generated_tokens"] == 7
            assert after["load"]["admitted_tokens"] - before["load"]["admitted_tokens"] == 2
            assert after["load"]["steps"] > before["load"]["steps"]
            assert after["seconds"] > before["seconds"]
            assert (after["load"]["running"], after["load"]["waiting"]) == (0, 0)
            names = [(phase["name"], phase["thread"]) for phase in after["startup"]["phases"]]
            assert ("weights", "engine") in names
            starts = [phase["start"] for phase in after["startup"]["phases"]]
            assert starts == sorted(starts)
            assert 0 < after["startup"]["accounted"] <= 1
            assert after["startup"]["first_token"] > 0

    run(scenario())


def test_the_view_of_an_engine_that_was_started_again_counts_anew(folder):
    async def scenario():
        async with running(folder) as (client, shared):
            await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 50, "ignore_eos": True})
            os.kill(shared.llm().process_id, signal.SIGKILL)
            while (await client.get("/engine")).json()["readiness"]["status"] == "ready":
                await asyncio.sleep(0)
            await until_ready(client)
            view = (await client.get("/engine")).json()
            assert view["restarts"] == 1
            assert view["load"]["generated_tokens"] == 1, "the token that proves it ready"

    run(scenario())


def test_the_view_explains_each_kernel_of_an_engine_that_has_some(server, llm):
    kernels = {kernel["op"]: kernel for kernel in server.http.get("/engine").json()["kernels"]}
    norm = kernels["rms_norm"]
    assert (norm["row"], norm["sizes"], norm["dtype"]) == ("torch.rms_norm", {"d": 64}, "float32")
    assert norm["because"] == "the only eligible row"
    assert norm["others"][0]["name"] == "triton.rms_norm"
    assert not [line for line in server.log if line.get("path") == "/engine"], "asked every second, so no line of the log"
