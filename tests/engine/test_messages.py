"""Messages survive the way, whatever is in them and however the bytes are cut; what is no message is refused."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid_llm.config import EngineConfig, Grammar, ResolvedConfig
from rapid_llm.engine.messages import (
    MAX_FRAME,
    Abort,
    Add,
    AskStats,
    Drain,
    Draining,
    Failed,
    Fault,
    FrameBuffer,
    FromClient,
    FromEngine,
    Hello,
    Outputs,
    Progress,
    Ready,
    Refused,
    Shutdown,
    Start,
    Stats,
    check_version,
    pack,
    unpack,
    version,
)
from rapid_llm.engine.request import TokenOutput, TokenRules
from rapid_llm.errors import CheckpointError, ConfigError, NoKernelError, ProtocolError, RequestError
from rapid_llm.kernels.dispatcher.served_kernel import OtherRow, ServedKernel
from rapid_llm.ledger import Phase
from rapid_llm.step import SampledToken

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDS = st.integers(0, 2**31 - 1)
COUNTS = st.integers(0, 2**40)
FLOATS = st.floats(allow_nan=False)
FAULTS = st.builds(Fault, TEXT, TEXT, TEXT, TEXT, TEXT)
RULES = st.builds(
    TokenRules,
    max_new_tokens=IDS,
    end_ids=st.frozensets(IDS),
    stop_ids=st.frozensets(IDS),
    temperature=FLOATS,
    top_k=IDS,
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.integers(-1, 20),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(["regex", "lark"]), TEXT.filter(len)),
)
TOKENS = st.builds(SampledToken, IDS, st.lists(IDS).map(tuple), st.lists(FLOATS).map(tuple))
REASONS = st.sampled_from([None, "stop", "length", "abort", "error"])
OUTPUTS = st.builds(TokenOutput, TEXT, st.none() | TOKENS, REASONS, st.none() | IDS)
CONFIGS = st.builds(EngineConfig, model=st.none() | TEXT, max_model_len=st.none() | st.integers(1, 2**31), offline=st.booleans())
KERNELS = st.builds(
    ServedKernel,
    *[TEXT] * 3,
    st.dictionaries(TEXT, COUNTS, max_size=2),
    *[TEXT] * 4,
    st.lists(st.tuples(COUNTS, TEXT), max_size=2),
    st.lists(st.builds(OtherRow, TEXT, st.lists(TEXT, max_size=2)), max_size=2),
)
MESSAGES = st.one_of(
    st.builds(Hello, TEXT),
    st.builds(Start, CONFIGS, TEXT),
    st.builds(Add, TEXT, st.lists(IDS), RULES),
    st.builds(Abort, TEXT),
    st.sampled_from([AskStats(), Drain(), Shutdown(), Draining()]),
    st.builds(Progress, TEXT, COUNTS, COUNTS),
    st.builds(
        Ready,
        st.builds(ResolvedConfig, COUNTS, COUNTS, COUNTS, COUNTS),
        FLOATS,
        st.lists(st.builds(Phase, TEXT, FLOATS, FLOATS, TEXT), max_size=3),
        st.lists(TEXT, max_size=3),
        st.lists(KERNELS, max_size=2),
    ),
    st.builds(Outputs, st.lists(OUTPUTS, max_size=4)),
    st.builds(Refused, TEXT, FAULTS, TEXT, TEXT),
    st.builds(Failed, FAULTS),
    st.builds(Stats, *[COUNTS] * 5, FLOATS, st.lists(COUNTS, max_size=3), FLOATS, *[COUNTS] * 5),
)
ANY = msgspec.msgpack.Decoder(FromClient | Start | FromEngine)


@given(messages=st.lists(MESSAGES, max_size=5), cuts=st.lists(st.integers(1, 50), min_size=1))
def test_messages_come_out_as_they_went_in_however_the_bytes_are_cut(messages, cuts):
    data, frames, received, turn = b"".join(map(pack, messages)), FrameBuffer(), [], 0
    while data:
        size = cuts[turn % len(cuts)]
        received += [unpack(body, ANY) for body in frames.feed(data[:size])]
        data, turn = data[size:], turn + 1
    assert received == messages


@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_message_raise_nothing_but_a_protocol_error(data):
    with contextlib.suppress(ProtocolError):
        for body in FrameBuffer().feed(data):
            unpack(body, ANY)


@pytest.mark.parametrize("length", [0, MAX_FRAME + 1, 2**32 - 1])
def test_a_length_that_no_message_has_is_refused_before_its_bytes_are_waited_for(length):
    with pytest.raises(ProtocolError, match="out of range"):
        list(FrameBuffer().feed(length.to_bytes(4, "little")))


@pytest.mark.parametrize(
    "body",
    [b"\xc1", pack(Draining())[4:], b"\x92\xa5abort\x01", b"\x91\xa5abort", b"\x93\xa5abort\xa1x\x01"],
    ids=["no-msgpack", "of-the-other-side", "wrong-type", "a-field-short", "a-field-over"],
)
def test_what_a_client_may_not_say_is_refused(body):
    with pytest.raises(ProtocolError, match="cannot be read"):
        unpack(body, msgspec.msgpack.Decoder(FromClient))


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, NoKernelError, RequestError])
def test_an_error_arrives_as_it_was_raised(kind):
    error = kind("a problem", got="this", wanted="that", change="do it")
    arrived = unpack(pack(Failed(Fault.of(error)))[4:], ANY).fault.error()
    assert type(arrived) is kind
    assert str(arrived) == str(error)


def test_a_refusal_arrives_with_its_field_and_code():
    error = RequestError("a problem", param="grammar", code="invalid", got="this", wanted="that", change="do it")
    arrived = unpack(pack(Refused.of("a", error))[4:], ANY).error()
    assert (str(arrived), arrived.param, arrived.code) == (str(error), "grammar", "invalid")


def test_hello_and_failed_keep_their_form_for_ever():
    assert pack(Hello("v")) == b"\x09\x00\x00\x00\x92\xa5hello\xa1v"
    assert pack(Failed(Fault("K", "p", "g", "w", "c"))) == b"\x13\x00\x00\x00\x92\xa6failed\x95\xa1K\xa1p\xa1g\xa1w\xa1c"


def test_a_peer_of_another_version_is_refused_with_both_versions():
    check_version(version())
    with pytest.raises(ConfigError, match=rf"got 0\.0\.1-abc, wanted {version()}; restart"):
        check_version("0.0.1-abc")
