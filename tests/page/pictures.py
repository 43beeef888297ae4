"""Takes the pictures of the page that docs/ holds, over the embedded model: ``python -m tests.page.pictures``."""

import base64
import tempfile

from tests.entrypoints.server.serve import ROOT, Server
from tests.page.chromium import Browser

QUESTIONS = ("What is the capital of France? Answer in one sentence.", "Describe a walk through it on a morning in spring.")
LONG_ENOUGH = 300  # letters of the second answer, at which the picture is taken
LOOKS = {
    "light": {"width": 1280, "height": 860},
    "dark": {"width": 1280, "height": 860, "dark": True},
    "narrow": {"width": 360, "height": 740},
}


def ask(page):
    """Two questions, whose answers are the same each time; the second is still being answered."""
    page.run("document.querySelector('[name=temperature]').value = 0")
    for question in QUESTIONS:
        wait_for(page, "!document.querySelector('#send').disabled")
        page.type(question, into="#prompt")
        page.press("Enter")
    text = "document.querySelector('.turn:last-child > .said').innerText"
    wait_for(page, f"{text}.length > {LONG_ENOUGH} || document.querySelectorAll('.counts').length === {len(QUESTIONS)}")


def wait_for(page, condition):
    """As long as it takes: a real model on a slow machine."""
    while not page.run(condition):
        page.run("new Promise((resolve) => setTimeout(resolve, 100))")


def arrange(page, look):
    """Light shows the settings and the start, dark the kernels, narrow the chat alone."""
    if look == "light":
        page.run("document.querySelector('.sampling').open = true")
    if look == "dark":
        page.run("document.querySelector('#kernels details').open = true")
        page.run("document.querySelector('#engine').scrollTop = document.querySelector('#startup-notes').offsetTop - 420")


def main():
    server, browser = Server().ready(), None
    try:
        browser = Browser(tempfile.mkdtemp())
        for look, values in LOOKS.items():
            page = browser.page(**values).open(server.url)
            wait_for(page, "document.querySelector('#kernels details') !== null")
            arrange(page, look)
            ask(page)
            (ROOT / "docs" / f"page-{look}.png").write_bytes(base64.b64decode(page.picture()))
            page.close()
    finally:
        if browser is not None:
            browser.close()
        server.close()


if __name__ == "__main__":
    main()
