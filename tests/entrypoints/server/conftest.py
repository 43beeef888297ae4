"""One server over the tiny model for all tests of this folder, and the same model in this process to compare it with."""

import pytest

from rapid_llm import LLM
from tests.entrypoints.server.serve import Server
from tests.tiny_model import save_checkpoint, tiny_llama

POOL_TOKENS = 1024


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("served") / "tiny"))


@pytest.fixture(scope="session")
def llm(folder):
    return LLM(folder, device="cpu", max_kv_tokens=POOL_TOKENS, max_num_seqs=8)


@pytest.fixture(scope="session")
def server(folder):
    server = Server(folder, "--max-kv-tokens", str(POOL_TOKENS), "--max-num-seqs", "8")
    yield server.ready()
    server.close()


@pytest.fixture
def canary(server, llm):
    """Whatever happens in a test, what somebody else asks is answered as before, and nothing is left behind."""
    ask = {"prompt": "the canary sings", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    [expected] = llm.generate(ask["prompt"], params(ask))

    def sings():
        answer = server.post("/v1/completions", **ask)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected.outputs[0].text

    sings()
    yield sings
    sings()
    assert [line for line in server.log if line.get("level") == "error"] == []


def params(ask):
    from rapid_llm import SamplingParams

    return SamplingParams(**{name: value for name, value in ask.items() if name != "prompt"})
