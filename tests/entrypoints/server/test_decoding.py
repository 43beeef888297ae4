"""Whatever bytes come, they are a request or a refusal that says what is wrong, never another error."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid_llm import RequestError
from rapid_llm.entrypoints.protocol.chat import ChatRequest
from rapid_llm.entrypoints.protocol.completions import CompletionRequest
from rapid_llm.entrypoints.protocol.decoding import decode
from rapid_llm.entrypoints.protocol.responses import ResponsesRequest

KINDS = st.sampled_from([ChatRequest, CompletionRequest, ResponsesRequest])
NAMES = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *ResponsesRequest.__struct_fields__})
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)


@given(kind=KINDS, body=st.binary(max_size=60))
def test_any_bytes(kind, body):
    with contextlib.suppress(RequestError):
        decode(body, kind)


@given(kind=KINDS, values=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), JSON, max_size=6))
def test_any_fields(kind, values):
    refused = []
    try:
        decode(json.dumps(values).encode(), kind)
    except RequestError as error:
        refused.append(error)
    assert refused or set(values) <= set(kind.__struct_fields__)
    for error in refused:
        assert str(error).endswith(".")
        assert error.code in ("invalid_value", "invalid_type", "unknown_parameter", "missing_required_parameter")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"messages": [], "stream_options": {"every": 1}}', "stream_options.every"),
        ('{"messages": [], "a`b": 1}', "a`b"),
        ('{"messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
        ('{"messages": [{"content": "x"}]}', "messages[0].role"),
        ('{"temperature": 0}', "messages"),
    ],
)
def test_the_field_that_is_wrong_is_named_by_its_place(body, param):
    with pytest.raises(RequestError) as raised:
        decode(body.encode(), ChatRequest)
    assert raised.value.param == param
