"""Does an engine answer or refuse everything once, and keep nothing?

    python -m tests.soak [--requests 20000] [--seed 0]      (make soak)

Half of the requests go to an engine in this process, where a seed gives the same steps every time, half to one in its own.
tests/e2e/test_soak.py runs some of it in every `make test`.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.soak import one_process, two_processes
from tests.tiny_model import save_checkpoint, tiny_llama


def main() -> None:
    """Run, and say how the requests ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    first = options.requests // 2
    with tempfile.TemporaryDirectory() as name:
        folder = str(save_checkpoint(tiny_llama(), Path(name)))
        sys.stdout.write(f"one process:   {dict(one_process.run(folder, first, options.seed))}\n")
        ends = asyncio.run(two_processes.run(folder, options.requests - first, options.seed))
        sys.stdout.write(f"two processes: {dict(ends)}\n")


if __name__ == "__main__":
    main()
