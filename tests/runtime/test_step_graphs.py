"""A step that is padded to a bucket gives what the step as it is gives, and writes nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.build import build_engine
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.config import EngineConfig, ResolvedConfig, mixed_sizes
from rapid_llm.engine.request import Request, TokenRules
from rapid_llm.ledger import StartupLedger
from rapid_llm.runtime.step_graphs import Bucket, StepGraphs, decode_sizes, room_for_steps, step_buckets
from tests.tiny_model import save_checkpoint, tiny_model

SLOTS = 5


class Replays:
    """In the place of CUDA graphs: what was captured is launched again."""

    def __init__(self):
        self.captured = self.replayed = 0

    def __call__(self, launch):
        self.captured += 1

        def replay():
            self.replayed += 1
            launch()

        return replay


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def folder(request, tmp_path_factory):
    return save_checkpoint(tiny_model(request.param), tmp_path_factory.mktemp("tiny"))


def tiny_engine(folder, *, padded, capture=None, **options):
    options = {"max_num_seqs": SLOTS, "max_kv_tokens": 1024, "max_batched_tokens": 48, **options}
    engine = build_engine(EngineConfig(str(folder), "cpu", "float32", **options), open_checkpoint(folder), StartupLedger())
    worker = engine.worker
    worker.forward.enabled = False
    for pool in worker.pool.buffers:
        pool.fill_(torch.nan)  # what padding reads shows
    if padded:
        slots = engine.config.max_num_seqs + 1
        ids = torch.zeros(room_for_steps(engine.config), dtype=torch.int32)
        worker.sampler.last_ids = ids[:slots]
        parts = (worker.model, worker.pool.layers, worker.sampler, ids, worker.builder.page_table, capture)
        worker.graphs = StepGraphs(engine.config, *parts)
        worker.prepare()
    return engine


def answers(engine, *, temperature=0.0, logprobs=-1):
    """Ids of staggered requests, prompts of several chunks among them."""
    found = {}
    for number, length in enumerate((3, 70, 17, 1, 48, 20, 5)):
        rules = TokenRules(9 + 2 * number, temperature=temperature, seed=number, logprobs=logprobs)
        engine.add(Request(str(number), [(11 * number + i) % 256 for i in range(length)], rules))
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output.token)
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output.token)
    return found


def ids(found):
    return {name: [token.token_id for token in tokens] for name, tokens in found.items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_steps_choose_the_same_ids(folder, temperature):
    exact = answers(tiny_engine(folder, padded=False), temperature=temperature)
    padded = answers(tiny_engine(folder, padded=True), temperature=temperature)
    assert ids(padded) == ids(exact)


def test_padded_steps_bring_the_same_vectors_beside_others(folder):
    found = []
    for padded in (False, True):
        engine = tiny_engine(folder, padded=padded)
        for number, (length, pooling) in enumerate([(70, "mean"), (17, ""), (60, "last"), (1, "mean"), (33, "mean"), (20, "")]):
            rules = TokenRules(0, pooling=pooling) if pooling else TokenRules(9, temperature=0.0)
            engine.add(Request(str(number), [(11 * number + i) % 256 for i in range(length)], rules))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        found.append(
            {one.request_id: torch.frombuffer(bytearray(one.vector), dtype=torch.float32) for one in outputs if one.vector}
        )
        found.append(ids({name: [one.token for one in outputs if one.request_id == name and one.token] for name in ("1", "5")}))
    exact, ids_exact, padded, ids_padded = found
    assert ids_padded == ids_exact
    assert exact.keys() == padded.keys() == {"0", "2", "3", "4"}
    for name, vector in exact.items():
        torch.testing.assert_close(padded[name], vector, atol=1e-5, rtol=1e-5)


def test_captured_steps_choose_the_same_ids_and_none_waits_for_its_capture(folder):
    replays = Replays()
    engine = tiny_engine(folder, padded=True, capture=replays)
    at_start = replays.captured
    assert ids(answers(engine)) == ids(answers(tiny_engine(folder, padded=False)))
    assert 0 < at_start < len(list(step_buckets(engine.config)))  # the smallest decodes are there before the first request
    assert not engine.worker.graphs.pending
    assert replays.captured == len(list(step_buckets(engine.config)))
    assert replays.replayed


def test_log_probs_are_those_of_the_steps_own_rows(folder):
    exact = answers(tiny_engine(folder, padded=False), logprobs=2)
    padded = answers(tiny_engine(folder, padded=True), logprobs=2)
    assert ids(padded) == ids(exact)
    for name, tokens in exact.items():
        for token, other in zip(tokens, padded[name], strict=True):
            assert other.logprob_ids == token.logprob_ids
            torch.testing.assert_close(torch.tensor(other.logprobs), torch.tensor(token.logprobs), rtol=1e-4, atol=1e-4)


def test_padded_steps_of_a_deterministic_engine_have_the_bits_of_exact_ones(folder):
    exact = answers(tiny_engine(folder, padded=False, deterministic=True), temperature=1.0, logprobs=2)
    engine = tiny_engine(folder, padded=True, capture=Replays(), deterministic=True)
    assert all(bucket.chunks and not bucket.decodes for bucket in step_buckets(engine.config))  # one attention for all rows
    assert answers(engine, temperature=1.0, logprobs=2) == exact


def test_log_probs_of_a_prompt_are_those_of_exact_steps(folder):
    def scored(engine):
        for number, length in enumerate((150, 1, 2, 40)):
            rules = TokenRules(4, prompt_logprobs=2)
            engine.add(Request(str(number), [(11 * number + i) % 256 for i in range(length)], rules))
        found = {}
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.request_id, []).extend([*output.prompt, *([output.token] if output.token else [])])
        return found

    exact, padded = scored(tiny_engine(folder, padded=False)), scored(tiny_engine(folder, padded=True))
    assert ids(padded) == ids(exact)
    assert len(exact["0"]) == 149 + 4
    for name, tokens in exact.items():
        for token, other in zip(tokens, padded[name], strict=True):
            assert other.logprob_ids == token.logprob_ids
            torch.testing.assert_close(torch.tensor(other.logprobs), torch.tensor(token.logprobs), rtol=1e-4, atol=1e-4)


@pytest.mark.case("F4")
@pytest.mark.case("G5")
def test_padding_touches_no_row_of_a_full_pool_and_no_slot(folder):
    engine = tiny_engine(folder, padded=True, max_num_seqs=4)
    worker = engine.worker
    for pool in worker.pool.buffers:
        pool.copy_(torch.randn(pool.shape))
    worker.sampler.last_ids[:4] = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    before, ids_before = [pool.clone() for pool in worker.pool.buffers], worker.sampler.last_ids[:4].clone()
    worker.prepare()  # runs every bucket on padding alone
    assert all(torch.equal(pool, old) for pool, old in zip(worker.pool.buffers, before, strict=True))
    assert torch.equal(worker.sampler.last_ids[:4], ids_before)
    assert worker.graphs.nobodys_slot not in engine.scheduler._free_slots


@given(most=st.integers(1, 600), tokens=st.integers(1, 5000))
@settings(deadline=None)
def test_every_step_that_may_be_planned_has_a_bucket_that_holds_it(most, tokens):
    decodes, mixed = decode_sizes(most), mixed_sizes(tokens)
    for sizes, largest in ((decodes, most), (mixed, tokens)):
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == largest
    config = ResolvedConfig(4096, most, tokens, 512)
    buckets = list(step_buckets(config))
    assert len(buckets) == len(set(buckets)) == len(decodes) + len(mixed)
    assert room_for_steps(config) >= max(sum(bucket.sections().values()) for bucket in buckets)


def test_a_bucket_of_decodes_has_no_chunks():
    assert "chunk_rows" not in Bucket(8, 8, 0, 8).sections()
    assert Bucket(64, 8, 8, 8).sections()["chunk_bounds"] == 9
