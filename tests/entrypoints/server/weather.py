"""A chat template that knows tools and reasoning, tools to call, what a model writes that calls them, and a server of it all."""

import json
from contextlib import contextmanager

from tests.entrypoints.server.scripted_serve import COMMAND
from tests.entrypoints.server.serve import Server
from tests.tiny_model import save_checkpoint, tiny_llama

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


@contextmanager
def weather_server(folder):
    """A server, ready, whose model says what it is told to under this template; its checkpoint lies in ``folder``."""
    model = save_checkpoint(tiny_llama(max_position_embeddings=2048), folder / "tiny")
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    server = Server(str(model), "--no-prefix-cache", "--max-kv-tokens", "8192", "--max-num-seqs", "4", command=COMMAND)
    try:
        yield server.ready()
    finally:
        server.close()
