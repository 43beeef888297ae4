"""Headless Chromium, driven through its DevTools protocol over two pipes: no driver, no port, no package.

https://chromedevtools.github.io/devtools-protocol/; with --remote-debugging-pipe the browser reads commands from descriptor 3 and
writes answers and events to descriptor 4, each as JSON that ends with a zero byte.
"""

import json
import os
import select
import shutil
import subprocess
import time
from itertools import count

WAIT_S = 30
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATH = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--disable-gpu",
    "--hide-scrollbars", "--force-color-profile=srgb",
)  # fmt: skip


class Browser:
    """Runs until ``close``."""

    def __init__(self, folder):
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        # The pipes are to be 3 and 4 in the browser: a shell puts them there, whatever their numbers are here.
        root = ("--no-sandbox",) if os.geteuid() == 0 else ()
        script = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, PATH, *FLAGS, *root, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._numbers, self._rest, self._answers, self.events = count(1), b"", {}, []

    def send(self, method, session=None, **params):
        """The result of a command; events that come before it are kept."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._out, json.dumps(command).encode() + b"\0")
        answer = self._read_until(lambda: self._answers.pop(number, None), method)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def event(self, method, session):
        """The first event of this kind that has not been taken yet; waits for it."""

        def take():
            for i, event in enumerate(self.events):
                if (event["method"], event.get("sessionId")) == (method, session):
                    return self.events.pop(i)
            return None

        return self._read_until(take, method)

    def page(self, **looks):
        """A tab of its own, with nothing kept from others."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, context, **looks)

    def close(self):
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(WAIT_S)

    def _read_until(self, found, what):
        deadline = time.monotonic() + WAIT_S
        while (result := found()) is None:
            ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            assert data, f"Chromium said nothing more, {what} was waited for"
            *messages, self._rest = (self._rest + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers[message["id"]] = message
                else:
                    self.events.append(message)
        return result


class Page:
    """A tab: what a user does, and what a user sees."""

    def __init__(self, browser, session, context, *, width=1280, height=800, dark=False):
        self._browser, self._session, self._context = browser, session, context
        self._forgiven = ()
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.do(f"{domain}.enable")
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[scheme, {"name": "prefers-reduced-motion", "value": "reduce"}])

    def do(self, method, **params):
        """One command of the protocol."""
        return self._browser.send(method, self._session, **params)

    def open(self, url):
        self.do("Page.navigate", url=url)
        self._browser.event("Page.loadEventFired", self._session)
        return self

    def run(self, script):
        """The value of an expression, awaited where it is a promise."""
        answer = self.do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition):
        """Until an expression holds, looked at once a frame; its value."""
        script = f"""new Promise((resolve, reject) => {{
            const end = performance.now() + {1000 * (WAIT_S - 2)};
            (function look() {{
                const value = {condition};
                if (value) resolve(value);
                else if (performance.now() > end) reject(new Error("never came"));
                else requestAnimationFrame(look);
            }})();
        }})"""
        answer = self.do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, f"{condition}: {answer['exceptionDetails']}; seen: {self.text('body')}"
        return answer["result"]["value"]

    def text(self, selector):
        """What of an element can be seen."""
        return self.run(f"document.querySelector({selector!r}).innerText")

    def click(self, selector):
        """With the mouse, at its middle."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'nearest'}})")
        box = self.run(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
                       f"(document.querySelector({selector!r}).getBoundingClientRect())")  # fmt: skip
        for kind in ("mousePressed", "mouseReleased"):
            self.do("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text, into=None):
        """As from a keyboard, into an element or whatever has the focus."""
        if into:
            self.run(f"document.querySelector({into!r}).focus()")
        self.do("Input.insertText", text=text)

    def press(self, key, *, shift=False):
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        values = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.do("Input.dispatchKeyEvent", type="keyDown", **values, **text)
        self.do("Input.dispatchKeyEvent", type="keyUp", **values)

    def answer_posts_with(self, text):
        """Have the page hear this in place of what the server says to a request with a body."""
        self.run(f"(() => {{ const real = fetch; window.fetch = (path, options) =>"
                 f" options.body ? Promise.resolve(new Response({text!r})) : real(path, options); }})()")  # fmt: skip

    def bodies(self):
        """What it has sent, as JSON."""
        self.run("0")
        requests = [event["params"]["request"] for event in self._mine() if event["method"] == "Network.requestWillBeSent"]
        return [json.loads(request["postData"]) for request in requests if "postData" in request]

    def forgive(self, words):
        """Complaints that hold these words are what a test is about."""
        self._forgiven += (words,)

    def complaints(self):
        """Errors of scripts, of the console, and of requests that failed."""
        self.run("0")  # what came before this answer has been read
        told = {"Runtime.exceptionThrown": lambda _: True,
                "Runtime.consoleAPICalled": lambda event: event["type"] in ("error", "warning", "assert"),
                "Log.entryAdded": lambda event: event["entry"]["level"] in ("error", "warning")}  # fmt: skip
        found = [event["params"] for event in self._mine() if told.get(event["method"], lambda _: False)(event["params"])]
        return [each for each in found if not any(words in json.dumps(each) for words in self._forgiven)]

    def requested(self):
        """The URLs that it has asked for."""
        return [event["params"]["request"]["url"] for event in self._mine() if event["method"] == "Network.requestWillBeSent"]

    def accessible(self):
        """The nodes of the accessibility tree as (role, name, properties), without those that are ignored."""
        nodes = self.do("Accessibility.getFullAXTree")["nodes"]
        return [(node["role"]["value"], node.get("name", {}).get("value", ""), node) for node in nodes if not node["ignored"]]

    def picture(self):
        """What is seen, as PNG in base64."""
        return self.do("Page.captureScreenshot", format="png")["data"]

    def close(self):
        self._browser.send("Target.disposeBrowserContext", browserContextId=self._context)
        self._browser.events = [event for event in self._browser.events if event.get("sessionId") != self._session]

    def _mine(self):
        return [event for event in self._browser.events if event.get("sessionId") == self._session]
