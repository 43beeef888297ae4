"""The engine on the page: what it does, what its start took, which kernels serve; before it is ready, and behind a key."""

import os

import pytest

from tests.scripted_engine import say

READY = "!document.querySelector('#send').disabled"
ANSWERED = "document.querySelector('.turn[data-by=model] > .said')?.innerText.length > 5"
LONG = say("A sentence, and then another. " * 100)


def value(name):
    return f"document.querySelector('[data-value={name}]').innerText"


def test_the_numbers_follow_what_the_engine_does(page):
    page.wait_for(f"{value('running')} === '0'")
    assert page.run(value("most-running")) == "of 4"
    assert page.run(value("kv-tokens")) == "of 16,384"

    page.type(LONG, into="#prompt")
    page.press("Enter")

    page.wait_for(f"{value('running')} === '1' && {value('kv')} !== '0 %'")
    page.wait_for(f"parseFloat({value('rate')}.replace(',', '')) > 10")
    assert page.run("document.querySelector('#kv-meter').value") > 0
    assert page.run(value("step")).endswith(" ms")
    assert page.run(value("preemptions")) == "0"
    page.click("#stop")
    page.wait_for(f"{value('running')} === '0' && {value('rate')} === '0'")


def test_each_second_of_the_start_has_its_bar(page, served):
    phases = served.http.get("/engine").json()["startup"]["phases"]
    assert {"import torch", "weights", "kernels and graphs"} <= {phase["name"] for phase in phases}

    names = page.run("[...document.querySelectorAll('#phases .name')].map((each) => each.innerText)")
    widths = page.run("[...document.querySelectorAll('#phases .track span')].map((each) => each.getBoundingClientRect().width)")

    assert names == [phase["name"] for phase in phases]
    longest = max(range(len(phases)), key=lambda i: phases[i]["end"] - phases[i]["start"])
    assert widths[longest] == max(widths)
    assert min(widths) > 0
    assert "First token after" in page.text("#startup-sum")


def test_each_kernel_says_why_it_serves_and_why_no_other_does(page, served):
    kernels = served.http.get("/engine").json()["kernels"]
    shown = page.run("[...document.querySelectorAll('#kernels summary .row')].map((each) => each.innerText)")
    assert shown == [kernel["row"] for kernel in kernels]

    page.click("#kernels details summary")

    told = page.text("#kernels details")
    for part in (kernels[0]["summary"], kernels[0]["because"], kernels[0]["evidence"], kernels[0]["others"][0]["name"]):
        assert part in told
    page.type("hello", into="#prompt")
    page.press("Enter")
    page.wait_for("document.querySelector('.counts')")
    assert page.run("document.querySelector('#kernels details').open"), "what was opened stays open while numbers change"


@pytest.mark.case("I17")
def test_while_the_engine_loads_the_page_says_how_far_it_is_and_then_serves_by_itself(open_page, start, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    server = start(GATE=str(gate))
    page = open_page(server)
    page.wait_for("document.querySelector('#notice').innerText.includes('weights, 3 of 4 MB')")
    assert page.run("document.querySelector('#notice-progress').value") == 0.75
    assert page.text("#state") == "starting"
    page.type("early", into="#prompt")
    page.press("Enter")
    assert page.run("document.querySelector('#prompt').value") == "early", "kept until it can be sent"

    with open(gate, "w"):
        pass

    page.wait_for(f"{READY} && document.querySelector('#notice').hidden")
    assert page.text("#state") == "ready"
    page.press("Enter")
    page.wait_for(ANSWERED)


def test_a_server_that_has_gone_is_told_and_its_answer_is_not_taken_for_whole(open_page, start):
    server = start().ready()
    page = open_page(server)
    page.forgive("net::ERR_")
    page.wait_for(READY)
    page.type("hello", into="#prompt")
    page.press("Enter")
    page.wait_for(ANSWERED)

    server.close()

    page.wait_for("document.querySelector('#notice').innerText.includes('does not answer')")
    assert page.wait_for("document.querySelector('.error')?.innerText").startswith("The connection has broken off")
    assert page.run("document.querySelector('#send').disabled")


def test_behind_a_key_the_page_asks_for_it_and_sends_it_with_every_call(open_page, start):
    page = open_page(start("--api-key", "right").ready())
    page.forgive("status of 401")
    page.wait_for("document.querySelector('#key-form').hidden === false")
    assert page.run("document.activeElement.id") == "key"
    assert ("textbox", "API key") in [(role, name) for role, name, _ in page.accessible()]
    assert page.text("#kernels") == ""

    page.type("wrong")
    page.press("Enter")
    page.wait_for("document.querySelector('#key-why').innerText.includes('got another key')")
    page.type("right")
    page.press("Enter")

    page.wait_for(f"{READY} && document.querySelector('#key-form').hidden")
    page.type("hello", into="#prompt")
    page.press("Enter")
    page.wait_for(ANSWERED)
    assert page.run("Object.values(sessionStorage).join()") == "right"
    assert page.run("Object.keys(localStorage).length + document.cookie.length") == 0


def test_a_page_that_nobody_sees_asks_for_nothing(open_page, served):
    page = open_page(served)
    page.forgive("status of 404")  # the picture has no icon of its own
    page.open(f"{served.url}/page/icon.svg")  # a document of the same origin in which nothing runs by itself
    steps = page.run("""(async () => {
        const asked = [], timers = [], steps = [];
        window.fetch = async (path) => { asked.push(path); return { ok: true, json: async () => ({}) }; };
        window.setTimeout = (then, wait) => { timers.push([then, wait]); return timers.length; };
        const hide = (hidden) => Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        const { follow } = await import("/page/follow.js");
        const note = async () => {
            for (let i = 0; i < 20; i++) await null;  // whatever was begun has ended
            steps.push([asked.length, timers.length]);
        };
        hide(true);
        follow({ onView() {}, onKey() {}, onLost() {} });
        await note();
        hide(false);
        document.dispatchEvent(new Event("visibilitychange"));
        document.dispatchEvent(new Event("visibilitychange"));
        await note();
        timers.at(-1)[0]();
        await note();
        hide(true);
        timers.at(-1)[0]();
        await note();
        return [steps, timers.map(([, wait]) => wait), [...new Set(asked)]];
    })()""")
    assert steps == [[[0, 0], [1, 1], [2, 2], [2, 2]], [1000, 1000], ["engine"]]
