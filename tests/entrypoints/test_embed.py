"""LLM.embed against transformers: alone and in a batch, whole and in chunks, in a crowd, after preemption, beside the cache."""

import asyncio
import math

import pytest
import torch

from rapid_llm import LLM, AsyncLLM, PoolingParams, RequestError, SamplingParams
from tests.tiny_model import save_checkpoint, tiny_llama

TEXTS = ["a", "hello there", "the same words, " * 6, "the same words, " * 6 + "and others"]


@pytest.fixture(scope="module")
def oracle():
    return tiny_llama()


@pytest.fixture(scope="module")
def folder(oracle, tmp_path_factory):
    return str(save_checkpoint(oracle, tmp_path_factory.mktemp("embedded") / "tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, device="cpu", max_kv_tokens=1024, max_num_seqs=8)


def expected(oracle, ids, pooling, normalize=True):
    with torch.no_grad():
        hidden = oracle.model(torch.tensor([ids])).last_hidden_state[0]
    vector = hidden[-1] if pooling == "last" else hidden.mean(0)
    return pytest.approx((vector / vector.norm() if normalize else vector).tolist(), abs=2e-5)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_transformers_alone_in_a_batch_and_the_second_time(llm, oracle, pooling):
    batch = llm.embed(TEXTS, pooling)
    again = llm.embed(TEXTS, pooling)  # "last" finds most of it in the prefix cache, "mean" may not
    for text, *outputs in zip(TEXTS, batch, again, strict=True):
        [alone] = llm.embed(llm.tokenizer.encode(text), pooling, normalize=False)
        assert alone.embedding == expected(oracle, alone.prompt_token_ids, pooling, normalize=False)
        for output in outputs:
            assert output.embedding == expected(oracle, output.prompt_token_ids, pooling)
            assert (output.outputs, output.finished, output.error) == ([], True, None)
    assert bool(again[-1].num_cached_tokens) == (pooling == "last")


def test_of_fewer_dimensions_the_first_are_kept_and_scaled_anew(llm):
    [whole], [short] = llm.embed("hello"), llm.embed("hello", dimensions=5)
    length = math.hypot(*whole.embedding[:5])
    assert short.embedding == pytest.approx([value / length for value in whole.embedding[:5]], abs=1e-6)
    assert llm.embed("hello", normalize=False, dimensions=5)[0].embedding == llm.embed("hello", normalize=False)[0].embedding[:5]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["usual", "deterministic"])
def test_a_prompt_in_chunks_has_the_vector_of_a_whole_one(folder, oracle, pooling, deterministic):
    small = {"device": "cpu", "max_kv_tokens": 1024, "max_num_seqs": 4, "max_batched_tokens": 16, "deterministic": deterministic}
    for output in LLM(folder, **small).embed(TEXTS, pooling):
        assert output.embedding == expected(oracle, output.prompt_token_ids, pooling)


@pytest.mark.case("I14")
def test_a_crowd_that_takes_its_pages_away_changes_neither_vectors_nor_answers(folder, llm, oracle):
    """On a pool so small that those who come last are computed anew."""
    asks = [SamplingParams(temperature=0.8, seed=seed, max_tokens=90, ignore_eos=True) for seed in range(3)]
    answers = llm.generate(["one", "two", "three"], asks)

    async def scenario():
        async with AsyncLLM(folder, device="cpu", max_kv_tokens=256, max_num_seqs=8, max_batched_tokens=24) as crowded:
            talks = [last(crowded.generate(prompt, ask)) for prompt, ask in zip(("one", "two", "three"), asks, strict=True)]
            vectors = [crowded.embed(text, PoolingParams(pooling)) for text in TEXTS for pooling in ("last", "mean")]
            results = await asyncio.gather(*talks, *vectors)
            gone = asyncio.create_task(crowded.embed("x" * 200))
            await asyncio.sleep(0)
            gone.cancel()
            await asyncio.wait({gone})
            stats = await crowded.stats()
            assert stats.num_preemptions
            return results[:3], results[3:], (stats.waiting, stats.running, stats.used_pages)

    talks, vectors, left = asyncio.run(scenario())
    assert [talk.outputs[0].text for talk in talks] == [answer.outputs[0].text for answer in answers]
    poolings = ("last", "mean") * len(TEXTS)
    for output, pooling in zip(vectors, poolings, strict=True):
        assert output.embedding == expected(oracle, output.prompt_token_ids, pooling)
    assert left == (0, 0, 0)


async def last(stream):
    return [output async for output in stream][-1]


def test_damaged_hidden_states_are_an_error_of_their_request(folder):
    llm = LLM(folder, device="cpu", max_kv_tokens=256)
    llm._engine.worker.model.norm.weight[3] = math.nan
    [output] = llm.embed("hello")
    assert (output.embedding, output.finished) == (None, True)
    assert "held no number" in output.error


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"prompts": ""}, "the prompt is empty"),
        ({"prompts": [[5, 999]]}, "out of the vocabulary"),
        ({"prompts": "x" * 257}, "got 257 tokens, wanted at most 256"),
        ({"prompts": "a", "pooling": "max"}, "pooling is out of range: got 'max'"),
        ({"prompts": "a", "normalize": 1}, "normalize is out of range"),
        ({"prompts": "a", "dimensions": 65}, "got 65, wanted 1 to 64"),
        ({"prompts": "a", "dimensions": 1.5}, "dimensions is out of range"),
        ({"prompts": 5}, "prompt of the wrong type"),
    ],
    ids=str,
)
def test_what_cannot_be_embedded_is_refused(llm, values, says):
    with pytest.raises(RequestError, match=says):
        llm.embed(**values)


def test_a_prompt_past_the_pool_is_refused_and_one_that_fills_it_is_not(folder):
    small = LLM(folder, device="cpu", max_kv_tokens=64)
    assert small.embed("x" * 64)[0].embedding
    with pytest.raises(RequestError, match="does not fit the KV pool: got 65 tokens, wanted at most 64"):
        small.embed("x" * 65)
