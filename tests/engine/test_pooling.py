"""A prompt that becomes a vector is computed whole and once more after each preemption, beside others and to their good."""

import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.config import PAGE_SIZE, ResolvedConfig
from rapid_llm.engine.engine import Engine
from rapid_llm.engine.request import Request, TokenRules
from rapid_llm.step import StepResult
from tests.engine.fake_worker import VOCAB, FakeWorker, Finished, continuation
from tests.engine.harness import assert_pages_are_sound

CONTEXT = 16 * PAGE_SIZE


class PoolingWorker(FakeWorker):
    """The vector of a prompt is its last id as the pool has it, or the sum of what its chunks brought."""

    def submit(self, plan):
        for setup in plan.slots:
            self.sums = {**getattr(self, "sums", {}), setup.slot: 0}
        result = super().submit(plan).result()
        vectors = {}
        for chunk in plan.chunks:
            self.sums[chunk.slot] += sum(chunk.token_ids)
            if chunk.pools:
                last = self.pool[self.row(chunk.slot, chunk.start + chunk.length - 1)]
                vectors[chunk.slot] = struct.pack("<3I", chunk.start + chunk.length, last, self.sums[chunk.slot])
        return Finished(StepResult(result.tokens, vectors=vectors))


ASKS = st.lists(
    st.tuples(
        st.integers(0, 8 * PAGE_SIZE),  # ids that all prompts begin with
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=2 * PAGE_SIZE),
        st.sampled_from(("", "last", "mean")),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=7,
)


@settings(deadline=None)
@given(ASKS, st.integers(14, 24), st.integers(2, 4), st.sampled_from((8, 40, 256)), st.sampled_from((0, 1)))
def test_vectors_and_answers_are_those_of_requests_alone(asks, num_pages, max_num_seqs, budget, depth):
    engine = Engine(config := ResolvedConfig(CONTEXT, max_num_seqs, budget, num_pages), None)
    engine.worker = PoolingWorker(config, depth)
    requests = []
    for number, (shared, own, pooling, count) in enumerate(asks):
        prompt = [i * i % VOCAB for i in range(shared)] + own
        rules = TokenRules(0, pooling=pooling) if pooling else TokenRules(count)
        requests.append(Request(str(number), prompt, rules))
    for request in requests:
        engine.add(request)
    said, vectors, ends = {request.id: [] for request in requests}, {}, {}
    for _ in range(5_000):
        if not engine.has_work:
            break
        for output in engine.step():
            assert output.request_id not in ends
            if output.token:
                said[output.request_id].append(output.token.token_id)
            if output.finish_reason:
                ends[output.request_id] = output.finish_reason
                vectors[output.request_id] = output.vector
        assert_pages_are_sound(engine)
    assert engine.scheduler.allocator.num_free == num_pages
    for request in requests:
        prompt = request.token_ids[: request.prompt_len]
        if not request.rules.pooling:
            assert (said[request.id], ends[request.id]) == continuation(prompt, request.rules.max_new_tokens)
            continue
        length, last, total = struct.unpack("<3I", vectors[request.id])
        assert (length, last, ends[request.id]) == (request.prompt_len, prompt[-1], "stop")
        assert total == sum(prompt) or request.rules.pooling == "last"
