"""``rapid-llm generate`` and ``rapid-llm chat``: text in, streamed text out."""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rapid_llm.config import SamplingParams
from rapid_llm.engine.output import RequestOutput
from rapid_llm.entrypoints.engine_flags import add_engine_flags, engine_config
from rapid_llm.entrypoints.start_progress import StartProgress
from rapid_llm.errors import RequestError
from rapid_llm.ledger import StartupLedger

if TYPE_CHECKING:
    from rapid_llm.engine.frontend import Message
    from rapid_llm.entrypoints.llm import LLM

GENERATE_MAX_TOKENS = 256
"""A continuation has no natural end, so the command gives it one."""

_SAMPLING_FLAGS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both commands."""
    generate = subparsers.add_parser("generate", help="continue a text as it stands", description="Continue PROMPT as it stands.")
    generate.add_argument("prompt", metavar="PROMPT", help="the text; - reads it from standard input")
    _add_flags(generate, f"most new tokens (default {GENERATE_MAX_TOKENS})")
    generate.set_defaults(run=run_generate)

    chat = subparsers.add_parser(
        "chat",
        help="talk to a model through its chat template",
        description="Answer PROMPT through the model's chat template, or start a conversation when there is none: "
        "Ctrl-C stops an answer, Ctrl-D ends the conversation.",
    )
    chat.add_argument("prompt", metavar="PROMPT", nargs="?", help="the message; - reads it from standard input")
    chat.add_argument("--system", help="the system message")
    _add_flags(chat, "most new tokens of an answer (default: the rest of the context)")
    chat.set_defaults(run=run_chat)


def _add_flags(parser: argparse.ArgumentParser, max_tokens_help: str) -> None:
    add_engine_flags(parser)
    sampling = parser.add_argument_group("sampling (chat: defaults come from the model's generation_config)")
    sampling.add_argument("--max-tokens", type=int, help=max_tokens_help)
    sampling.add_argument("--temperature", type=float, help="0 is greedy")
    sampling.add_argument("--top-p", type=float, help="keep the likeliest tokens that hold this mass; 1 is off")
    sampling.add_argument("--top-k", type=int, help="keep the k likeliest tokens; 0 is off")
    sampling.add_argument("--min-p", type=float, help="drop tokens less likely than this share of the likeliest; 0 is off")
    sampling.add_argument("--seed", type=int, help="the same seed gives the same text")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    sampling.add_argument("--stop-token-ids", type=int, action="append", metavar="ID", help="end before this token; the same")
    sampling.add_argument("--min-tokens", type=int, help="fewest new tokens")
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the model's end of text")
    sampling.add_argument("--presence-penalty", type=float, help="lower the logit of every token of the answer by this, -2 to 2")
    sampling.add_argument("--frequency-penalty", type=float, help="the same for each time that the answer holds it")
    sampling.add_argument("--repetition-penalty", type=float, help="shrink by this factor what prompt or answer hold; 1 is off")
    sampling.add_argument(
        "--logit-bias", type=_bias, action="append", metavar="ID=N", help="add N, -100 to 100, to a token's logit; -100 bans it"
    )
    sampling.add_argument("--bad-words", action="append", metavar="TEXT", help="never say this; may be given several times")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show how far loading is, on standard error (default: on; where that is no terminal, only of a long one)",
    )
    parser.add_argument("--stats", action="store_true", help="end with the start-up ledger and tokens/s, on standard error")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _bias(text: str) -> tuple[int, float]:
    """ID=VALUE of a flag; argparse turns a ValueError into a usage error."""
    token, _, value = text.partition("=")
    return int(token), float(value)


def run_generate(options: argparse.Namespace) -> int:
    """Stream the continuation to standard output."""
    params = _sampling(options, SamplingParams(max_tokens=GENERATE_MAX_TOKENS))
    prompt = _prompt_text(options.prompt)
    llm = _load(options)
    stats = _stream(llm.stream(prompt, params), llm)
    return _finish(options, llm, stats)


def run_chat(options: argparse.Namespace) -> int:
    """Stream one answer, or hold a conversation."""
    _sampling(options, SamplingParams())  # refuse bad values before the model is loaded
    history: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
    prompt = None if options.prompt is None else _prompt_text(options.prompt)
    llm = _load(options)
    params = _sampling(options, llm.default_chat_params())
    if prompt is None:
        return _converse(llm, params, history, options)
    stats = _stream(llm.stream([*history, {"role": "user", "content": prompt}], params), llm)
    return _finish(options, llm, stats)


def _converse(llm: "LLM", params: SamplingParams, history: "list[Message]", options: argparse.Namespace) -> int:
    """Read, answer, repeat until the end of the input."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        import readline  # noqa: F401  (line editing and history for input())
    stats = None
    while (line := _read_line(prompt)) is not None:
        if not line.strip():
            continue
        history.append({"role": "user", "content": line})
        try:
            stats = _stream(llm.stream(history, params), llm)
        except RequestError as error:  # this message is refused; the conversation goes on without it
            print(f"rapid-llm: {error}", file=sys.stderr)
            history.pop()
            continue
        history.append({"role": "assistant", "content": stats.text})
    return 0 if stats is None else _finish(options, llm, stats)


def _read_line(prompt: str) -> str | None:
    """The next line; None at the end of the input. Ctrl-C clears the line."""
    while True:
        try:
            return input(prompt)
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()


class _StreamStats:
    """The output and the clock of one streamed answer."""

    def __init__(self) -> None:
        self.started = self.first = self.last = time.perf_counter()
        self.output: RequestOutput | None = None
        self.interrupted = False

    @property
    def text(self) -> str:
        return self.output.outputs[0].text if self.output else ""

    def note(self, output: RequestOutput) -> None:
        self.last = time.perf_counter()
        if self.output is None:
            self.first = self.last
        self.output = output

    def to_text(self) -> str:
        if self.output is None:
            return "no token was produced"
        prompt, new = len(self.output.prompt_token_ids), len(self.output.outputs[0].token_ids)
        cached = self.output.num_cached_tokens
        spared = f" ({cached} from the prefix cache)" if cached else ""
        line = f"prompt      {prompt} tokens{spared}, first token after {self.first - self.started:.3f} s"
        if new > 1 and self.last > self.first:
            line += f"\ndecode      {new} tokens, {(new - 1) / (self.last - self.first):.1f} tokens/s"
        return line


def _stream(outputs: Iterator[RequestOutput], llm: "LLM") -> _StreamStats:
    """Print text as it comes. Ctrl-C ends the answer and keeps what there is."""
    stats = _StreamStats()
    try:
        for output in outputs:
            stats.note(output)
            sys.stdout.write(output.outputs[0].delta)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stats.interrupted = True
        outputs.close()  # type: ignore[attr-defined]
    print()
    return stats


def _finish(options: argparse.Namespace, llm: "LLM", stats: _StreamStats) -> int:
    if options.stats:
        print(llm.ledger.to_text(), stats.to_text(), sep="\n", file=sys.stderr)
    if stats.output is not None and stats.output.error:
        print(f"rapid-llm: {stats.output.error}", file=sys.stderr)
        return 2
    return 130 if stats.interrupted and options.prompt is not None else 0


def _load(options: argparse.Namespace) -> "LLM":
    ledger = StartupLedger()
    with ledger.phase("import"):
        from rapid_llm.entrypoints.llm import LLM

    wishes = vars(engine_config(options).config)
    if not options.progress:
        return LLM(**wishes, ledger=ledger)
    progress = StartProgress()

    def loading(done: int, total: int, seconds: float) -> None:
        progress.note(
            "weights", done, total, seconds, f"loading {ledger.doing}"
        )  # which says whether they are quantised meanwhile

    def downloading(done: int, total: int, seconds: float) -> None:
        progress.note("download", done, total, seconds, "downloading")

    try:
        return LLM(**wishes, ledger=ledger, progress=loading, download_progress=downloading)
    finally:
        progress.clear()


def _sampling(options: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    given: dict[str, Any] = {name: getattr(options, name) for name in _SAMPLING_FLAGS}
    if given["logit_bias"] is not None:
        given["logit_bias"] = dict(given["logit_bias"])
    return defaults.with_defaults(**given)


def _prompt_text(argument: str) -> str:
    return sys.stdin.read() if argument == "-" else argument
