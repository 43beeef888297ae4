"""An engine process whose start waits for somebody to open the named pipe $GATE: ``python -m ... fake_engine FD``."""

import os
import socket
import sys
from pathlib import Path

from rapid_llm.engine import process
from rapid_llm.engine.engine import Engine
from tests.engine.fake_process import LIMITS, Breakable

COMMAND = (sys.executable, "-m", "tests.entrypoints.server.fake_engine")


def build(start, ledger, report):
    with ledger.phase("weights"):
        report("weights", 3_000_000, 4_000_000)
        if gate := os.environ.get("GATE"):
            Path(gate).read_bytes()
    return Engine(LIMITS, Breakable(LIMITS))


if __name__ == "__main__":
    sys.exit(process.serve(socket.socket(fileno=int(sys.argv[1])), build))
