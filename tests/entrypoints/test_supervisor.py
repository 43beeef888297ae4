"""Supervisor as users of AsyncLLM call it, over an engine without tensors that dies when it is told to."""

import asyncio

import pytest

from rapid_llm import AsyncLLM, CheckpointError, EngineDiedError, SamplingParams
from rapid_llm.entrypoints import async_llm
from rapid_llm.entrypoints.supervisor import Supervisor
from tests.engine.fake_process import CRASH
from tests.entrypoints.server.fake_engine import COMMAND
from tests.tiny_model import save_checkpoint, tiny_llama

FEW = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def _fake_engine(monkeypatch):
    monkeypatch.setattr(async_llm, "_COMMAND", COMMAND)


async def until(supervisor, state):
    while supervisor.state != state:
        await asyncio.sleep(0)


async def crash(llm):
    with pytest.raises(EngineDiedError):
        [_ async for _ in llm.generate([5, CRASH], FEW)]


def test_an_engine_that_dies_is_started_again_after_growing_pauses_until_it_has_died_too_often(folder):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    async def scenario():
        llm = AsyncLLM(folder)
        supervisor = Supervisor(llm, max_restarts=3, sleep=sleep)
        running = asyncio.create_task(supervisor.run())
        assert supervisor.state == "starting"
        for _ in range(3):
            await until(supervisor, "ready")
            assert [output async for output in llm.generate("hi", FEW)][-1].finished
            await crash(llm)
            assert supervisor.state == "restarting", "nobody is told that it is ready once it has died"
        await until(supervisor, "ready")
        await crash(llm)
        with pytest.raises(EngineDiedError):
            await running
        assert (supervisor.state, supervisor.num_restarts, pauses) == ("failed", 3, [0.25, 0.5, 1.0])
        await supervisor.close()
        assert supervisor.state == "closed"

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_first_start_that_cannot_be_is_raised_and_not_tried_again():
    async def scenario():
        supervisor = Supervisor(AsyncLLM("/nowhere/at/all"))
        with pytest.raises(CheckpointError, match="nowhere"):
            await supervisor.run()
        assert (supervisor.state, supervisor.num_restarts) == ("failed", 0)
        await supervisor.close()

    asyncio.run(scenario())
