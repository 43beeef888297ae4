"""A browser, and a server whose model says what it is told to."""

import json

import pytest

from tests.entrypoints.server.scripted_serve import COMMAND
from tests.entrypoints.server.serve import Server
from tests.page import chromium, gated_serve
from tests.tiny_model import save_checkpoint, tiny_llama

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "<|assistant|>{# reasoning stands between <think> and </think> #}"
)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if chromium.PATH is None:
        pytest.skip(f"the page is not tested: none of {', '.join(chromium.NAMES)} was found (apt-get install chromium)")
    browser = chromium.Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = save_checkpoint(tiny_llama(max_position_embeddings=8192), tmp_path_factory.mktemp("page") / "tiny")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return str(folder)


@pytest.fixture(scope="session")
def served(browser, model):
    server = Server(model, "--no-prefix-cache", "--max-kv-tokens", "16384", "--max-num-seqs", "4", command=COMMAND)
    yield server.ready()
    server.close()


@pytest.fixture
def start(browser, model):
    """Starts servers over an engine without tensors; they end after the pages that call them."""
    servers = []

    def start(*flags, **variables):
        servers.append(Server(model, *flags, command=gated_serve.COMMAND, **variables))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def open_page(browser, start):
    """Opens pages, and looks at the end that nothing went wrong in them unseen and that they called their server alone."""
    pages = []

    def open_page(server, **looks):
        page = browser.page(**looks).open(server.url)
        pages.append((page, server.url))
        return page

    yield open_page
    for page, url in pages:
        complaints, requested = page.complaints(), page.requested()
        page.close()
        assert complaints == []
        assert [each for each in requested if not each.startswith(f"{url}/")] == []


@pytest.fixture
def page(open_page, served):
    """The page, ready."""
    page = open_page(served)
    page.wait_for("!document.querySelector('#send').disabled")
    return page
