"""What is asked: prompts, sampling values of every kind, and what cannot be served."""

import random
from dataclasses import dataclass

from rapid_llm import Grammar, SamplingParams
from rapid_llm.engine.output import RequestOutput
from tests.tiny_model import VOCAB_SIZE

AT_ONCE = 24
OPTIONS = {"max_kv_tokens": 288, "max_num_seqs": 16, "max_batched_tokens": 96}
"""Of the engine: small, so that some give way."""
CANARY, CANARY_PARAMS = "the canary", SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
"""Asked from time to time; what is answered hangs on nobody else."""
LONG = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
SHARED = "a beginning that many have in common, longer than a page. "


def values(draw: random.Random) -> SamplingParams:
    """Sampling values of any kind, and of several kinds together; seeded, so that a run can be had again."""
    given = {
        "max_tokens": draw.choice((1, draw.randint(2, 20), 60)),
        "ignore_eos": draw.random() < 0.7,
        "seed": draw.randrange(100),
    }
    for kind in draw.sample(_kinds(draw), draw.randint(1, 3)):
        given |= kind
    return SamplingParams(**given)


def _kinds(draw: random.Random) -> list[dict]:
    return [
        {"temperature": 0.0},
        {"temperature": draw.uniform(0.1, 2.0), "top_p": draw.uniform(0.1, 1.0)},
        {"top_k": draw.randint(1, 300), "min_p": draw.random() / 2},
        {"n": draw.randint(2, 3)},
        {"stop": [draw.choice("aeiou13"), "zz"]},
        {"stop_token_ids": [draw.randrange(256)]},
        {"logprobs": draw.randint(0, 5), "logprobs_mode": draw.choice(("raw", "processed"))},
        {"prompt_logprobs": draw.randint(0, 3), "skip_special_tokens": False},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        {"logit_bias": {draw.randrange(256): draw.choice([-100, -5, 5])}, "bad_words": ["ab", "q"]},
        {"min_tokens": 1},
        {"grammar": draw.choice((Grammar("regex", "([a-z]|é){1,40}"), Grammar("json_schema", '{"enum": ["yes", 17]}')))},
    ]


def prompt(draw: random.Random) -> str | list:
    """Short, long, ids, a conversation, and beginnings that others have too."""
    tail = "".join(draw.choice("abc de fg") for _ in range(draw.choice((1, 3, 15, 16, 17, 60, 120))))
    ids = [draw.randrange(256) for _ in range(draw.randint(1, 90))]
    chat = [{"role": "user", "content": "hello " * draw.randint(1, 12)}]
    return draw.choice((tail, SHARED + tail, ids, chat))


ALL_BANNED = SamplingParams(logit_bias=dict.fromkeys(range(VOCAB_SIZE), -100), max_tokens=4)
"""Ends with an error of its own."""

REFUSED = [
    lambda: ("", SamplingParams()),
    lambda: ([], SamplingParams()),
    lambda: (3.5, SamplingParams()),
    lambda: ([VOCAB_SIZE], SamplingParams()),
    lambda: ([-1], SamplingParams()),
    lambda: ([1, "two"], SamplingParams()),
    lambda: ("x" * 5000, SamplingParams()),
    lambda: ([{"role": 7}], SamplingParams()),
    lambda: ("x", SamplingParams(max_tokens=10_000)),
    lambda: ("x", SamplingParams(max_tokens=0)),
    lambda: ("x", SamplingParams(min_tokens=300)),
    lambda: ("x", SamplingParams(n=0)),
    lambda: ("x", SamplingParams(temperature=-1)),
    lambda: ("x", SamplingParams(temperature=float("nan"))),
    lambda: ("x", SamplingParams(top_p=0)),
    lambda: ("x", SamplingParams(top_k=-2)),
    lambda: ("x", SamplingParams(min_p=2)),
    lambda: ("x", SamplingParams(seed=2**63)),
    lambda: ("x", SamplingParams(stop=[""])),
    lambda: ("x", SamplingParams(stop_token_ids=[VOCAB_SIZE])),
    lambda: ("x", SamplingParams(logit_bias={4000: 1.0})),
    lambda: ("x", SamplingParams(logit_bias={"x": 1.0})),
    lambda: ("x", SamplingParams(bad_words=["long" * 100])),
    lambda: ("x", SamplingParams(logprobs=21)),
    lambda: ("x", SamplingParams(logprobs_mode="processed")),
    lambda: ("x", SamplingParams(prompt_logprobs=-1)),
    lambda: ("x", SamplingParams(repetition_penalty=0)),
    lambda: ("x", SamplingParams(presence_penalty=3)),
    lambda: ("x", SamplingParams(frequency_penalty=-3)),
    lambda: ("x", SamplingParams(ignore_eos=1)),
    lambda: ("x", SamplingParams(grammar=Grammar("regex", "(a"))),
    lambda: ("x", SamplingParams(grammar=Grammar("json_schema", '{"type": "objekt"}'))),
    lambda: ("x", SamplingParams(grammar=Grammar("lark", "x" * 200_000))),
]
"""Prompts and values of which one cannot be served: making or asking them is refused."""


@dataclass
class Reading:
    """One request as its reader sees it. AssertionError where the items of its stream do not belong together."""

    wanted: SamplingParams
    last: RequestOutput | None = None
    text: dict[int, str] | None = None

    def take(self, output: RequestOutput) -> None:
        """The next item."""
        if self.last is not None and self.last.finished:
            raise AssertionError(f"an output after the last one: {output}")
        self.text = self.text or dict.fromkeys(range(self.wanted.n), "")
        for answer in output.outputs:
            self.text[answer.index] += answer.delta
            if self.text[answer.index] != answer.text:
                raise AssertionError(f"pieces are not the text: {self.text[answer.index]!r} and {answer.text!r}")
        self.last = output

    def ended(self, *reasons: str) -> RequestOutput:
        """What was read whole: every answer ended, for one of ``reasons``."""
        output = self.last
        if output is None or not output.finished or len(output.outputs) != self.wanted.n:
            raise AssertionError(f"a stream ended before its answers: {output}")
        if any(answer.finish_reason not in reasons for answer in output.outputs):
            raise AssertionError(f"an answer did not end as it should: {output}")
        for answer in output.outputs:
            if answer.logprobs is not None and len(answer.logprobs) != len(answer.token_ids):
                raise AssertionError(f"log-probs are not those of the ids: {answer}")
        if output.prompt_logprobs is not None and "abort" not in reasons and "error" not in reasons:
            _check_scored(output)
        return output


def _check_scored(output: RequestOutput) -> None:
    if len(output.prompt_logprobs) != len(output.prompt_token_ids):
        raise AssertionError(f"log-probs are not those of the prompt: {output}")
