"""What log-probs mean: the model's own distribution, or the one drawn from, against float64 from an oracle's logits."""

import math

import pytest
import torch

from rapid_llm import LLM, SamplingParams
from rapid_llm.config import PROMPT_LOGIT_ROWS
from rapid_llm.engine.output import LOWEST_LOGPROB
from tests import reference
from tests.tiny_model import expected_logits, save_checkpoint, tiny_llama

PROMPT = "hello hello"
FILTERS = {"top_p": 0.9, "top_k": 100, "min_p": 0.01}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {65: 4, 66: -3}}
CLOSE = 1e-4  # two fp32 models whose sums stand in another order


@pytest.fixture(scope="module")
def oracle():
    return tiny_llama()


@pytest.fixture(scope="module")
def folder(oracle, tmp_path_factory):
    return str(save_checkpoint(oracle, tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module", params=[0, 1], ids=["in-step", "overlapped"])
def llm(request, folder):
    llm = LLM(folder, device="cpu", max_kv_tokens=1024, max_num_seqs=4)
    llm._engine.worker.depth = request.param
    return llm


def adjusted(logits, prompt, said, values):
    """Penalties and biases as their definitions say, in float64."""
    scores = logits.double().clone()
    for token in range(len(scores)):
        if token in prompt or token in said:
            factor = values.get("repetition_penalty", 1.0)
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        times = said.count(token)
        scores[token] -= values.get("frequency_penalty", 0.0) * times + values.get("presence_penalty", 0.0) * (times > 0)
        scores[token] += values.get("logit_bias", {}).get(token, 0.0)
    return scores


def drawn_from(scores, values):
    """Log-probs of the distribution that a token is drawn from."""
    if values["temperature"] == 0:
        result = torch.full_like(scores, -math.inf)
        result[scores.argmax()] = 0.0
        return result
    temperature = torch.tensor(values["temperature"], dtype=torch.float32)
    filters = {"top_k": values.get("top_k", 0), "top_p": values.get("top_p", 1.0), "min_p": values.get("min_p", 0.0)}
    return reference.filtered_probabilities(scores, temperature, **filters).log()


def listed(entry):
    """The reported likeliest tokens in their order."""
    return sorted((item.rank, token) for token, item in entry.items() if item.rank is not None)


def assert_entry_is(entry, chosen, logprobs, n):
    assert chosen in entry
    assert [rank for rank, _ in listed(entry)] == list(range(1, min(n, int((logprobs > -math.inf).sum())) + 1))
    for token, item in entry.items():
        assert math.isfinite(item.logprob)
        assert item.logprob == pytest.approx(float(logprobs[token]), abs=CLOSE)
    best = logprobs.sort(descending=True).values
    for rank, token in listed(entry):
        assert float(logprobs[token]) == pytest.approx(float(best[rank - 1]), abs=CLOSE)
    assert sum(math.exp(item.logprob) for item in entry.values()) <= 1 + 1e-5


@pytest.mark.case("H7")
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("others", [{}, FILTERS, PENALTIES, FILTERS | PENALTIES], ids=["plain", "filters", "penalties", "both"])
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_are_what_their_mode_says(llm, oracle, mode, others, temperature):
    values = {"temperature": temperature, **others}
    params = SamplingParams(**values, seed=5, max_tokens=10, ignore_eos=True, logprobs=4, logprobs_mode=mode)
    [_, output] = llm.generate(["someone else", PROMPT], [SamplingParams(max_tokens=4, logprobs=1), params])
    prompt, answer = output.prompt_token_ids, output.outputs[0]
    logits = expected_logits(oracle, prompt + answer.token_ids)[len(prompt) - 1 :]
    for place, (chosen, entry) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        row = logits[place].double()
        if mode == "processed":
            expected = drawn_from(adjusted(row, prompt, answer.token_ids[:place], values), values)
        else:
            expected = torch.log_softmax(row, dim=-1)
        assert_entry_is(entry, chosen, expected, 4)
    assert math.isfinite(answer.cumulative_logprob)


@pytest.mark.case("H7")
def test_one_batch_may_hold_both_modes_and_neither_changes_the_other(llm):
    values = {"temperature": 0.6, "seed": 5, "max_tokens": 8, "ignore_eos": True, "logprobs": 3}
    raw, processed = SamplingParams(**values), SamplingParams(**values, logprobs_mode="processed")
    both = llm.generate([PROMPT, PROMPT], [raw, processed])
    alike = llm.generate([PROMPT, PROMPT], [raw, raw])
    assert both[0].outputs[0].logprobs == alike[0].outputs[0].logprobs
    assert both[1].outputs[0].logprobs != both[0].outputs[0].logprobs
    assert both[1].outputs[0].token_ids == both[0].outputs[0].token_ids


def test_the_logs_of_a_prompt_are_those_of_the_model_whatever_is_drawn(llm, oracle):
    params = SamplingParams(max_tokens=3, temperature=1.5, seed=1, prompt_logprobs=3, **PENALTIES)
    output = llm.generate([PROMPT, "other"], [params, SamplingParams(max_tokens=5)])[0]
    ids = output.prompt_token_ids
    logprobs = torch.log_softmax(expected_logits(oracle, ids).double(), dim=-1)
    first, *entries = output.prompt_logprobs
    assert first is None
    for place, (token, entry) in enumerate(zip(ids[1:], entries, strict=True)):
        assert_entry_is(entry, token, logprobs[place], 3)


def test_a_prompt_of_one_token_has_nothing_to_score(llm):
    [output] = llm.generate([[7]], SamplingParams(max_tokens=2, prompt_logprobs=2))
    assert output.prompt_logprobs == [None]


class Rows:
    """Counts the rows of logits that each step makes."""

    def __init__(self, forward):
        self.forward, self.seen = forward, []

    def __call__(self, batch):
        logits = self.forward(batch)
        self.seen.append(logits.shape[0])
        return logits


@pytest.mark.parametrize("depth", [0, 1], ids=["in-step", "overlapped"])
def test_long_prompts_are_scored_some_rows_a_step_and_hold_nobody_up(folder, oracle, depth):
    llm = LLM(folder, device="cpu", max_kv_tokens=2048, max_num_seqs=4)
    llm._engine.worker.depth = depth
    llm._engine.worker.forward = rows = Rows(llm._engine.worker.forward)
    scored = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    prompts = ["abcdefghij" * 24, "klmnopqrst" * 22, "short"]
    outputs = llm.generate(prompts, [scored, scored, SamplingParams(max_tokens=1, temperature=0.0)])
    assert max(rows.seen) <= PROMPT_LOGIT_ROWS + 4
    assert sum(rows.seen) >= 240 + 220
    for output in outputs[:2]:
        ids = output.prompt_token_ids
        logprobs = torch.log_softmax(expected_logits(oracle, ids).double(), dim=-1)
        values = [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        assert values == pytest.approx([float(logprobs[place, token]) for place, token in enumerate(ids[1:])], abs=CLOSE)


def test_a_preempted_prompt_is_scored_once(folder, llm):
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    prompts = [f"prompt number {i} of several" for i in range(5)]
    small = LLM(folder, device="cpu", max_kv_tokens=112, max_num_seqs=4)
    for output, prompt in zip(small.generate(prompts, params), prompts, strict=True):
        [alone] = llm.generate(prompt, params)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert [entry and sorted(entry) for entry in output.prompt_logprobs] == [
            entry and sorted(entry) for entry in alone.prompt_logprobs
        ]


def test_a_token_that_the_model_rules_out_has_a_finite_log(folder):
    llm = LLM(folder, device="cpu", max_kv_tokens=256)
    forward = llm._engine.worker.forward

    def banning(batch):
        logits = forward(batch).clone()
        logits[:, 72] = -math.inf
        return logits

    llm._engine.worker.forward = banning
    [output] = llm.generate([[65, 72, 65]], SamplingParams(max_tokens=1, prompt_logprobs=20))
    entry = output.prompt_logprobs[1]
    assert (entry[72].logprob, entry[72].rank) == (LOWEST_LOGPROB, None)
    assert sum(math.exp(item.logprob) for item in entry.values()) <= 1
