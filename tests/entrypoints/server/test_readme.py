"""The lines of the README work as they are printed."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.entrypoints.server.serve import ROOT, Server

SECTION = (ROOT / "README.md").read_text().split("## Serve\n")[1].split("\n## ")[0]
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", SECTION, flags=re.DOTALL)


@pytest.fixture(scope="module")
def embedded():
    """The first block's command, at a free port."""
    [line] = BLOCKS[0][1].splitlines()
    name, *arguments = line.split("#")[0].split()
    server = Server(*arguments[1:], command=(Path(sys.executable).with_name(name), arguments[0]))
    yield server.ready()
    server.close()


@pytest.mark.real_model
def test_the_lines_with_curl(embedded):
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    script = BLOCKS[1][1].replace(":8000", f":{embedded.port}")
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    ready, answer = done.stdout.split("}", 1)
    assert '"ready"' in ready
    assert "Paris" in json.loads(answer)["choices"][0]["message"]["content"]


@pytest.mark.real_model
def test_the_lines_with_the_openai_client(embedded):
    language, script = BLOCKS[2]
    assert language == "python"
    script = script.replace(":8000", f":{embedded.port}")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Paris" in done.stdout
