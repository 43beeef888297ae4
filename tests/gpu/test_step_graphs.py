"""Captured steps say what launched steps say, and nothing is compiled or loaded once the engine is ready."""

import pytest
import triton

from rapid_llm import LLM, Grammar, SamplingParams
from tests.tiny_model import save_checkpoint, tiny_model

WORDS = Grammar("regex", "[a-z ]{40}")
LENGTHS = (3, 70, 17, 1, 48, 20, 5, 200)


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def folder(request, tmp_path_factory):
    model = tiny_model(request.param, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    return save_checkpoint(model, tmp_path_factory.mktemp("tiny"))


def answers(llm, **values):
    params = [
        SamplingParams(temperature=number % 2, seed=number, max_tokens=9 + 2 * number, ignore_eos=True, **values)
        for number in range(len(LENGTHS))
    ]
    prompts = [[(11 * number + i) % 256 for i in range(length)] for number, length in enumerate(LENGTHS)]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


each_pool = pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3"])


def start(folder, **options):
    return LLM(str(folder), device="cuda", max_kv_tokens=4096, max_batched_tokens=96, max_num_seqs=6, **options)


@each_pool
def test_captured_steps_choose_the_ids_of_launched_ones(folder, kv_dtype):
    captured = start(folder, kv_dtype=kv_dtype)
    first = answers(captured)
    assert not captured._engine.worker.graphs.pending
    launched = start(folder, kv_dtype=kv_dtype, cuda_graphs=False)
    assert answers(captured) == first == answers(launched)
    assert answers(captured, grammar=WORDS) == answers(launched, grammar=WORDS)


@pytest.mark.case("C2")
@each_pool
def test_nothing_is_compiled_or_loaded_after_ready(folder, kv_dtype, monkeypatch):
    llm = start(folder, kv_dtype=kv_dtype)
    seen = []

    def loaded(module, function, name, *_):
        seen.append(name)

    triton.knobs.runtime.kernel_load_start_hook.add(loaded)
    try:
        answers(llm)
        answers(llm, top_p=0.9, top_k=5)
        answers(llm, grammar=WORDS)
        answers(llm, grammar=WORDS, repetition_penalty=1.2)
        llm.generate("a", SamplingParams(max_tokens=1))
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, logprobs=3))
        for output in llm.stream("aborted", SamplingParams(max_tokens=50)):
            if len(output.outputs[0].token_ids) > 3:
                break
        assert seen == []
    finally:
        triton.knobs.runtime.kernel_load_start_hook.remove(loaded)
