"""A load: which prompts, when, and what the numbers come to."""

import asyncio
import json
import math
import random
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid_llm import ConfigError
from rapid_llm.entrypoints.bench.arrivals import poisson
from rapid_llm.entrypoints.bench.prompts import bodies
from rapid_llm.entrypoints.bench.running import Run, run
from rapid_llm.entrypoints.bench.settings import Load
from rapid_llm.entrypoints.bench.streamed import Streamed
from rapid_llm.entrypoints.bench.summary import percentile, summary
from tests.entrypoints.bench.scripted_server import serving, whole

URL = "http://x/v1"
FLOATS = st.floats(-1e6, 1e6)


@given(st.lists(FLOATS, min_size=1), st.floats(0, 1))
def test_percentiles_are_those_of_numpy(values, share):
    assert percentile(sorted(values), share) == pytest.approx(np.percentile(values, 100 * share), abs=1e-6)


@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_arrivals_are_those_of_independent_users(rate):
    times = list(poisson(rate, 4000, seed=3))
    gaps = np.diff([0.0, *times])
    assert times == list(poisson(rate, 4000, seed=3)) != list(poisson(rate, 4000, seed=4))
    # Mean and deviation of an exponential are equal; of 4,000 draws both are known to 1.6 %, and four times that is let pass.
    assert gaps.mean() * rate == pytest.approx(1, rel=0.07)
    assert gaps.std() * rate == pytest.approx(1, rel=0.07)


def test_without_a_rate_all_come_at_once():
    assert list(poisson(math.inf, 3, seed=0)) == [0.0, 0.0, 0.0]


def test_random_prompts_have_their_length_differ_from_each_other_and_repeat_with_the_seed():
    load = Load(URL, input_len=20, output_len=5)
    asks = bodies(load, "m", 50, seed=0)
    texts = [ask["messages"][0]["content"] for ask in asks]
    assert {len(text.split()) for text in texts} == {20}
    assert len(set(texts)) == 50
    assert asks == bodies(load, "m", 50, seed=0) != bodies(load, "m", 50, seed=1)
    assert {name: asks[0][name] for name in asks[0] if name != "messages"} == {"model": "m", "max_tokens": 5, "temperature": 0.0}


def test_only_what_was_asked_for_is_sent_beside_the_prompt():
    load = Load(URL, endpoint="completions", prompts="ids", ids_below=9, temperature=None, ignore_eos=True, body={"top_p": 0.5})
    [ask] = bodies(load, "m", 1, seed=0)
    assert set(ask) == {"model", "prompt", "max_tokens", "ignore_eos", "top_p"}
    assert len(ask["prompt"]) == 256
    assert set(ask["prompt"]) <= set(range(9))


def test_a_file_of_prompts_is_asked_in_order_and_again_from_its_beginning(tmp_path):
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file.write_text("\n".join(['"one"', "", json.dumps({"prompt": "two", "max_tokens": 3}), json.dumps({"messages": messages})]))
    asks = bodies(Load(URL, prompts=str(file)), "m", 4, seed=0)
    assert [ask["messages"][-1]["content"] for ask in asks] == ["one", "two", "u", "one"]
    assert [ask["max_tokens"] for ask in asks] == [128, 3, 128, 128]
    file.write_text('{"prompt": [1, 2]}\n"text"')
    texts = bodies(Load(URL, prompts=str(file), endpoint="completions"), "m", 2, seed=0)
    assert [ask["prompt"] for ask in texts] == [[1, 2], "text"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no prompts"),
        ('"a"\n{"promt": "b"}', r"p\.jsonl:2 is no prompt"),
        ("7", "is no prompt"),
        ("{}", "both or neither"),
        ('{"prompt": [1]}', "add --endpoint completions"),
    ],
)
def test_a_file_that_holds_no_prompts_says_where(tmp_path, text, words):
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        bodies(Load(URL, prompts=str(file)), "m", 1, seed=0)


def streamed(ttft, gaps, tokens=None, **rest):
    arrivals = [10.0 + ttft + sum(gaps[:count]) for count in range(len(gaps) + 1)]
    return Streamed(10.0, 9.0, arrivals, arrivals[-1] + 0.5, 200, completion_tokens=tokens, **rest)


def test_the_summary_holds_what_the_definitions_say():
    whole = [streamed(1.0, [0.5, 0.5]), streamed(3.0, [1.0], tokens=5)]
    failed = [Streamed(10.0, 10.0, ended=11.0, status=500, error="500: no"), streamed(1.0, [], error="500: no")]
    cut = [streamed(1.0, [0.1], is_cut=True)]
    load = Load(URL, requests=9, rate=1.0, goodput={"ttft": 2000.0, "tpot": 500.0})
    found = summary(Run(load, "m", 10.0, 20.0, whole + failed + cut))
    assert found["requests"] == {"wanted": 9, "sent": 5, "whole": 2, "failed": 2, "cut": 1, "without_text": 0}
    assert found["errors"] == [{"count": 2, "words": "500: no"}]
    assert found["tokens_counted_by"] == "usage or chunks"
    assert (found["completion_tokens"], found["prompt_tokens"]) == (8, None)
    assert found["throughput"] == {"requests_per_second": 0.1, "tokens_per_second": 0.4}
    times = found["milliseconds"]
    assert {name: each["mean"] for name, each in times.items()} == pytest.approx(
        {"ttft": 2000.0, "tpot": (500 + 250) / 2, "gap": 2000 / 3, "latency": (2500 + 4500) / 2, "wait": 1000.0}
    )
    assert (times["ttft"]["min"], times["ttft"]["p50"], times["ttft"]["max"]) == (1000.0, 2000.0, 3000.0)
    assert found["goodput"]["requests"] == 1
    assert found["goodput"]["share"] == 0.2, "of all that were sent: what failed is not good"
    # Tokens over time add up to those that came: 3, 5, 1 of the failed and 2 of the cut one.
    assert sum(rate for _, rate in found["tokens_per_second_over_time"]) * 20 / 60 == pytest.approx(11)


def test_a_run_in_which_nothing_came_has_no_times_and_no_division_by_zero():
    found = summary(Run(Load(URL), "m", 10.0, 1.0, [Streamed(10.0, error="x", ended=11.0)]))
    assert set(found["milliseconds"].values()) == {None}
    assert found["throughput"]["tokens_per_second"] == 0


EVENTS = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
NO_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 100\r\n\r\n"


def load_against(answers, **settings):
    async def scenario():
        async with serving(*answers) as (port, requests):
            load = Load(f"http://127.0.0.1:{port}/v1", **{"model": "m", "warmup": 0, **settings})
            return await run(load, "", lambda *counts: None), requests

    return asyncio.run(scenario())


def test_no_more_requests_are_open_than_may_be_and_the_warm_up_is_not_counted():
    done, requests = load_against([whole(EVENTS)], requests=30, concurrency=3, warmup=2)
    assert len(done.streams) == 30
    assert len(requests) == 32
    assert max(number for number, *_ in requests) <= 3
    assert [each.error for each in done.streams] == [""] * 30
    assert done.seconds == max(each.ended for each in done.streams) - done.began


def test_the_first_model_is_asked_where_none_is_named():
    models = whole(b'{"data":[{"id":"first"},{"id":"second"}]}', kind=b"application/json")
    done, requests = load_against([models, whole(EVENTS)], model=None, requests=1)
    assert requests[0][1] == b"GET /v1/models HTTP/1.1"
    assert done.model == json.loads(requests[1][3])["model"] == "first"


def test_an_answer_that_does_not_end_in_time_is_an_error_and_one_beyond_the_run_is_cut():
    done, _ = load_against([NO_STREAM], requests=2, concurrency=2, timeout=0.01)
    assert [(each.error, each.is_cut) for each in done.streams] == [("no end within 0.01 seconds", False)] * 2
    done, _ = load_against([NO_STREAM], requests=9, concurrency=2, max_seconds=0.05)
    assert [(each.error, each.is_cut) for each in done.streams] == [("", True)] * 2


def test_a_warm_up_that_fails_altogether_ends_the_run_with_the_servers_words():
    refusal = whole(b'{"error":{"message":"unknown field: ignore_eos"}}', b"400 X", b"application/json")
    with pytest.raises(Exception, match="400: unknown field: ignore_eos"):
        load_against([refusal], warmup=1)


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_the_times_of_a_seed_do_not_depend_on_how_many_are_asked(seed, count):
    assert list(poisson(2.0, count, seed)) == list(islice(poisson(2.0, count + random.Random(seed).randrange(5), seed), count))
