"""What a chat request asks for, put together: sampling values, tools, a grammar, and how the answer's text is read."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rapid_llm.config import SamplingParams
from rapid_llm.entrypoints.protocol.chat import ChatRequest
from rapid_llm.entrypoints.protocol.fields import field_values, sampling_params
from rapid_llm.entrypoints.protocol.formats import format_grammar
from rapid_llm.entrypoints.tools.choice import behind_reasoning, plan_tools
from rapid_llm.entrypoints.tools.events import Parser
from rapid_llm.entrypoints.tools.formats import tool_format
from rapid_llm.entrypoints.tools.reasoning import CLOSE, begins_inside, marks_reasoning
from rapid_llm.errors import RequestError

if TYPE_CHECKING:
    from rapid_llm.engine.frontend import Frontend


@dataclass(frozen=True)
class ChatPlan:
    """How a chat request is served.

    Attributes:
        messages: the conversation, as chat templates read it.
        params: how the answers are drawn.
        tools: what the template shows.
        parser: makes the reader of one answer; None where all of it is content.
        most_calls: calls that are told; None tells all.
        renamed: what fields that Python's errors name are called in this request.
    """

    messages: list[dict[str, Any]]
    params: SamplingParams
    tools: Sequence[Mapping[str, Any]] | None
    parser: Callable[[], Parser | None]
    most_calls: int | None
    renamed: Mapping[str, str]


async def plan_chat(
    ask: ChatRequest, frontend: "Frontend", format_setting: str | None, format_name: str = "response_format"
) -> ChatPlan:
    """Put it together.

    Args:
        ask: the request.
        frontend: the model's.
        format_setting: the server's tool_format.
        format_name: what the request calls its response format.

    Raises: RequestError when something cannot be used, or two fields contradict each other.
    """
    tokenizer = frontend.tokenizer
    template = tokenizer.chat_template
    if ask.parallel_tool_calls is not None and ask.tools is None:
        problem, change = "parallel_tool_calls needs tools", "send tools, or leave parallel_tool_calls out"
        raise RequestError(problem, param="parallel_tool_calls", wanted="tools with it", change=change)
    parallel = ask.parallel_tool_calls is not False
    tools = plan_tools(ask.tools, ask.tool_choice, tool_format(template, format_setting), parallel=parallel)
    messages = [message.for_template() for message in ask.messages]
    reasons, inside = marks_reasoning(template), False
    if reasons:
        inside = begins_inside(await asyncio.to_thread(frontend.render_chat, messages, tools.shown))
    params, source = _params(ask, frontend.default_chat_params(), format_name), "grammar" if ask.grammar else format_name
    if params.grammar is not None and inside:
        params = params.with_defaults(grammar=behind_reasoning(params.grammar, tokenizer))
    if tools.callable and params.grammar is not None:
        problem, change = f"{source} and tools contradict each other", 'send one of them, or tool_choice "none"'
        raise RequestError(problem, param=source, got=f"{len(tools.callable)} tools that may be called", change=change)
    if tools.must_call:
        params, source = params.with_defaults(grammar=tools.grammar(tokenizer, inside=inside)), "tools"
    if tools.keeps_special_tokens or (reasons and tokenizer.special_id(CLOSE) is not None):
        params = params.with_defaults(skip_special_tokens=False)
    return ChatPlan(
        messages,
        params,
        tools.shown,
        lambda: tools.parser(reasons=reasons, inside=inside),
        None if parallel else 1,
        {"": "messages", "prompt": "messages", "grammar": source},
    )


def _params(ask: ChatRequest, defaults: SamplingParams, format_name: str) -> SamplingParams:
    if ask.top_logprobs is not None and not ask.logprobs:
        wanted, change = "logprobs true with it", "set logprobs, or leave top_logprobs out"
        raise RequestError(
            "top_logprobs has no effect alone", param="top_logprobs", got=str(ask.top_logprobs), wanted=wanted, change=change
        )
    fields = field_values(ask)
    if ask.max_completion_tokens is not None:
        if ask.max_tokens not in (None, ask.max_completion_tokens):
            problem, change = "max_tokens and max_completion_tokens contradict each other", "send one of them"
            got = f"{ask.max_tokens} and {ask.max_completion_tokens}"
            raise RequestError(problem, param="max_tokens", got=got, change=change)
        fields["max_tokens"] = ask.max_completion_tokens
    more = format_grammar(ask.response_format, ask.grammar, format_name)
    return sampling_params(fields, defaults, logprobs=(ask.top_logprobs or 0) if ask.logprobs else None, **more)
