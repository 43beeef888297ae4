"""``guidellm run`` of one scenario after the other: ``python -m tests.clients.use_guidellm SCENARIO.json ...``.

In one process, since its import takes seconds: it brings torch, transformers and datasets.
"""

import sys

if __name__ == "__main__":  # not in the processes that it starts, which import this file too
    from guidellm.cli import cli

    for scenario in sys.argv[1:]:
        cli(["run", "--config", scenario, "--disable-console"], standalone_mode=False)
