"""A server whose model says what it is told to, for programs of others that speak OpenAI's protocol."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.entrypoints.server.scripted_serve import COMMAND
from tests.entrypoints.server.serve import ROOT, Server
from tests.entrypoints.server.weather import TEMPLATE
from tests.tiny_model import save_checkpoint, tiny_llama

NO_PROXIES = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"), "")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = save_checkpoint(tiny_llama(max_position_embeddings=2048), tmp_path_factory.mktemp("scripted") / "tiny")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def served(folder):
    server = Server(str(folder), "--no-prefix-cache", "--max-kv-tokens", "8192", "--max-num-seqs", "4", command=COMMAND)
    yield server.ready()
    server.close()


@pytest.fixture(scope="session")
def base_url(served):
    return f"{served.url}/v1"


@pytest.fixture(scope="session")
def run(base_url):
    """Runs a Python module in a process of its own, which may warn of what it likes and leave open what it likes.

    Skips where the package that it is of is not installed.
    """

    def run(package, module, *arguments, **variables):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -c constraints.txt -e '.[clients]'")
        command = [sys.executable, "-m", module, *arguments]
        environment = {**os.environ, **NO_PROXIES, "OPENAI_API_KEY": "none", "PYTHONPATH": str(ROOT), **variables}
        done = subprocess.run(
            command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    return run
