"""``rapid-llm serve`` over an engine whose start waits until the pipe $GATE is opened: ``python -m ... gated_serve MODEL``."""

import sys

from rapid_llm.entrypoints import async_llm, cli
from tests.entrypoints.server.fake_engine import COMMAND as ENGINE

COMMAND = (sys.executable, "-m", "tests.page.gated_serve")

if __name__ == "__main__":
    async_llm._COMMAND = ENGINE
    sys.exit(cli.main(["serve", *sys.argv[1:]]))
