"""``python -m rapid_llm.entrypoints.engine_process FD``: what an engine client starts, with its socket at that descriptor."""

import socket
import sys
from pathlib import Path

from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.engine.engine import Engine
from rapid_llm.engine.messages import Start
from rapid_llm.engine.process import Report, serve
from rapid_llm.entrypoints.compile_ahead import CompileAhead
from rapid_llm.entrypoints.early_context import begin_context
from rapid_llm.ledger import StartupLedger


def build(start: Start, ledger: StartupLedger, report: Report) -> Engine:
    """The engine on a device; torch is imported here, once the client knows that the process lives."""
    begin_context(start.config)
    with CompileAhead(start.config, Path(start.path), ledger) as compilers:
        with ledger.phase("open checkpoint"):
            source = open_checkpoint(start.path)
        with ledger.phase("import torch"):
            from rapid_llm.build import build_engine
        return build_engine(
            start.config,
            source,
            ledger,
            lambda done, total, _: report("weights", done, total),
            lambda: compilers.wait(lambda done, total: report("kernels", done, total)),
        )


if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1])), build))
