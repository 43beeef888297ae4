"""``rapid-llm serve`` over the scripted engine: ``python -m ... scripted_serve MODEL --no-prefix-cache``."""

import sys

from rapid_llm.entrypoints import async_llm, cli
from tests import scripted_engine

COMMAND = (sys.executable, "-m", "tests.entrypoints.server.scripted_serve")

if __name__ == "__main__":
    async_llm._COMMAND = scripted_engine.COMMAND
    sys.exit(cli.main(["serve", *sys.argv[1:]]))
