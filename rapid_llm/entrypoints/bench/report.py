"""A summary as a table for a terminal, and as a JSON file that says what was measured and how."""

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rapid_llm.entrypoints.bench.running import Run
from rapid_llm.entrypoints.bench.settings import Load
from rapid_llm.entrypoints.bench.summary import PERCENTILES
from rapid_llm.version import __version__

NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "gap": "gap between chunks",
    "latency": "whole answer",
    "wait": "wait for a place here",
}
_COLUMNS = ("mean", *(f"p{each}" for each in PERCENTILES), "max")


def to_text(run: Run, result: Mapping[str, Any]) -> str:
    """The lines for a terminal."""
    load, counts, speed = run.load, result["requests"], result["throughput"]
    lines = [
        f"{load.url} ({run.model}, {load.endpoint}), {_pace(load)}",
        f"requests        {counts['whole']:,} whole, {counts['failed']:,} failed, {counts['cut']:,} cut off by the time's end, "
        f"of {counts['wanted']:,}, in {result['seconds']:.2f} s",
        f"prompts         {_tokens(result['prompt_tokens'])}",
        f"answers         {result['completion_tokens']:,} tokens, counted by {result['tokens_counted_by']}",
        f"throughput      {speed['requests_per_second']:.2f} requests/s, {speed['tokens_per_second']:,.1f} new tokens/s"
        + (f", {speed['total_tokens_per_second']:,.1f} with those of prompts" if "total_tokens_per_second" in speed else ""),
    ]
    if "goodput" in result:
        good = result["goodput"]
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in good["limits"].items())
        lines.append(f"goodput         {good['requests_per_second']:.2f} requests/s, {good['share']:.1%} within {limits}")
    lines += ["", f"{'milliseconds':<24}" + "".join(f"{name:>11}" for name in _COLUMNS)]
    lines += [_row(NAMES[name], found) for name, found in result["milliseconds"].items()]
    if counts["without_text"]:
        lines.append(f"{counts['without_text']:,} answers had no text, so they have no time to a first token")
    if result["errors"]:
        lines += ["", "errors"] + [f"{each['count']:>8,} x {each['words']}" for each in result["errors"]]
    return "\n".join(lines)


def to_json(run: Run, result: Mapping[str, Any]) -> str:
    """The file: settings, date, versions, the summary, and each request."""
    record = {
        "tool": "rapid-llm bench serve",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": run.load.url,
        "model": run.model,
        "settings": {name: _finite(value) for name, value in asdict(run.load).items()},
        "versions": {"rapid_llm": __version__, "python": platform.python_version()},
        "client": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        **result,
        "each": [_request(run, number) for number in range(len(run.streams))],
    }
    return json.dumps(record, indent=1) + "\n"


def _request(run: Run, number: int) -> dict[str, Any]:
    each = run.streams[number]
    return {
        "sent_after_seconds": each.asked - run.began,
        "ttft": None if each.ttft is None else 1e3 * each.ttft,
        "tpot": None if each.tpot is None else 1e3 * each.tpot,
        "latency": 1e3 * each.latency,
        "prompt_tokens": each.prompt_tokens,
        "completion_tokens": each.completion_tokens,
        "chunks": len(each.arrivals),
        "error": each.error or ("cut off" if each.is_cut else None),
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity: what is not bounded is null."""
    return None if isinstance(value, float) and math.isinf(value) else value


def _pace(load: Load) -> str:
    rate = "" if math.isinf(load.rate) else f"{load.rate:g} requests/s at Poisson times, "
    return f"{rate}at most {load.most_open:,} open at once"


def _tokens(count: int | None) -> str:
    return "of a length that the server does not tell" if count is None else f"{count:,} tokens"


def _row(name: str, found: Mapping[str, float] | None) -> str:
    return f"{name:<24}" + "".join(f"{'-' if found is None else f'{found[column]:,.2f}':>11}" for column in _COLUMNS)
