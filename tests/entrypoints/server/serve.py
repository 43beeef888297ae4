"""``rapid-llm serve`` as a process of its own, and what it logs."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx2

ROOT = Path(__file__).parents[3]
WAIT_S = 120


class Server:
    """Runs until ``close``; the port is known once it listens."""

    def __init__(self, *flags, command=(sys.executable, "-m", "rapid_llm", "serve"), **variables):
        self.log = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [*command, *flags, "--port", "0"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **variables},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = int(re.search(r":(\d+)$", self.wait_for("listening on ")["event"])[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx2.Client(base_url=self.url, timeout=WAIT_S, trust_env=False)

    def wait_for(self, beginning, count=1):
        """The ``count``-th line of the log whose event begins so."""

        def found():
            return len(self._matching(beginning)) >= count or self._has_ended

        with self._news:
            assert self._news.wait_for(found, WAIT_S), f"{beginning!r} never came: {self.log}"
            matching = self._matching(beginning)
        assert len(matching) >= count, f"the server has ended: {self.log}"
        return matching[count - 1]

    def ready(self):
        """Wait until requests are served."""
        self.wait_for("ready")
        return self

    def post(self, path, **body):
        return self.http.post(path, json=body)

    def events(self, path, **body):
        """The events of a stream: JSON, and the end."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            return [parse_event(line) for line in response.iter_lines() if line]

    def metric(self, name):
        """One number of /metrics."""
        text = self.http.get("/metrics").text
        return float(re.search(rf"^rapid_llm_{re.escape(name)} (\S+)$", text, flags=re.MULTILINE)[1])

    def end(self, number=signal.SIGTERM):
        """Its exit status after a signal."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def close(self):
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        self.process.stderr.close()

    @property
    def _has_ended(self):
        return not self._reader.is_alive() or self.log[-1:] == [{"event": ""}]

    def _matching(self, beginning):
        return [line for line in self.log if line["event"].startswith(beginning)]

    def _read(self):
        for text in self.process.stderr:
            line = json.loads(text) if text.startswith("{") else {"event": text.rstrip()}
            with self._news:
                self.log.append(line)
                self._news.notify_all()
        with self._news:
            self.log.append({"event": ""})
            self._news.notify_all()


def parse_event(line):
    text = line.removeprefix("data: ")
    assert text != line, line
    return text if text == "[DONE]" else json.loads(text)
