"""AsyncLLM as its users call it, over a tiny random checkpoint: the engine is a real process."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from rapid_llm import LLM, AsyncLLM, CheckpointError, ConfigError, EngineDiedError, RequestError, SamplingParams
from tests.tiny_model import save_checkpoint, tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
OPTIONS = {"max_kv_tokens": 1024, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder):
    return LLM(str(folder), **OPTIONS)


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield lambda scenario: runner.run(asyncio.wait_for(scenario, 120))


@pytest.fixture(scope="module")
def llm(folder, loop):
    llm = AsyncLLM(str(folder), **OPTIONS)
    loop(llm.__aenter__())
    yield llm
    loop(llm.close())


async def last(stream):
    async for output in stream:
        end = output
    return end


async def assert_idle(llm):
    stats = await llm.stats()
    assert (stats.waiting, stats.running, stats.used_pages) == (0, 0, 0)
    assert not llm._open


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=20),
        SamplingParams(temperature=0.0, max_tokens=8, logprobs=3),
        SamplingParams(temperature=1.0, seed=3, max_tokens=60, stop=["a", "e", "1"]),
        SamplingParams(temperature=1.0, seed=4, max_tokens=30, n=3, stop=["b"], prompt_logprobs=1),
        SamplingParams(temperature=0.8, seed=5, max_tokens=20, repetition_penalty=1.3, logit_bias={7: -100}, bad_words=["ab"]),
    ],
    ids=["greedy", "drawn", "logprobs", "stop-strings", "several", "adjusted"],
)
def test_text_ids_and_logprobs_are_those_of_llm(llm, expected, loop, params):
    def without_delta(output):
        return [replace(answer, delta="") for answer in output.outputs]

    async def compare():
        ours, theirs = await last(llm.generate("hello ✓", params)), expected.generate("hello ✓", params)[0]
        assert without_delta(ours) == without_delta(theirs)
        assert (ours.prompt, ours.prompt_token_ids, ours.finished) == (theirs.prompt, theirs.prompt_token_ids, True)
        await assert_idle(llm)

    loop(compare())


def test_chat_goes_through_the_template(llm, expected, loop):
    messages = [{"role": "user", "content": "hi"}]
    [theirs] = expected.chat(messages, GREEDY)
    ours = loop(last(llm.chat(messages, GREEDY)))
    assert (ours.prompt, ours.outputs[0].token_ids) == (theirs.prompt, theirs.outputs[0].token_ids)


def test_the_deltas_add_up_to_the_text_and_no_state_changes_once_it_is_read(llm, loop):
    async def scenario():
        states = [output async for output in llm.generate("tell me ✓", GREEDY)]
        text = ""
        for state in states:
            text += state.outputs[0].delta
            assert state.outputs[0].text == text
        lengths = [len(state.outputs[0].token_ids) for state in states]
        assert lengths == sorted(set(lengths))
        assert [state.finished for state in states] == [False] * (len(states) - 1) + [True]

    loop(scenario())


def test_the_ledger_holds_what_both_processes_did_until_the_first_output(llm, loop):
    loop(last(llm.generate("hello", GREEDY)))
    of_engine = {phase.name for phase in llm.ledger.phases if phase.thread == "engine"}
    assert {"interpreter and command line", "import torch", "weights", "KV pool"} <= of_engine
    assert {"find model", "start engine process", "tokenizer"} <= {phase.name for phase in llm.ledger.phases} - of_engine
    assert all(0 <= phase.start <= phase.end <= llm.ledger.first_token for phase in llm.ledger.phases)


def test_once_ready_it_knows_what_serves_each_op_and_why(llm, loop):
    loop(llm.ready())
    served = {kernel.op: kernel for kernel in llm.kernels}
    assert {"dense_gemm", "rms_norm", "flash_decoding", "sample", "update_kv_index"} <= set(served)
    assert all(kernel.row and kernel.because and kernel.evidence and kernel.others for kernel in llm.kernels)
    assert served["rms_norm"].sizes == {"d": 64}


def test_a_slow_reader_gets_everything_in_fewer_pieces_and_holds_nobody_up(llm, expected, loop):
    async def scenario():
        slow = llm.generate("slow", GREEDY)
        pieces = [await anext(slow)]
        await last(llm.generate("fast", GREEDY))  # a whole answer of another, and then until the slow one's is complete too
        while (await llm.stats()).running:
            pass
        pieces += [piece async for piece in slow]
        assert len(pieces) <= 2  # one where the answer was complete when its first piece was read
        [theirs] = expected.generate("slow", GREEDY)
        assert pieces[-1].finished
        assert "".join(piece.outputs[0].delta for piece in pieces) == theirs.outputs[0].text
        assert pieces[-1].outputs[0].token_ids == theirs.outputs[0].token_ids

    loop(scenario())


def test_two_hundred_streams_at_once_lose_nothing(llm, expected, loop):
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=4 + i % 9, ignore_eos=True) for i in range(200)]
    prompts = [f"prompt {i}" for i in range(200)]

    async def scenario():
        streams = [llm.generate(prompt, its) for prompt, its in zip(prompts, params, strict=True)]
        outputs = await asyncio.gather(*map(last, streams))
        await assert_idle(llm)
        return outputs

    theirs = expected.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in loop(scenario())] == [output.outputs[0].token_ids for output in theirs]


@pytest.mark.case("I1")
@pytest.mark.parametrize("how", ["cancel", "break", "aclose"])
def test_whoever_stops_reading_ends_the_request(llm, loop, how):
    async def read(stream, begun):
        async for _ in stream:
            begun.set()
            if how == "break":
                return

    async def scenario():
        begun, stream = asyncio.Event(), llm.generate("hello", ENDLESS)
        task = asyncio.create_task(read(stream, begun))
        await begun.wait()
        assert how == "break" or (await llm.stats()).running == 1
        if how == "cancel":
            task.cancel()
        elif how == "aclose":
            task.cancel()
            await asyncio.wait({task})
            await stream.aclose()
        await asyncio.wait({task})
        del stream, task
        for _ in range(2):  # in which a loop closes a generator that nobody holds: it makes a task, and the task runs
            await asyncio.sleep(0)
        await assert_idle(llm)

    loop(scenario())


@pytest.mark.case("I1")
@pytest.mark.parametrize("when", ["running", "waiting", "encoding"])
def test_abort_by_name_ends_the_stream_with_that_reason(llm, loop, when):
    async def scenario():
        others = [llm.generate("other", ENDLESS) for _ in range(OPTIONS["max_num_seqs"] if when == "waiting" else 0)]
        await asyncio.gather(*map(anext, others))
        stream = llm.generate("hello", ENDLESS, request_id="mine")
        next_item = asyncio.ensure_future(anext(stream))
        while "mine" not in llm._open or (when != "encoding" and llm._open["mine"]._sent_as is None):
            await asyncio.sleep(0)
        if when == "running":
            await next_item
            next_item = asyncio.ensure_future(anext(stream))
            await next_item
            next_item = None
        llm.abort("mine")
        end = await last(stream) if next_item is None else await next_item
        assert (end.request_id, end.finished, end.outputs[0].finish_reason) == ("mine", True, "abort")
        llm.abort("mine")
        llm.abort("nobody")
        for other in others:
            await other.aclose()
        await stream.aclose()
        await assert_idle(llm)

    loop(scenario())


@pytest.mark.parametrize("how", ["aborted", "several", "to-the-end"])
def test_whatever_ends_a_stream_it_tells_what_the_prefix_cache_spared(llm, loop, how):
    async def scenario():
        prompt = f"{how:>14}, and forty tokens in all"
        await last(llm.generate(prompt, GREEDY))
        params = replace(ENDLESS, n=3 if how == "several" else 1, max_tokens=200 if how == "aborted" else 4)
        async for output in llm.generate(prompt, params, request_id="again"):
            assert output.num_cached_tokens == 32
            if how == "aborted":
                llm.abort("again")
        assert output.outputs[0].finish_reason == ("abort" if how == "aborted" else "length")
        first = await last(llm.generate(f"{how} was never said: {how}", replace(params, max_tokens=1)))
        assert first.num_cached_tokens == 0, "its other answers find what the first has computed"

    loop(scenario())


def test_what_is_refused_hurts_only_its_sender(llm, expected, loop):
    async def scenario():
        good = asyncio.ensure_future(last(llm.generate("hello", GREEDY)))
        for prompt, params, says in (
            ("", GREEDY, "prompt is empty"),
            ([10**6], GREEDY, "out of the vocabulary"),
            (b"bytes", GREEDY, "wrong type"),
            ("x" * 300, GREEDY, "longer than the context"),
        ):
            with pytest.raises(RequestError, match=says):
                await last(llm.generate(prompt, params))
        with pytest.raises(RequestError):
            await last(llm.chat("no messages"))
        assert (await good).outputs[0].text == expected.generate("hello", GREEDY)[0].outputs[0].text
        stream = llm.generate("hello", ENDLESS, request_id="twice")
        await anext(stream)
        with pytest.raises(RequestError, match="'twice' is in use"):
            await anext(llm.generate("hello", GREEDY, request_id="twice"))
        await stream.aclose()
        await assert_idle(llm)

    loop(scenario())


def test_a_killed_engine_ends_every_stream_with_an_error_and_a_restart_serves_again(folder, expected, loop):
    async def scenario():
        async with AsyncLLM(str(folder), **OPTIONS) as llm:
            streams = [llm.generate(f"prompt {i}", ENDLESS) for i in range(5)]
            await asyncio.gather(*map(anext, streams))
            os.kill(llm.process_id, signal.SIGKILL)
            for end in await asyncio.gather(*map(last, streams), return_exceptions=True):
                assert isinstance(end, EngineDiedError)
                assert end.exit_code == -signal.SIGKILL
            with pytest.raises(EngineDiedError):
                await last(llm.generate("hello", GREEDY))
            await llm.restart()
            again = await last(llm.generate("hello", GREEDY))
            assert again.outputs[0].text == expected.generate("hello", GREEDY)[0].outputs[0].text
            await assert_idle(llm)
            running = asyncio.ensure_future(last(llm.generate("hello", ENDLESS)))
            while not (await llm.stats()).running:
                pass
            await llm.drain()
            assert (await running).outputs[0].finish_reason == "length"

    loop(scenario())


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"model": "/nowhere/at/all"}, CheckpointError, "nowhere"),
        ({"max_model_len": 10**6}, ConfigError, "max_model_len is too long: got 1000000"),
    ],
)
def test_a_start_that_cannot_be_raises_as_llm_does(folder, loop, options, error, says):
    async def scenario():
        async with AsyncLLM(**{"model": str(folder), **options}):
            pass

    with pytest.raises(error, match=says):
        loop(scenario())


def test_an_unknown_setting_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="max_num_seqs"):
        AsyncLLM(max_num_seq=1)


CLIENT = """
import asyncio, sys
from rapid_llm import AsyncLLM, SamplingParams
async def main():
    async with AsyncLLM(sys.argv[1], max_kv_tokens=512) as llm:
        async for output in llm.generate("hello", SamplingParams(max_tokens=4)):
            pass
        assert output.finished
        await llm.stats()
    print(sorted({"torch", "triton"} & set(sys.modules)))
asyncio.run(main())
"""


def test_the_client_never_imports_torch(folder):
    done = subprocess.run([sys.executable, "-c", CLIENT, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
