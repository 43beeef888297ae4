"""``rapid-llm serve``: an OpenAI-compatible server over one model."""

import argparse
from dataclasses import fields, replace
from typing import Any

from rapid_llm.config_file import SERVER_TABLE, Settled, read_config_file, settle
from rapid_llm.entrypoints.engine_flags import add_engine_flags, engine_config
from rapid_llm.entrypoints.server.listening import listen
from rapid_llm.entrypoints.server.settings import ServerConfig
from rapid_llm.entrypoints.tools.formats import TOOL_FORMATS
from rapid_llm.envs import environment
from rapid_llm.errors import ConfigError


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "serve",
        help="answer OpenAI's clients over HTTP",
        description="Serve MODEL over HTTP, as OpenAI's API does (docs/server.md). The port answers at once; /ready tells when "
        "requests are served. SIGTERM lets open answers end.",
    )
    parser.add_argument("model_name", metavar="MODEL", nargs="?", help="the same as --model")
    server = parser.add_argument_group("server")
    server.add_argument("--host", help="where to listen (default: 127.0.0.1; 0.0.0.0 for every address of this machine)")
    server.add_argument("--port", type=int, help="default: 8000; 0 takes a free one")
    server.add_argument(
        "--api-key", action="append", metavar="KEY",
        help="answer only who brings this key; may be given several times. RAPID_API_KEY says it without showing it to `ps`",
    )  # fmt: skip
    server.add_argument("--served-model-name", metavar="NAME", help="what requests call the model (default: its file's name)")
    server.add_argument(
        "--cors-origins", action="append", metavar="ORIGIN", help="a web page's origin that may call, or * (default: none)"
    )
    server.add_argument(
        "--tool-format", metavar="FORMAT",
        help=f"the format in which the model calls tools: {', '.join(TOOL_FORMATS)} (default: told from its chat template)",
    )  # fmt: skip
    limits = parser.add_argument_group("limits of the server")
    limits.add_argument("--max-requests", type=int, help="answers that are open at once; the next gets 429 (default: 2048)")
    limits.add_argument("--max-body-bytes", type=int, help="longest body of a request (default: 16777216)")
    limits.add_argument("--drain-seconds", type=float, help="how long SIGTERM waits for open answers (default: 60)")
    limits.add_argument("--max-restarts", type=int, help="restarts of a dead engine within ten minutes (default: 5)")
    limits.add_argument("--log-requests", action=argparse.BooleanOptionalAction, help="a log line a request (default: on)")
    server.add_argument(
        "--otlp-endpoint", metavar="URL",
        help="send OpenTelemetry traces there, by OTLP over HTTP, such as http://127.0.0.1:4318 (pip install 'rapid-llm[otel]'; "
        "default: as OTEL_EXPORTER_OTLP_ENDPOINT says)",
    )  # fmt: skip
    server.add_argument(
        "--progress", action=argparse.BooleanOptionalAction,
        help="show how far a start is: a bar on a terminal, elsewhere a log line every few seconds of it (default: on)",
    )  # fmt: skip
    add_engine_flags(parser)
    parser.add_argument("--show-config", action="store_true", help="print every setting and where it came from, and end")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run_serve)


def run_serve(options: argparse.Namespace) -> int:
    """Serve until a signal comes; 0 after SIGTERM."""
    if options.model_name is not None:
        if options.model is not None:
            got = f"{options.model_name} and --model {options.model}"
            raise ConfigError("the model is named twice", got=got, wanted="one of the two", change="leave one out")
        options.model = options.model_name
    engine, server = engine_config(options), server_config(options)
    if options.show_config:
        print(f"{engine.to_toml()}\n[{SERVER_TABLE}]\n{server.to_toml()}", end="")
        return 0
    from rapid_llm.entrypoints.server.tracing import check_tracing  # asyncio and starlette, which no other command needs

    check_tracing(server.config.otlp_endpoint)
    listener = listen(server.config)  # before anything else is loaded: whoever calls from now on is answered
    from rapid_llm.entrypoints.server.run import run

    run(engine.config, server.config, listener)
    return 0


def server_config(options: argparse.Namespace) -> Settled[ServerConfig]:
    """The server's settings, by flags, environment and file, in this order.

    Raises: ConfigError.
    """
    in_file = {} if options.config is None else read_config_file(options.config).get(SERVER_TABLE, {})
    if not isinstance(in_file, dict):
        wanted = f"a table [{SERVER_TABLE}]"
        raise ConfigError(f"{SERVER_TABLE} in {options.config}", got=repr(in_file), wanted=wanted, change="write a table")
    flags = {field.name: getattr(options, field.name) for field in fields(ServerConfig)}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    settled = settle(ServerConfig, in_file, given, options.config, "server setting")
    key = environment().api_key
    if key and "api_key" not in given:
        config, sources = replace(settled.config, api_key=key), {**settled.sources, "api_key": "RAPID_API_KEY"}
        settled = Settled(config, sources)
    return replace(settled, secrets=frozenset({"api_key"}))
