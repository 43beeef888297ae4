"""A worker without tensors: each row of its pool holds one id, and the next id is a hash of all ids read through the page table.

A wrong page, position, slot or order therefore changes the text, as it would on a device.
"""

import hashlib
from collections import deque

from rapid_llm.config import PAGE_SIZE
from rapid_llm.step import SampledToken, StepResult

VOCAB = 97


def next_id(ids, seed=0):
    """The id that follows ``ids``."""
    digest = hashlib.sha256(repr((list(ids), seed)).encode()).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB


def continuation(prompt, count, end_ids=(), seed=0):
    """What a request must come to, and why it ends."""
    ids = list(prompt)
    for _ in range(count):
        token = next_id(ids, seed)
        if token in end_ids:
            return ids[len(prompt) :], "stop"
        ids.append(token)
    return ids[len(prompt) :], "length"


class FakeWorker:
    """Runs plans at once, or ``depth`` steps late as a GPU would."""

    def __init__(self, config, depth=0):
        self.config, self.depth, self.num_compiles = config, depth, 0
        self.pool = [None] * config.max_kv_tokens
        self.table, self.last_ids, self.seeds = {}, {}, {}
        self.step_tokens = []
        self.submitted = deque()

    def submit(self, plan):
        for setup in plan.slots:
            self.seeds[setup.slot] = setup.seed
        for update in plan.pages:
            end = update.column + len(update.pages)
            assert 0 <= update.column < end <= self.config.pages_per_sequence, "a page past the end of the table"
            self.table.update(((update.slot, update.column + i), page) for i, page in enumerate(update.pages))
        assert all(chunk.length == 1 for chunk in plan.decodes)
        chunks = plan.chunks
        assert len({chunk.slot for chunk in chunks}) == len(chunks), "a slot runs twice in one step"
        assert all(0 <= chunk.slot < self.config.max_num_seqs for chunk in chunks)
        self.step_tokens.append(sum(chunk.length for chunk in chunks))
        written = set()
        for chunk in chunks:
            for offset, token in enumerate(chunk.token_ids or (self.last_ids[chunk.slot],)):
                row = self.row(chunk.slot, chunk.start + offset)
                assert row not in written, "two tokens of a step share a row"
                written.add(row)
                self.pool[row] = token
        tokens = {}
        for chunk in chunks:
            if chunk.samples:
                ids = [self.pool[self.row(chunk.slot, position)] for position in range(chunk.start + chunk.length)]
                self.last_ids[chunk.slot] = next_id(ids, self.seeds[chunk.slot])
                tokens[chunk.slot] = SampledToken(self.last_ids[chunk.slot])
        return Finished(StepResult(tokens))

    def row(self, slot, position):
        return self.table[slot, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


class Finished:
    def __init__(self, value):
        self.value = value

    def result(self):
        return self.value
