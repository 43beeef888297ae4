"""A decode step that is replayed gives what running the layers gives, whichever slots, pages and lengths it is about."""

import pytest
import torch

from rapid_llm.build import build_engine
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.config import EngineConfig
from rapid_llm.engine.request import Request, TokenRules
from rapid_llm.ledger import StartupLedger
from rapid_llm.runtime.recorded_steps import MAX_SEQUENCES
from tests.tiny_model import save_checkpoint, tiny_llama, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("tiny"))


def run(folder, dtype, num_requests, *, replays, shuffle, quantize=None):
    """Greedy ids of staggered requests of several lengths, and how many steps came from a recording."""
    config = EngineConfig(str(folder), "cpu", dtype, max_num_seqs=12, max_kv_tokens=2048, quantize=quantize)
    engine = build_engine(config, open_checkpoint(folder), StartupLedger())
    forward = engine.worker.forward
    forward.enabled = replays
    for pool in engine.worker.pool.buffers:
        pool.fill_(torch.nan)
    if shuffle:
        pages = torch.randperm(engine.config.num_pages, generator=torch.Generator().manual_seed(1)).tolist()
        engine.scheduler.allocator._blank.clear()
        engine.scheduler.allocator._blank.extend(pages)
    ids = {}
    for number in range(num_requests):
        name = str(number)
        ids[name] = []
        engine.add(Request(name, [(7 * number + i) % 256 for i in range(5 + 9 * number)], TokenRules(30 + 3 * number)))
        for _ in range(1 if number else 6):  # the first decodes alone for a while, in another slot than the last will
            for output in engine.step():
                ids[output.request_id].append(output.token.token_id)
    while engine.has_work:
        for output in engine.step():
            ids[output.request_id].append(output.token.token_id)
    return ids, {num_tokens for num_tokens, _ in forward._recordings}


@pytest.mark.parametrize("shuffle", [False, True], ids=["pages-in-a-row", "pages-apart"])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 10])
def test_replayed_steps_choose_the_same_ids(folder, num_requests, shuffle):
    expected, none = run(folder, "float32", num_requests, replays=False, shuffle=False)
    ids, recorded = run(folder, "float32", num_requests, replays=True, shuffle=shuffle)
    assert ids == expected
    assert none == set()
    assert recorded
    assert max(recorded) <= MAX_SEQUENCES


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_steps_through_experts_are_replayed(tmp_path, quantize):
    sparse = save_checkpoint(tiny_model("qwen3_moe", mlp_only_layers=[1]), tmp_path)
    expected, _ = run(sparse, "float32", 3, replays=False, shuffle=False, quantize=quantize)
    ids, recorded = run(sparse, "float32", 3, replays=True, shuffle=True, quantize=quantize)
    assert ids == expected
    assert {1, 2, 3} <= recorded


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_without_prepared_calls_are_repeated_as_they_are(folder, dtype):
    expected, _ = run(folder, dtype, 2, replays=False, shuffle=True)
    ids, recorded = run(folder, dtype, 2, replays=True, shuffle=True)
    assert ids == expected
    assert recorded == {1, 2}
