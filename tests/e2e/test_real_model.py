"""The embedded model, in float32 on a CPU, says what transformers says (tests/data/references.json tells how that was made)."""

import json
from pathlib import Path

import pytest
import safetensors.numpy

from rapid_llm import LLM, SamplingParams
from rapid_llm.checkpoint.embedded import find_embedded_model
from rapid_llm.checkpoint.open import open_checkpoint

DATA = json.loads((Path(__file__).parents[1] / "data" / "references.json").read_text())
PROMPTS = [*DATA["references"], *({"id": f"stable-{i}", **entry} for i, entry in enumerate(DATA["stable"]))]
SURE_MARGIN = 0.02  # nats: below it, float32 sums in another order may turn the choice around
LOGPROB_TOLERANCE = 1e-3

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def llm():
    return LLM(device="cpu", max_kv_tokens=2048)


def compare(output, entry):
    """Ids equal while the reference is sure of its choice; after the first step that it is not sure of, texts may part."""
    answer = output.outputs[0]
    end_ids = {0, 2}
    checked = 0
    for i, (expected, step) in enumerate(zip(entry["output_ids"], entry["steps"], strict=True)):
        if expected in end_ids and i == len(answer.token_ids):
            assert answer.finish_reason == "stop"
            return checked + 1
        token = answer.token_ids[i]
        if step["gap"] >= SURE_MARGIN:
            assert token == expected, f"step {i}"
        elif token != expected:
            assert token in step["top5"]
            return checked
        assert answer.logprobs[i][token].logprob == pytest.approx(step["lp"], abs=LOGPROB_TOLERANCE)
        checked += 1
    return checked


def ask(llm, entries):
    params = [SamplingParams(temperature=0.0, max_tokens=len(entry["steps"]), logprobs=1) for entry in entries]
    return llm.generate([entry["prompt_ids"] for entry in entries], params)


@pytest.mark.parametrize("entry", PROMPTS, ids=lambda entry: entry["id"])
def test_greedy_ids_and_logprobs_equal_the_references(llm, entry):
    [output] = ask(llm, [entry])
    assert compare(output, entry) >= min(7, len(entry["steps"]))


def test_stable_prompts_are_exact_when_they_share_every_step(llm):
    for output, entry in zip(ask(llm, DATA["stable"]), DATA["stable"], strict=True):
        assert output.outputs[0].token_ids == entry["output_ids"]
        assert output.outputs[0].text == entry["output_text"]


def test_a_safetensors_export_gives_the_same_ids(llm, tmp_path):
    source = open_checkpoint(find_embedded_model())
    config = source.config
    safetensors.numpy.save_file({name: source.read(name) for name in source.tensors}, tmp_path / "model.safetensors")
    llm.tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": llm.tokenizer.eos_token}))
    sizes = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))

    exported = LLM(str(tmp_path), device="cpu", max_kv_tokens=2048)

    prompts = ["The capital of France is", "1, 2, 3, 4,", "def add(a, b):\n    "]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    of_both = [[output.outputs[0].token_ids for output in each.generate(prompts, params)] for each in (llm, exported)]
    assert of_both[0] == of_both[1]


def test_chat_renders_the_template_and_answers(llm):
    entry = next(entry for entry in DATA["references"] if entry["id"] == "capital")
    [output] = llm.chat(entry["prompt"]["messages"], SamplingParams(temperature=0.0))
    assert output.prompt_token_ids == entry["prompt_ids"]
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids == entry["output_ids"][:-1]  # without the end-of-text id
