"""A chat template that knows tools and reasoning, tools to call, and what a model writes that calls them."""

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "<|assistant|>{% if 'THINK' in messages[-1].content %}<think>\n{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Now.", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop"}},
]
STOP = {"type": "function", "function": {"name": "stop"}}
OSLO = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HALT = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
BOTH = f"{OSLO}\n{HALT}"
CALLS = [("get_weather", {"city": "Oslo"}), ("stop", {})]


def user(text):
    """A conversation of one turn."""
    return [{"role": "user", "content": text}]
