"""POST /v1/responses: a chat in OpenAI's newer form. Nothing is kept."""

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request

from rapid_llm.engine.output import RequestOutput
from rapid_llm.entrypoints.protocol import responses as protocol
from rapid_llm.entrypoints.protocol.response_items import ReasoningItem
from rapid_llm.entrypoints.server.bodies import read_for_model
from rapid_llm.entrypoints.server.chat_plan import ChatPlan, plan_chat
from rapid_llm.entrypoints.server.exchange import Exchange, event
from rapid_llm.entrypoints.server.naming import Naming
from rapid_llm.entrypoints.server.output_items import OutputItems
from rapid_llm.entrypoints.server.refusals import detail_of
from rapid_llm.errors import RapidError

if TYPE_CHECKING:
    from rapid_llm.engine.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


async def responses(request: Request) -> Exchange:
    """Answer a conversation."""
    serving, ask, llm = await read_for_model(request, protocol.ResponsesRequest)
    frontend = await llm.frontend()
    plan = await plan_chat(ask.for_chat(), frontend, serving.config.tool_format, "text")
    writer = ResponseWriter(ask, plan, Naming.of(request, serving, "resp", ask.ignored), frontend.tokenizer)
    renamed = {**plan.renamed, "": "input", "prompt": "input", "messages": "input"}
    streams = [llm.chat(plan.messages, plan.params, plan.tools)]
    return Exchange(serving, streams, 1, writer, is_stream=bool(ask.stream), renamed=renamed)


class ResponseWriter:
    """An answer as a response."""

    def __init__(self, ask: protocol.ResponsesRequest, plan: ChatPlan, naming: Naming, tokenizer: "Tokenizer") -> None:
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
            "tools": ask.tools or [],
            "tool_choice": ask.tool_choice or ("auto" if ask.tools else "none"),
            "parallel_tool_calls": ask.parallel_tool_calls is not False and bool(ask.tools),
        }
        self._numbers = count()
        self._tokenizer = tokenizer
        self._items = OutputItems(plan.parser(), plan.most_calls, self._event)

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The body of an answer that is sent at once."""
        [answer] = outputs[0].outputs
        self._items.take(answer.text)
        self._items.finish(answer)
        return _encode(self._response(outputs[0]))

    def begin(self) -> bytes:
        """The response, empty."""
        empty = protocol.Response(status="in_progress", output=[], **self._settings)
        return self._event("response.created", response=empty) + self._event("response.in_progress", response=empty)

    def piece(self, place: int, output: RequestOutput) -> bytes:
        """What is new of the text."""
        return self._items.take(output.outputs[0].delta)

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The last item and the response as they are in the end."""
        told = self._items.finish(outputs[0].outputs[0])
        response = self._response(outputs[0])
        return told + self._event(f"response.{response.status}", response=response)

    def failure(self, error: RapidError) -> bytes:
        """An error event."""
        detail = detail_of(error)
        return self._event("error", code=detail.code, message=detail.message, param=detail.param)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event(_encode(protocol.ResponseEvent(type=kind, sequence_number=next(self._numbers), **fields)), kind)

    def _response(self, output: RequestOutput) -> protocol.Response:
        answer, prompt = output.outputs[0], len(output.prompt_token_ids)
        is_cut = answer.finish_reason == "length"
        usage = protocol.ResponseUsage(
            prompt,
            protocol.InputTokensDetails(output.num_cached_tokens),
            len(answer.token_ids),
            protocol.OutputTokensDetails(self._reasoning_tokens()),
            prompt + len(answer.token_ids),
        )
        return protocol.Response(
            status="incomplete" if is_cut else "completed",
            output=self._items.items,
            incomplete_details=protocol.IncompleteDetails() if is_cut else None,
            usage=usage,
            **self._settings,
        )

    def _reasoning_tokens(self) -> int:
        texts = [item.content[0].text for item in self._items.items if isinstance(item, ReasoningItem)]
        return sum(len(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts)
