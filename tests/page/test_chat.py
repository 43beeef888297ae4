"""The chat as a user sees it: an answer that grows, its end, its settings, and what is said of a mistake."""

from tests.scripted_engine import say

LAST = ".turn[data-by=model]:last-child"
SAID = f"{LAST} > .said"
LONG = "A sentence, and then another. " * 150


def ask(page, text):
    page.type(text, into="#prompt")
    page.press("Enter")


def until_counted(page):
    return page.wait_for(f"document.querySelector('{LAST} .counts')?.innerText")


def test_an_answer_appears_with_its_counts_and_the_next_question_carries_it(page):
    ask(page, say("A ∞ <b>bold</b> answer."))

    counts = until_counted(page)

    assert page.text(SAID) == "A ∞ <b>bold</b> answer."
    assert "25 out" in counts
    assert "tokens/s" in counts
    assert page.text("#announcer") == "A ∞ <b>bold</b> answer. The answer is complete."
    ask(page, say("Once more."))
    page.wait_for("document.querySelectorAll('.counts').length === 2")
    messages = page.bodies()[-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == "A ∞ <b>bold</b> answer."


def test_an_answer_is_seen_before_it_is_complete(page):
    ask(page, say(LONG))

    page.wait_for(f"document.querySelector('{SAID}')?.innerText.length > 10")

    assert page.run(f"document.querySelector('{LAST}').getAttribute('aria-busy')") == "true"
    assert len(page.text(SAID)) < len(LONG)
    page.press("Escape")
    assert until_counted(page) == "stopped"


def stopped_by(page, served, stop):
    aborted = 'requests_total{finish_reason="abort"}'
    before = served.metric(aborted) if aborted in served.http.get("/metrics").text else 0
    ask(page, say(LONG))
    page.wait_for(f"document.querySelector('{SAID}')?.innerText.length > 10")
    stop()
    assert until_counted(page) == "stopped"
    assert 10 < len(page.text(SAID)) < len(LONG)
    while served.metric("requests_running"):
        pass
    while aborted not in served.http.get("/metrics").text:
        pass
    assert served.metric(aborted) == before + 1


def test_the_stop_button_ends_the_answer_at_the_server_too(page, served):
    stopped_by(page, served, lambda: page.click("#stop"))
    assert page.run("document.querySelector('#stop').hidden")
    assert not page.run("document.querySelector('#send').disabled")


def test_a_new_chat_ends_the_answer_at_the_server_and_forgets_what_was_said(page, served):
    ask(page, say("Something that is to be forgotten."))
    until_counted(page)
    running = "document.querySelector('.turn[data-by=model]:last-child > .said')?.innerText.length > 10"
    ask(page, say(LONG))
    page.wait_for(f"document.querySelectorAll('.turn').length === 4 && {running}")

    page.click("#clear")

    page.wait_for("document.querySelectorAll('.turn').length === 0 && !document.querySelector('#send').disabled")
    assert page.run("document.activeElement.id") == "prompt"
    ask(page, say("New."))
    until_counted(page)
    assert [message["content"] for message in page.bodies()[-1]["messages"]] == [say("New.")]
    while served.metric("requests_running"):
        pass


def test_settings_reach_the_request_and_empty_ones_do_not(page):
    page.click(".sampling summary")
    values = {"temperature": "0.5", "top_p": "0.9", "top_k": "40", "min_p": "0.05", "max_tokens": "9", "seed": "-7"}
    for name, text in values.items():
        page.type(text, into=f"[name={name}]")
    page.type("zzz\nyyy", into="[name=stop]")
    page.type("Be brief.", into="[name=system]")

    ask(page, say("An answer of more than nine tokens."))

    assert "cut off at max tokens" in until_counted(page)
    body = page.bodies()[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: body[name] for name in values} == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 9, "seed": -7,
    }  # fmt: skip
    assert body["stop"] == ["zzz", "yyy"]
    page.run("document.querySelector('#sampling').reset()")
    ask(page, say("Again."))
    page.wait_for("document.querySelectorAll('.counts').length === 2")
    assert set(page.bodies()[-1]) == {"messages", "stream", "stream_options"}


def test_a_refused_request_is_told_in_the_servers_words_and_its_text_comes_back(page, served):
    page.run("document.querySelector('.sampling').open = true")
    for text in ("-1", "warm", "123456789012345678901234567890"):
        page.run("document.querySelector('#sampling').reset()")
        page.type(text, into="[name=temperature]")
        ask(page, "hello")
        words = page.wait_for(f"document.querySelector('{LAST} .error')?.innerText")
        sent = text if text != "-1" else -1
        refused = served.post("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], temperature=sent)
        assert words == refused.json()["error"]["message"]
        assert page.run("document.querySelector('#prompt').value") == "hello"
        page.run("document.querySelector('#prompt').value = ''")
    page.forgive("status of 400")


def test_reasoning_stands_in_a_block_of_its_own(page):
    ask(page, say("<think>Let me see.</think>Four."))
    until_counted(page)

    assert page.text(SAID) == "Four."
    assert not page.run("document.querySelector('.reasoning').open")
    page.click(".reasoning summary")
    assert page.text(".reasoning .said") == "Let me see."


def test_the_keyboard_is_enough(page):
    page.type("two", into="#prompt")
    page.press("Enter", shift=True)
    page.type("lines")
    assert page.run("document.querySelector('#prompt').value") == "two\nlines"
    page.press("Tab")
    page.press("Tab")
    assert page.run("document.activeElement.id") == "send", "past the button of a new chat"
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid", "what has the focus is seen to have it"
    page.press("Enter")
    until_counted(page)
    assert page.bodies()[-1]["messages"][-1]["content"] == "two\nlines"


def test_an_error_within_a_stream_ends_the_answer_with_its_words(page):
    event = '{"error": {"message": "the engine has ended; send the request again."}}'
    chunk = '{"choices": [{"delta": {"content": "Half <b>of</b> it"}}]}'
    page.answer_posts_with(f"data: {chunk}\n\ndata: {event}\n\ndata: [DONE]\n\n")

    ask(page, "hello")

    assert page.wait_for(f"document.querySelector('{LAST} .error')?.innerText").startswith("the engine has ended")
    assert page.text(SAID) == "Half <b>of</b> it", "what a model says is never markup"


def test_a_stream_that_breaks_off_is_not_taken_for_an_answer(page):
    page.answer_posts_with('data: {"choices": [{"delta": {"content": "Half"}}]}\n\n')

    ask(page, "hello")

    assert "broken off" in page.wait_for(f"document.querySelector('{LAST} .error')?.innerText")


def test_events_are_read_whole_wherever_their_bytes_are_cut(page):
    stream = 'data: {"a": "é∞😀"}\r\n\r\n: a comment\n\ndata: {"b":\ndata: 2}\n\ndata: [DONE]\n\n'
    script = f"""(async () => {{
        const {{ events }} = await import("/page/stream.js");
        const bytes = new TextEncoder().encode({stream!r});
        const seen = new Set();
        for (let cut = 0; cut <= bytes.length; cut++) {{
            const body = new ReadableStream({{ start(to) {{
                to.enqueue(bytes.slice(0, cut)); to.enqueue(bytes.slice(cut)); to.close();
            }} }});
            const all = [];
            for await (const event of events(new Response(body))) all.push(event);
            seen.add(JSON.stringify(all));
        }}
        return [...seen];
    }})()"""
    assert page.run(script) == ['[{"a":"é∞😀"},{"b":2}]']
