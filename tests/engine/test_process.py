"""Two processes: every request gets its own ids; whoever dies, the other knows and nobody is left behind or left waiting."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys

import msgspec
import pytest

from rapid_llm.config import EngineConfig
from rapid_llm.engine.client import EngineClient, _Connection
from rapid_llm.engine.messages import (
    Abort,
    Add,
    AskStats,
    Failed,
    FrameBuffer,
    FromEngine,
    Hello,
    Outputs,
    Progress,
    Ready,
    Shutdown,
    Start,
    Stats,
    check_version,
    pack,
    unpack,
    version,
)
from rapid_llm.engine.request import TokenRules
from rapid_llm.errors import ConfigError, EngineDiedError, ProtocolError, RequestError
from tests.engine.fake_process import CRASH, HANG, LIMITS, REFUSE, command
from tests.engine.fake_worker import continuation

SEEN_WITHIN_S = 2.0


class Reader:
    """Follows one request, as a Listener."""

    def __init__(self):
        self.ids, self.reason = [], None
        self.begun = asyncio.get_running_loop().create_future()
        self.end = asyncio.get_running_loop().create_future()

    def take(self, output):
        self.ids += [output.token.token_id] if output.token else []
        self.reason = output.finish_reason
        if not self.begun.done():
            self.begun.set_result(None)
        if self.reason is not None:
            self.end.set_result(None)
        return False

    def fail(self, error):
        for future in (self.begun, self.end):
            if not future.done():
                future.set_exception(error)
                future.exception()


async def started(kind="plain", path="", reports=None):
    client = EngineClient(command(kind), Start(EngineConfig(), path), (reports if reports is not None else []).append)
    await client.start()
    return client


def add(client, prompt, count, seed=0):
    reader = Reader()
    return client.add(list(prompt), TokenRules(count, seed=seed), reader), reader


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 60))


def test_each_request_gets_its_own_ids_and_the_pool_is_empty_afterwards():
    async def scenario():
        reports = []
        client = await started(reports=reports)
        ready = await client.ready()
        assert ready.limits == LIMITS
        assert "weights" in [phase.name for phase in ready.phases]
        assert reports == [Progress("weights", 0, 0), Progress("weights", 3, 4), Progress("explain kernels", 0, 0)]
        readers = [add(client, range(i, i + 5), 10 + i, seed=i)[1] for i in range(90)]
        await asyncio.gather(*(reader.end for reader in readers))
        for i, reader in enumerate(readers):
            assert (reader.ids, reader.reason) == continuation(range(i, i + 5), 10 + i, seed=i)
        stats = await client.stats()
        assert (stats.waiting, stats.running, stats.used_pages, stats.num_pages) == (0, 0, 0, LIMITS.num_pages)
        assert stats.num_steps > 0
        assert stats.step_seconds > 0
        assert stats.generated_tokens == sum(range(10, 100))
        await client.close()
        assert client.error.exit_code == 0

    run(scenario())


def test_a_request_that_is_sent_before_the_engine_is_ready_runs_once_it_is():
    async def scenario():
        client = await started()
        _, reader = add(client, [1, 2], 3)
        await reader.end
        assert reader.ids == continuation([1, 2], 3)[0]
        await client.close()

    run(scenario())


def test_a_bad_request_hurts_only_its_sender():
    async def scenario():
        client = await started()
        _, good = add(client, [1], 300)
        _, bad = add(client, [1], LIMITS.max_model_len)
        _, empty = add(client, [], 1)
        for reader in (bad, empty):
            with pytest.raises(RequestError, match=r"longer than the context|empty"):
                await reader.end
        await good.end
        assert good.ids == continuation([1], 300)[0]
        await client.close()

    run(scenario())


@pytest.mark.case("I1")
@pytest.mark.case("I16")
def test_an_aborted_request_is_gone_before_the_next_answer_and_its_pages_with_it():
    async def scenario():
        client = await started()
        names, readers = zip(*(add(client, [i], 4000) for i in range(3)), strict=True)
        await readers[2].begun
        assert (await client.stats()).running == 3
        for name in names:
            client.abort(name)
        stats = await client.stats()
        assert (stats.waiting, stats.running, stats.used_pages) == (0, 0, 0)
        length = [len(reader.ids) for reader in readers]
        await client.stats()
        assert [len(reader.ids) for reader in readers] == length
        await client.close()

    run(scenario())


@pytest.mark.parametrize(
    ("prompt", "says"),
    [(CRASH, "RuntimeError: the device is gone"), (REFUSE, "rapid_llm.errors.KernelInputError: swiglu(gate_up [3, 5]).")],
    ids=["any-error", "one-of-ours"],
)
def test_a_step_that_crashes_ends_every_request_with_what_it_said_and_the_next_process_serves(prompt, says):
    async def scenario():
        client = await started("breakable")
        _, other = add(client, [1], 4000)
        await other.begun
        _, fatal = add(client, [prompt, prompt], 1)
        for reader in (other, fatal):
            with pytest.raises(EngineDiedError, match="exit code 1, which said last") as caught:
                await reader.end
            assert caught.value.exit_code == 1
            assert says in caught.value.last_lines
        with pytest.raises(EngineDiedError):
            add(client, [1], 1)
        with pytest.raises(EngineDiedError):
            await client.stats()
        await client.close()
        again = await started("breakable")
        _, reader = add(again, [1], 5)
        await reader.end
        assert reader.ids == continuation([1], 5)[0]
        await again.close()

    run(scenario())


@pytest.mark.parametrize("state", ["idle", "running", "hanging"])
def test_a_killed_engine_is_seen_at_once(state):
    async def scenario():
        client = await started("breakable")
        await client.ready()
        _, reader = add(client, [1] if state != "hanging" else [HANG, HANG], 4000)
        asked = asyncio.ensure_future(client.stats()) if state == "hanging" else None
        if state == "running":
            await reader.begun
        os.kill(client.process_id, signal.SIGKILL)
        async with asyncio.timeout(SEEN_WITHIN_S):
            for waiting in filter(None, (reader.end, asked)):
                with pytest.raises(EngineDiedError) as caught:
                    await waiting
                assert caught.value.exit_code == -signal.SIGKILL
        await client.close()

    run(scenario())


async def refused(client):
    """Send requests until one is refused: the engine has noticed that it is to end."""
    while True:
        _, reader = add(client, [1], 1)
        try:
            await reader.end
        except RequestError as error:
            return error


@pytest.mark.parametrize("how", ["SIGTERM", "drain"])
def test_a_drain_takes_no_more_requests_and_ends_those_that_run(how):
    async def scenario():
        client = await started()
        _, reader = add(client, [1, 2, 3], 1500)
        await reader.begun
        if how == "drain":
            drained = asyncio.ensure_future(client.drain())
        else:
            os.kill(client.process_id, signal.SIGTERM)
        assert "takes no more requests" in str(await refused(client))
        assert not reader.end.done()
        await reader.end
        assert reader.ids == continuation([1, 2, 3], 1500)[0]
        await (drained if how == "drain" else client.drain())
        assert client.error.exit_code == 0

    run(scenario())


@pytest.mark.parametrize("state", ["running", "hanging"])
def test_a_second_sigterm_ends_the_engine_at_once(state):
    async def scenario():
        client = await started("breakable")
        _, reader = add(client, [1] if state == "running" else [HANG, HANG], 4000)
        if state == "running":
            await reader.begun
            os.kill(client.process_id, signal.SIGTERM)
            await refused(client)
        else:
            await until(lambda: b"hanging" in client._tail)
            os.kill(client.process_id, signal.SIGTERM)
            await until(lambda: not has_handler(client.process_id, signal.SIGTERM))
        os.kill(client.process_id, signal.SIGTERM)
        with pytest.raises(EngineDiedError) as caught:
            await reader.end
        assert caught.value.exit_code == -signal.SIGTERM
        await client.close()

    run(scenario())


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


def has_handler(process_id, number):
    with open(f"/proc/{process_id}/status", encoding="ascii") as status:
        [mask] = [line.split()[1] for line in status if line.startswith("SigCgt")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_sigterm_while_it_loads_ends_it_at_once():
    async def scenario():
        client = await started(path="endless")
        await until(lambda: b"loading" in client._tail)
        os.kill(client.process_id, signal.SIGTERM)
        with pytest.raises(EngineDiedError) as caught:
            await client.ready()
        assert caught.value.exit_code == 0
        await client.close()

    run(scenario())


def test_ctrl_c_is_for_the_client_to_handle():
    async def scenario():
        client = await started()
        await client.ready()
        assert os.getsid(client.process_id) != os.getsid(0)
        os.kill(client.process_id, signal.SIGINT)
        _, reader = add(client, [1], 3)
        await reader.end
        assert reader.ids == continuation([1], 3)[0]
        await client.close()

    run(scenario())


def test_nothing_is_heard_of_a_process_that_was_refused():
    async def scenario():
        heard, refusals = [], []

        def receive(message):
            if isinstance(message, Hello):
                check_version(message.version)
            heard.append(message)

        connection = _Connection(receive, refusals.append)
        for message in (Progress("weights", 0, 0), Hello("0.0.0"), Progress("weights", 3, 4)):
            connection.data_received(pack(message))
        assert heard == [Progress("weights", 0, 0)]
        [refusal] = refusals
        assert "different versions" in str(refusal)

    run(scenario())


@pytest.mark.parametrize(
    ("kind", "path", "error", "says"),
    [
        ("plain", "refused", ConfigError, "this device is not here: got cuda:9"),
        ("plain", "broken", EngineDiedError, "exit code 1.*RuntimeError: out of luck"),
        ("old", "", ConfigError, r"different versions: got 0\.0\.0, wanted"),
        ("garbage", "", ProtocolError, "frame's length is out of range"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_no_process(kind, path, error, says):
    async def scenario():
        client = await started(kind, path)
        with pytest.raises(error, match=says):
            await client.ready()
        with pytest.raises(ProcessLookupError):
            os.kill(client.process_id, 0)
        await client.close()

    run(scenario())


PARENT = """
import asyncio, os, sys
from tests.engine.fake_process import HANG
from tests.engine.test_process import add, started, until
async def main():
    client = await started("breakable", path="endless" if "loading" in sys.argv else "")
    if "loading" not in sys.argv:
        _, reader = add(client, [HANG if "hanging" in sys.argv else 1] * 2, 4000)
        if "running" in sys.argv:
            await reader.begun
    await until(lambda: sys.argv[1] == "running" or sys.argv[1].encode() in client._tail)
    if "fork" in sys.argv and os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
    print(client.process_id, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "arguments",
    [["loading"], ["running"], ["hanging"], ["hanging", "fork"]],
    ids=["loading", "running", "hanging", "a-fork-holds-the-socket"],
)
def test_an_engine_never_outlives_a_client_that_is_killed(arguments):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        engine = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert not ended(engine, 0)
            parent.kill()
            assert ended(engine, SEEN_WITHIN_S)
        finally:
            os.close(engine)
            parent.kill()


def ended(process, timeout_s):
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


class Wire:
    """The other end of a process's socket, without a client."""

    def __init__(self, kind):
        ours, theirs = socket.socketpair()
        arguments = [*command(kind), str(theirs.fileno())]
        self.process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
        theirs.close()
        self.socket, self.frames, self.bodies = ours, FrameBuffer(), []

    def send(self, *messages):
        self.socket.sendall(b"".join(map(pack, messages)))

    def receive(self):
        while not self.bodies:
            data = self.socket.recv(2**16)
            assert data, "the engine closed the socket"
            self.bodies += self.frames.feed(data)
        return unpack(self.bodies.pop(0), msgspec.msgpack.Decoder(FromEngine))

    def wait_for(self, kind):
        while not isinstance(message := self.receive(), kind):
            pass
        return message

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        self.process.stdout.close()
        self.process.wait(10)


STARTED = (Hello(version()), Start(EngineConfig(), ""))


@pytest.mark.parametrize(
    ("said", "kind", "says"),
    [
        (pack(Hello("0.0.1")), "ConfigError", "different versions"),
        (pack(Abort("x")), "ProtocolError", "cannot be read"),
        (b"".join(map(pack, STARTED)) + b"\xff\xff\xff\xff", "ProtocolError", "length is out of range"),
        (b"".join(map(pack, STARTED)) + b"\x01\x00\x00\x00\xc1", "ProtocolError", "cannot be read"),
        (b"".join(map(pack, STARTED)) + pack(Hello(version())), "ProtocolError", "cannot be read"),
    ],
    ids=["another-version", "no-hello", "a-wild-length", "no-msgpack", "a-message-out-of-place"],
)
def test_a_client_that_says_what_is_no_message_is_told_so_and_the_process_ends(said, kind, says):
    with Wire("plain") as wire:
        wire.socket.sendall(said)
        fault = wire.wait_for(Failed).fault
        assert fault.kind == kind
        assert says in fault.problem
        assert wire.process.wait(10) in (1, 2)


def test_a_client_that_does_not_read_never_holds_up_a_step():
    with Wire("counting") as wire:
        wire.send(*STARTED, *(Add(str(i), [i % 90], TokenRules(400, seed=i)) for i in range(64)))
        assert wire.process.stdout.readline() == b"200 steps\n"  # far more than the socket holds, and nothing has been read
        wire.wait_for(Ready)
        ids = {str(i): [] for i in range(64)}
        while any(len(its) < 400 for its in ids.values()):
            for output in wire.wait_for(Outputs).outputs:
                ids[output.request_id].append(output.token.token_id)
        for i in range(64):
            assert ids[str(i)] == continuation([i % 90], 400, seed=i)[0]
        wire.send(AskStats(), Shutdown())
        assert wire.wait_for(Stats).used_pages == 0
        assert wire.process.wait(10) == 0
