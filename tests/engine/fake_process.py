"""An engine process without tensors: ``python -m tests.engine.fake_process KIND FD``. Some kinds are broken, by name."""

import os
import socket
import sys
import time
from pathlib import Path

from rapid_llm.config import ResolvedConfig
from rapid_llm.engine import process
from rapid_llm.engine.engine import Engine
from rapid_llm.errors import ConfigError, KernelInputError
from tests.engine.fake_worker import VOCAB, FakeWorker

LIMITS = ResolvedConfig(max_model_len=4096, max_num_seqs=64, max_batched_tokens=4096, num_pages=512)
CRASH, HANG, REFUSE = VOCAB - 1, VOCAB - 2, VOCAB - 3
"""Prompt ids that a worker of kind "breakable" does not survive."""


def command(kind):
    return (sys.executable, "-m", "tests.engine.fake_process", kind)


class Breakable(FakeWorker):
    def submit(self, plan):
        prompts = {token for chunk in plan.prefills for token in chunk.token_ids}
        if CRASH in prompts:
            raise RuntimeError("the device is gone")
        if REFUSE in prompts:
            raise KernelInputError("swiglu(gate_up [3, 5])")
        if HANG in prompts:
            os.write(1, b"hanging\n")
            while True:
                time.sleep(3600)
        return super().submit(plan)


class Counting(FakeWorker):
    """Says when 200 steps have run."""

    def submit(self, plan):
        if len(self.step_tokens) == 200:
            os.write(1, b"200 steps\n")
        return super().submit(plan)


WORKERS = {"breakable": Breakable, "counting": Counting}


def build(start, ledger, report):
    with ledger.phase("weights"):
        report("weights", 3, 4)
    if start.path == "refused":
        raise ConfigError("this device is not here", got="cuda:9", wanted="cuda:0", change="name another")
    if start.path == "broken":
        raise RuntimeError("out of luck")
    while start.path == "endless":
        os.write(1, b"loading\n")
        time.sleep(3600)
    return Engine(LIMITS, WORKERS.get(sys.argv[1], FakeWorker)(LIMITS))


def main():
    connection = socket.socket(fileno=int(sys.argv[2]))
    if sys.argv[1] == "garbage":
        connection.sendall(Path(sys.executable).read_bytes()[:4096])
        time.sleep(3600)
    if sys.argv[1] == "old":
        process.version = lambda: "0.0.0"
    sys.exit(process.serve(connection, build))


if __name__ == "__main__":
    main()
