"""POST /v1/responses."""

from collections.abc import Sequence
from itertools import count
from typing import Any
from uuid import uuid4

import msgspec
from starlette.requests import Request

from rapid_llm.engine.output import RequestOutput
from rapid_llm.entrypoints.protocol import responses as protocol
from rapid_llm.entrypoints.protocol.fields import field_values, sampling_params
from rapid_llm.entrypoints.protocol.formats import format_grammar
from rapid_llm.entrypoints.server.bodies import read_for_model
from rapid_llm.entrypoints.server.exchange import Exchange, event
from rapid_llm.entrypoints.server.naming import Naming
from rapid_llm.entrypoints.server.refusals import detail_of
from rapid_llm.errors import RapidError

_encode = msgspec.json.Encoder().encode


async def responses(request: Request) -> Exchange:
    """Answer a conversation."""
    serving, ask, llm = await read_for_model(request, protocol.ResponsesRequest)
    frontend = await llm.frontend()
    grammar = format_grammar(None if ask.text is None else ask.text.format, ask.grammar, "text")
    params = sampling_params(field_values(ask), frontend.default_chat_params(), max_tokens=ask.max_output_tokens, **grammar)
    writer = ResponseWriter(ask, Naming.of(request, serving, "resp", ask.ignored))
    renamed = {"": "input", "prompt": "input", **({} if ask.grammar else {"grammar": "text"})}
    return Exchange(serving, [llm.chat(ask.messages(), params)], 1, writer, is_stream=bool(ask.stream), renamed=renamed)


class ResponseWriter:
    """An answer as a response with one message."""

    def __init__(self, ask: protocol.ResponsesRequest, naming: Naming) -> None:
        fields = naming.fields
        self._settings: dict[str, Any] = {
            "id": fields["id"],
            "created_at": fields["created"],
            "model": fields["model"],
            "instructions": ask.instructions,
            "max_output_tokens": ask.max_output_tokens,
            "metadata": ask.metadata,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
        }
        self._item_id = f"msg-{uuid4().hex}"
        self._numbers = count()

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The body of an answer that is sent at once."""
        return _encode(self._response(outputs[0]))

    def begin(self) -> bytes:
        """The response, its message and the message's text, all of them empty."""
        place = {"output_index": 0}
        empty = protocol.Response(status="in_progress", output=[], **self._settings)
        return (
            self._event("response.created", response=empty)
            + self._event("response.in_progress", response=empty)
            + self._event("response.output_item.added", item=self._message("in_progress", []), **place)
            + self._event("response.content_part.added", part=protocol.OutputText(text=""), **self._place)
        )

    def piece(self, place: int, output: RequestOutput) -> bytes:
        """What is new of the text."""
        delta = output.outputs[0].delta
        return self._event("response.output_text.delta", delta=delta, logprobs=[], **self._place) if delta else b""

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Text, message and response as they are in the end."""
        response = self._response(outputs[0])
        [message] = response.output
        [part] = message.content
        return (
            self._event("response.output_text.done", text=part.text, logprobs=[], **self._place)
            + self._event("response.content_part.done", part=part, **self._place)
            + self._event("response.output_item.done", item=message, output_index=0)
            + self._event(f"response.{response.status}", response=response)
        )

    def failure(self, error: RapidError) -> bytes:
        """An error event."""
        detail = detail_of(error)
        return self._event("error", code=detail.code, message=detail.message, param=detail.param)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event(_encode(protocol.ResponseEvent(type=kind, sequence_number=next(self._numbers), **fields)), kind)

    def _message(self, status: str, content: list[protocol.OutputText]) -> protocol.OutputMessage:
        return protocol.OutputMessage(id=self._item_id, status=status, content=content)

    def _response(self, output: RequestOutput) -> protocol.Response:
        answer, prompt = output.outputs[0], len(output.prompt_token_ids)
        is_cut = answer.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        usage = protocol.ResponseUsage(
            prompt,
            protocol.InputTokensDetails(output.num_cached_tokens),
            len(answer.token_ids),
            protocol.OutputTokensDetails(),
            prompt + len(answer.token_ids),
        )
        return protocol.Response(
            status=status,
            output=[self._message(status, [protocol.OutputText(text=answer.text)])],
            incomplete_details=protocol.IncompleteDetails() if is_cut else None,
            usage=usage,
            **self._settings,
        )
