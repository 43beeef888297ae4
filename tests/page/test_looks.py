"""How the page looks and reads: light and dark, on a narrow window, to a screen reader."""

from itertools import pairwise

import pytest

from tests.scripted_engine import say

CONTRAST = """(() => {
    const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (colour) => numbers(colour).slice(0, 3).map((value) => value / 255)
        .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (element) => {
        const colour = getComputedStyle(element).backgroundColor;
        return numbers(colour)[3] === 0 ? ground(element.parentElement) : colour;
    };
    const found = {};
    for (const element of document.querySelectorAll("body *")) {
        const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        if (!hasText && !element.matches("input, textarea")) continue;
        if (!element.checkVisibility() || element.closest(".unseen")) continue;
        const [one, other] = [light(getComputedStyle(element).color), light(ground(element))];
        const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
        found[`${element.tagName}.${element.className}#${element.id}`] = ratio;
    }
    return found;
})()"""


@pytest.fixture(params=[False, True], ids=["light", "dark"])
def full(request, open_page, served):
    """The page with everything on it: an answer, an error, opened parts."""
    page = open_page(served, dark=request.param)
    page.wait_for("!document.querySelector('#send').disabled && document.querySelector('#kernels details')")
    page.type(say("An answer."), into="#prompt")
    page.press("Enter")
    page.wait_for("document.querySelector('.counts')")
    page.run("for (const each of document.querySelectorAll('details')) each.open = true")
    page.type("-1", into="[name=temperature]")
    page.type("hello", into="#prompt")
    page.press("Enter")
    page.wait_for("document.querySelector('.error')")
    page.forgive("status of 400")
    return page, request.param


def test_the_page_is_as_light_or_dark_as_its_reader_wishes_and_can_be_read(full):
    page, dark = full
    grounds = page.run(
        "['body', '#engine', '#prompt', '.load > div'].map((each) =>"
        " Math.max(...getComputedStyle(document.querySelector(each)).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)))"
    )
    assert all(value < 64 if dark else value > 224 for value in grounds), grounds
    contrasts = page.run(CONTRAST)
    assert len(contrasts) > 20
    assert {name: ratio for name, ratio in contrasts.items() if ratio < 4.5} == {}


def test_everything_that_can_be_used_has_a_name_and_the_parts_have_their_roles(full):
    page, _ = full
    nodes = page.accessible()
    usable = ("button", "textbox", "link", "DisclosureTriangle", "progressbar", "meter", "log", "form")
    assert [(role, node) for role, name, node in nodes if role in usable and not name.strip()] == []
    names = {(role, name) for role, name, _ in nodes}
    assert {
        ("button", "Send"),
        ("button", "New chat"),
        ("textbox", "Message"),
        ("textbox", "Temperature"),
        ("textbox", "System prompt"),
        ("log", "Conversation"),
        ("complementary", "Engine"),
        ("region", "Chat"),
    } <= names
    roles = [role for role, _, _ in nodes]
    assert {"banner", "main"} <= set(roles)
    levels = page.run("[...document.querySelectorAll('h1, h2, h3')].map((each) => Number(each.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels)), "no level is left out"
    assert page.run("document.documentElement.lang") == "en"
    ids = page.run("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("width", [360, 768])
def test_a_narrow_window_scrolls_in_one_direction(open_page, served, width):
    page = open_page(served, width=width, height=640)
    page.wait_for("!document.querySelector('#send').disabled && document.querySelector('#kernels details')")
    page.run("for (const each of document.querySelectorAll('details')) each.open = true")
    page.type(say("w" * 120), into="#prompt")
    page.press("Enter")
    page.wait_for("document.querySelector('.counts')")

    wide = page.run("""(() => {
        document.querySelector("#key-form").hidden = false;
        const isWide = (each) => !each.closest(".unseen, .skip") && each.getBoundingClientRect().right > innerWidth + 0.5;
        return [...document.querySelectorAll("body *")].filter(isWide).map((each) => each.outerHTML.slice(0, 200));
    })()""")

    assert wide == []
    assert page.run("document.documentElement.scrollWidth") <= width
    page.click("nav a[href='#engine']")
    assert page.run("document.querySelector('#engine').getBoundingClientRect().top") < 640


def test_with_reduced_motion_nothing_moves(page):
    page.type(say("A sentence, and then another. " * 100), into="#prompt")
    page.press("Enter")
    page.wait_for("document.querySelector('.turn[aria-busy=true] > .said')")
    assert page.run("document.getAnimations().length") == 0
    page.press("Escape")
    page.wait_for("document.querySelector('.counts')")
