"""A few hundred requests of every kind, some left, refused or preempted: all are answered, and nothing is left behind."""

import asyncio

from tests.soak import run
from tests.tiny_model import save_checkpoint, tiny_llama


def test_traffic_of_every_kind_loses_and_leaves_nothing(tmp_path):
    folder = save_checkpoint(tiny_llama(), tmp_path)
    ends = asyncio.run(asyncio.wait_for(run(str(folder), 500, seed=1), 300))
    assert min(ends[end] for end in ("answered", "abandoned", "cancelled", "aborted", "refused", "canary")) > 5
