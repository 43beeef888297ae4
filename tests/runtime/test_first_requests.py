"""Made-up requests use every way through a worker, and leave nothing that a real one would see."""

import math

from rapid_llm import LLM, SamplingParams
from rapid_llm.runtime.first_requests import first_requests
from tests.tiny_model import save_checkpoint, tiny_llama

ASKED = SamplingParams(temperature=1.0, seed=3, top_p=0.9, repetition_penalty=1.2, logprobs=2, max_tokens=12, bad_words=["a"])


def answers(llm):
    return [output.outputs[0] for output in llm.generate(["the first", "another"], ASKED)]


def test_what_is_answered_behind_them_is_as_if_they_had_not_been(tmp_path):
    folder = str(save_checkpoint(tiny_llama(), tmp_path))
    options = {"device": "cpu", "max_kv_tokens": 256, "max_num_seqs": 4}
    wanted = answers(LLM(folder, **options))
    llm = LLM(folder, **options)
    worker = llm._engine.worker
    results = [worker.submit(plan).result() for plan in first_requests(4, worker._vocab_size)]
    assert answers(llm) == wanted
    for result in results:
        assert set(result.vectors or result.tokens) == {0, 1}
        assert all(token.token_id >= 0 for token in result.tokens.values())
    reported = [token for result in results[:3] for token in result.tokens.values()]
    assert all(len(token.logprobs) == 2 and not math.isnan(token.logprobs[0]) for token in reported)
    assert {len(scored) for scored in results[0].scored.values()} == {2}


def test_an_engine_of_one_slot_has_one_of_them():
    assert {chunk.slot for plan in first_requests(1, 64) for chunk in plan.chunks} == {0}
