"""lm-eval through /v1/completions: log-likelihoods (lists of ids, echo, log-probs) and answers up to a stop string."""

import json

import pytest
import torch

from tests.tiny_model import byte_tokenizer, tiny_llama

TASKS = "tests/data/lm_eval"


@pytest.fixture(scope="module")
def came(run, base_url, folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("lm_eval")
    reach = f"model=tiny,base_url={base_url}/completions,tokenizer={folder},tokenizer_backend=huggingface"
    run(
        *("lm_eval", "lm_eval", "run", "--model", "local-completions"),
        *("--model_args", f"{reach},num_concurrent=2,max_retries=1", "--batch_size", "4"),
        *("--tasks", "tiny_choices,tiny_says", "--include_path", TASKS, "--output_path", str(out), "--log_samples"),
        HF_HOME=str(out / "home"),
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
    )
    [results] = [json.loads(file.read_text()) for file in out.rglob("results_*.json")]
    samples = {
        name: [json.loads(line) for file in out.rglob(f"samples_{name}_*.jsonl") for line in file.read_text().splitlines()]
        for name in ("tiny_choices", "tiny_says")
    }
    return results["results"], samples


def log_likelihood(model, tokenizer, context, continuation):
    """Of ``continuation`` behind ``context``, and whether it is what the model would say."""
    before, ids = (tokenizer.encode(text, add_special_tokens=False).ids for text in (context, context + continuation))
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    places = range(len(before) - 1, len(ids) - 1)
    return sum(scores[place, ids[place + 1]].item() for place in places), all(
        scores[place].argmax() == ids[place + 1] for place in places
    )


def test_log_likelihoods_and_accuracy_are_those_of_transformers(came):
    results, samples = came
    model, tokenizer = tiny_llama(max_position_embeddings=2048), byte_tokenizer()
    right = 0
    for sample in samples["tiny_choices"]:
        doc = sample["doc"]
        expected = [log_likelihood(model, tokenizer, doc["question"], " " + choice) for choice in doc["choices"]]
        came_back = [(float(value), is_greedy == "True") for [[value, is_greedy]] in sample["resps"]]
        assert [value for value, _ in came_back] == pytest.approx([value for value, _ in expected], abs=1e-3)
        assert [greedy for _, greedy in came_back] == [greedy for _, greedy in expected]
        values = [value for value, _ in expected]
        right += values.index(max(values)) == doc["answer"]
    assert results["tiny_choices"]["acc,none"] == right / len(samples["tiny_choices"])


def test_answers_end_before_the_stop_string(came):
    results, samples = came
    said = {sample["doc"]["answer"]: sample["resps"][0][0] for sample in samples["tiny_says"]}
    assert said == {"42": " 42 ", "7": " 7", "9": " 8 "}
    assert results["tiny_says"]["exact_match,trimmed"] == pytest.approx(2 / 3)
