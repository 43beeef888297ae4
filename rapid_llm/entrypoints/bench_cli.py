"""``rapid-llm bench serve``: how fast does an OpenAI-compatible server answer, ours or another?"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rapid_llm.entrypoints.start_progress import CLEAR_LINE
from rapid_llm.envs import environment
from rapid_llm.errors import ConfigError

if TYPE_CHECKING:
    from rapid_llm.entrypoints.bench.settings import Load

_FAILED = 1
_FLAGS = (
    *("url", "model", "endpoint", "prompts", "ids_below", "requests", "concurrency", "rate", "input_len", "output_len", "warmup"),
    *("temperature", "ignore_eos", "body", "seed", "timeout", "max_seconds", "goodput"),
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    bench = subparsers.add_parser("bench", help="measure a server", description="Measure a server.")
    commands = bench.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = commands.add_parser(
        "serve",
        help="send a load to an OpenAI-compatible URL, and tell how fast it is answered",
        description="Send streams of requests to an OpenAI-compatible URL, of this server or of another, and tell time to first "
        "token, time per token, throughput and goodput (docs/bench.md). The exit status is 1 when an answer failed.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the API (default: %(default)s)")
    parser.add_argument("--model", help="what requests call it (default: the first that /models names)")
    parser.add_argument(
        "--api-key", metavar="KEY", help="sent with each request; RAPID_API_KEY says it without showing it to `ps`"
    )
    _add_what(parser.add_argument_group("what is asked"))
    _add_when(parser.add_argument_group("when"))
    output = parser.add_argument_group("what is told")
    output.add_argument(
        "--goodput",
        nargs="+",
        type=_limit,
        metavar="NAME=MS",
        help="count answers within all of these: ttft=200 tpot=50 latency=9000",
    )
    output.add_argument("--json", metavar="FILE", dest="json_file", help="write settings, results and each request there")
    output.add_argument("--plot", metavar="FILE", help="write plots there, as .html or .svg")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run_bench_serve)


def _add_what(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--endpoint", choices=("chat", "completions"), help="default: chat")
    group.add_argument(
        "--prompts", metavar="words|ids|FILE",
        help="random words, random ids (for completions), or a JSONL file of texts, {\"prompt\": ...} or {\"messages\": ...} "
        "(default: words)",
    )  # fmt: skip
    group.add_argument("--input-len", type=int, metavar="N", help="words or ids of a prompt (default: 256)")
    group.add_argument("--output-len", type=int, metavar="N", help="max_tokens of an answer (default: 128)")
    group.add_argument("--ids-below", type=int, metavar="N", help="random ids are below this (default: 10000)")
    group.add_argument("--temperature", type=_temperature, metavar="T", help="none leaves it to the server (default: 0)")
    group.add_argument(
        "--ignore-eos", action="store_true", default=None, help="go on to the last token: a field that not every server takes"
    )
    group.add_argument("--body", type=_object, metavar="JSON", help="fields to put over those of each request")
    group.add_argument("--seed", type=int, metavar="N", help="of prompts and times (default: 0)")


def _add_when(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--requests", type=int, metavar="N", help="how many (default: 100)")
    group.add_argument("--concurrency", type=int, metavar="N", help="open at once (default: 32; with --rate no bound)")
    group.add_argument("--rate", type=float, metavar="R", help="requests a second at Poisson times (default: inf, each at once)")
    group.add_argument("--warmup", type=int, metavar="N", help="requests that come before and do not count (default: 1)")
    group.add_argument("--timeout", type=float, metavar="S", help="seconds that an answer may take (default: 600)")
    group.add_argument("--max-seconds", type=float, metavar="S", help="cut the run off after so long (default: none)")


def run_bench_serve(options: argparse.Namespace) -> int:
    """Send the load, print the table, write the files; 1 when an answer failed or none was whole."""
    load, write_plot = _load(options), _plot_writer(options.plot)
    import uvloop

    from rapid_llm.entrypoints.bench.report import to_json, to_text
    from rapid_llm.entrypoints.bench.running import run
    from rapid_llm.entrypoints.bench.summary import summary

    done = uvloop.run(run(load, options.api_key or environment().api_key, _note if sys.stderr.isatty() else _say_nothing))
    if sys.stderr.isatty():
        sys.stderr.write(CLEAR_LINE)
    result = summary(done)
    print(to_text(done, result))
    if options.json_file is not None:
        _write(options.json_file, to_json(done, result))
    if write_plot is not None:
        write_plot(done, result)
    return _FAILED if result["requests"]["failed"] or not result["requests"]["whole"] else 0


def _load(options: argparse.Namespace) -> "Load":
    from rapid_llm.entrypoints.bench.settings import Load

    given: dict[str, Any] = {name: getattr(options, name) for name in _FLAGS if getattr(options, name) is not None}
    if "temperature" in given and math.isnan(given["temperature"]):
        given["temperature"] = None
    return Load(**{**given, "goodput": dict(given.get("goodput", ()))})


def _plot_writer(path: str | None) -> Callable[..., None] | None:
    """What writes the plots; asked for before the run, so that a wrong name does not cost one."""
    if path is None:
        return None
    from rapid_llm.entrypoints.bench.plots import to_html, to_svg

    if path.endswith(".html"):
        return lambda done, result: _write(path, to_html(done, result))
    if path.endswith(".svg"):
        return lambda done, result: _write(path, to_svg(done, result))
    raise ConfigError("plots have no such form", got=path, wanted="a name that ends in .html or .svg", change="choose one")


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}", got=error.strerror or str(error), change="choose another file") from None


def _note(done: int, failed: int, num_open: int) -> None:
    sys.stderr.write(f"{CLEAR_LINE}{done:,} done, {failed:,} of them failed, {num_open:,} open")
    sys.stderr.flush()


def _say_nothing(done: int, failed: int, num_open: int) -> None:
    """Nobody looks."""


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    return name, float(value)


def _temperature(text: str) -> float:
    return math.nan if text == "none" else float(text)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value
