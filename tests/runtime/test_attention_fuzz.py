"""Scheduler, allocator, page table and attention together: whatever arrives, ids equal those of each request alone.

The reference is a forward pass over the whole sequence in plain float64 torch, without cache, pages or batch.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.build import build_engine
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.config import EngineConfig
from rapid_llm.engine.request import Request, TokenRules
from rapid_llm.ledger import StartupLedger
from tests.tiny_model import VOCAB_SIZE, save_checkpoint, tiny_llama

MARGIN = 1e-3  # logits: closer than this, float32 sums in another order may choose the other id


@pytest.fixture(scope="module")
def oracle():
    return tiny_llama().double()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("tiny"))


def assert_greedy(oracle, prompt, ids):
    """Every id is the likeliest after what came before it (or as good as)."""
    with torch.no_grad():
        logits = oracle(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert (chosen >= logits.max(dim=1).values - MARGIN).all()


@settings(max_examples=25, deadline=None)
@given(
    asks=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 24), st.integers(0, 4)), min_size=1, max_size=6),
    max_kv_tokens=st.sampled_from([96, 112, 160]),
    budget=st.integers(1, 80),
    depth=st.integers(0, 1),
    seed=st.integers(0, 2**20),
)
def test_any_traffic_gives_each_request_its_own_ids(oracle, folder, asks, max_kv_tokens, budget, depth, seed):
    config = EngineConfig(str(folder), "cpu", max_num_seqs=3, max_batched_tokens=budget, max_kv_tokens=max_kv_tokens)
    engine = build_engine(config, open_checkpoint(folder), StartupLedger())
    engine.worker.depth = depth
    for pool in engine.worker.pool.buffers:
        pool.fill_(torch.nan)  # a row that is read before it is written shows
    generator = torch.Generator().manual_seed(seed)
    # Pages start shuffled, and come back in the order that requests end.
    shuffled = torch.randperm(engine.config.num_pages, generator=generator).tolist()
    engine.scheduler.allocator._blank.clear()
    engine.scheduler.allocator._blank.extend(shuffled)
    prompts, outputs = {}, {}

    def step():
        for output in engine.step():
            if output.token is not None:
                outputs[output.request_id].append(output.token.token_id)

    for number, (length, count, wait) in enumerate(asks):
        for _ in range(wait):
            step()
        name = str(number)
        prompts[name] = torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
        outputs[name] = []
        engine.add(Request(name, list(prompts[name]), TokenRules(count)))
    while engine.has_work:
        step()

    for number, (_, count, _) in enumerate(asks):
        assert len(outputs[str(number)]) == count
        assert_greedy(oracle, prompts[str(number)], outputs[str(number)])
    assert engine.scheduler.allocator.num_free == engine.config.num_pages
