"""The embedded model on a GPU in bfloat16, through the native rows, says what the float32 references say where they are sure."""

import json
from pathlib import Path

import pytest

from rapid_llm import LLM, SamplingParams
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.dispatcher.explain import explain

DATA = json.loads((Path(__file__).parents[1] / "data" / "references.json").read_text())
SURE_MARGIN = 0.15  # nats; the stable prompts have no step below it
LOGPROB_TOLERANCE = 0.2  # bfloat16 through 30 layers: the forward pass of transformers is up to 0.17 off on these prompts

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def llm():
    return LLM(device="cuda", max_kv_tokens=16_384)


def ask(llm, entries, **values):
    params = [SamplingParams(temperature=0.0, max_tokens=len(entry["steps"]), logprobs=0, **values) for entry in entries]
    return llm.generate([entry["prompt_ids"] for entry in entries], params)


def test_the_stable_prompts_are_exact_alone_and_together(llm):
    expected = [entry["output_ids"] for entry in DATA["stable"]]
    assert [output.outputs[0].token_ids for output in ask(llm, DATA["stable"])] == expected
    for entry in DATA["stable"]:
        [output] = ask(llm, [entry])
        assert output.outputs[0].token_ids == entry["output_ids"]
        assert output.outputs[0].text == entry["output_text"]


@pytest.mark.parametrize("entry", DATA["references"], ids=lambda entry: entry["id"])
def test_ids_equal_the_references_wherever_bfloat16_respects_the_margin(llm, entry):
    [output] = ask(llm, [entry], ignore_eos=True)
    for token, info, expected, step in zip(
        output.outputs[0].token_ids, output.outputs[0].logprobs, entry["output_ids"], entry["steps"], strict=False
    ):
        if token != expected:
            assert step["gap"] < SURE_MARGIN
            break
        assert info[token].logprob == pytest.approx(step["lp"], abs=LOGPROB_TOLERANCE)


def test_every_op_of_the_model_is_served_by_a_native_row(caplog):
    LLM(device="cuda", max_kv_tokens=16_384)
    assert "served by plain torch" not in caplog.text


def test_chat_answers(llm):
    [output] = llm.chat([{"role": "user", "content": "Name the capital of France."}], SamplingParams(temperature=0.0))
    assert "Paris" in output.outputs[0].text


@pytest.mark.parametrize("op", sorted(catalog().contracts))
def test_explain_shows_a_native_row_with_evidence_and_every_losers_reasons(op):
    from rapid_llm.kernels.device import current_device

    answer = explain(op, device=current_device("cuda"), dtype="bfloat16").to_json()
    assert not answer["chosen"].startswith("torch.")
    assert answer["evidence"]["state"] in ("verified_here", "verified_elsewhere")
    assert all(loser["reasons"] for loser in answer["rejected"])
