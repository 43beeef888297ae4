"""Logits of tiny random checkpoints of every family equal transformers', whole prompts, chunks and steps with cache alike.

Both sides compute in float32; they differ by the order of sums, so the difference grows with the logits. The largest seen over
these cases is 4e-5 of the spread (standard deviation) of a case's logits; 1e-4 of it holds with room.
"""

import pytest
import torch

from rapid_llm import LLM, SamplingParams
from rapid_llm.build import build_engine
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.config import EngineConfig
from rapid_llm.ledger import StartupLedger
from rapid_llm.modules.placement import Placement
from rapid_llm.step import Chunk, PageUpdate, SlotSetup, StepPlan
from tests.tiny_model import VOCAB_SIZE, expected_logits, save_checkpoint, tiny_model

TOLERANCE = 1e-4

DENSE = ["llama", "mistral", "qwen2", "qwen3"]
FAMILIES = [*DENSE, "mixtral", "qwen3_moe"]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10_000.0,
}
EVERY_FAMILY = [
    pytest.param({}, id="tied-gqa2"),
    pytest.param({"tie_word_embeddings": False, "vocab_size": 1031}, id="untied-odd-vocabulary"),
    pytest.param({"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 576}, id="odd-heads-9-of-3"),
    pytest.param({"rope_parameters": YARN}, id="yarn"),
    pytest.param({"rope_parameters": LLAMA3}, id="llama3"),
]
ONE_FAMILY = [
    pytest.param("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64}, id="gqa8-d64"),
    pytest.param("llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 80}, id="mha-d80"),
    pytest.param(
        "llama", {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 96, "hidden_size": 80}, id="odd-heads-5"
    ),
    pytest.param(
        "llama", {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 112, "hidden_size": 56}, id="gqa7-d112"
    ),
    pytest.param("llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}, id="d128"),
    pytest.param("llama", {"attention_bias": True, "mlp_bias": True}, id="biases"),
    pytest.param("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}, id="rope-theta"),
    pytest.param("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, id="linear"),
    pytest.param(
        "llama", {"rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}}, id="yarn-no-truncate"
    ),
    pytest.param("llama", {"rope_parameters": YARN | {"attention_factor": 1.25}}, id="yarn-attention-factor"),
    pytest.param("llama", {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 1.0}}, id="yarn-two-weights"),
    pytest.param("llama", {"rope_parameters": YARN | {"original_max_position_embeddings": 4096}}, id="yarn-ramp-past-the-end"),
    pytest.param("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, id="dynamic-within"),
    pytest.param("mistral", {"sliding_window": 256}, id="window-as-long-as-the-context"),
    pytest.param("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, id="window-of-no-layer"),
    pytest.param("qwen3", {"attention_bias": True, "head_dim": 128}, id="qk-norm-and-biases"),
    pytest.param("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 1}, id="one-expert-a-token"),
    pytest.param("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 5}, id="every-expert"),
    pytest.param("mixtral", {"sliding_window": 256}, id="window-as-long-as-the-context"),
    pytest.param("qwen3_moe", {"norm_topk_prob": False}, id="weights-as-they-are"),
    pytest.param(
        "qwen3_moe", {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24}, id="16-experts-4-a-token"
    ),
    pytest.param("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}, id="one-expert-a-token"),
    pytest.param("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [1, 3]}, id="dense-layers-by-list"),
    pytest.param("qwen3_moe", {"num_hidden_layers": 3, "decoder_sparse_step": 2}, id="dense-layers-by-step"),
]
CASES = [
    *(pytest.param(family, *case.values, id=f"{family}-{case.id}") for family in FAMILIES for case in EVERY_FAMILY),
    *(pytest.param(*case.values, id=f"{case.values[0]}-{case.id}") for case in ONE_FAMILY),
]


def run_model(folder, steps, device="cpu", **options):
    """Logits after every step; ``steps`` lists, per step, (slot, start, ids) of each sequence's chunk, decodes first."""
    engine = build_engine(
        EngineConfig(str(folder), device, "float32", max_kv_tokens=512, **options), open_checkpoint(folder), StartupLedger()
    )
    worker, seen = engine.worker, []
    forward = worker.forward

    def spy(batch):
        seen.append(forward(batch).clone())
        return seen[-1]

    worker.forward = spy
    for pool in worker.pool.buffers:
        pool.fill_(torch.nan)  # whatever is read must have been written
    free_pages = list(range(31, -1, -3)) + list(range(30, -1, -3)) + list(range(29, -1, -3))  # neither rising nor adjacent
    lengths = {}
    for step in steps:
        plan = StepPlan()
        for slot, start, ids in step:
            if slot not in lengths:
                plan.slots.append(SlotSetup(slot, 0.0, 0, 1.0, 0.0, 0, -1))
            for column in range(-(-lengths.get(slot, 0) // 16), -(-(start + len(ids)) // 16)):
                plan.pages.append(PageUpdate(slot, column, (free_pages.pop(0),)))
            lengths[slot] = start + len(ids)
            (plan.decodes if len(ids) == 1 else plan.prefills).append(Chunk(slot, start, tuple(ids), samples=True))
        worker.submit(plan)
    return seen


def assert_close(logits, expected):
    """Equal to within TOLERANCE of their spread."""
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE * expected.std().item())


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, VOCAB_SIZE, (45,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_prefill_chunks_and_decode_equal_transformers(family, changes, ids, tmp_path):
    oracle = tiny_model(family, **changes)
    folder = save_checkpoint(oracle, tmp_path, tokenizer=False)
    expected = expected_logits(oracle, ids)
    steps = [[(0, 0, ids[:30])], [(0, 30, ids[30:37])], *([(0, i, ids[i : i + 1])] for i in range(37, 45))]

    logits = run_model(folder, steps)

    for got, position in zip(logits, [29, 36, *range(37, 45)], strict=True):
        assert_close(got[0], expected[position])


@pytest.mark.parametrize("family", DENSE)
def test_norms_rotation_and_kv_write_in_one_launch_give_the_same_logits(family, ids, tmp_path, monkeypatch):
    """As a GPU's native row has them; here the plain torch one of that op is taken for native."""
    asked = []

    def is_native(self, op, **sizes):
        asked.append(op)
        return op.endswith("rope_kv_write")

    monkeypatch.setattr(Placement, "is_native", is_native)
    oracle = tiny_model(family)
    steps = [[(0, 0, ids[:30])], *([(0, i, ids[i : i + 1])] for i in range(30, 45))]

    logits = run_model(save_checkpoint(oracle, tmp_path, tokenizer=False), steps)

    assert {"qk_norm_rope_kv_write" if family == "qwen3" else "rope_kv_write"} <= set(asked)
    expected = expected_logits(oracle, ids)
    for got, position in zip(logits, range(29, 45), strict=True):
        assert_close(got[0], expected[position])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_cut_anywhere_gives_the_same_logits(family, ids, tmp_path):
    oracle = tiny_model(family)
    folder = save_checkpoint(oracle, tmp_path, tokenizer=False)
    expected = expected_logits(oracle, ids)[-1]
    for cut in range(1, len(ids)):
        [_, logits] = run_model(folder, [[(0, 0, ids[:cut])], [(0, cut, ids[cut:])]])
        assert_close(logits[0], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_step_of_decodes_and_prefills_equals_each_alone(family, ids, tmp_path):
    oracle = tiny_model(family)
    folder = save_checkpoint(oracle, tmp_path, tokenizer=False)
    prompts = {0: ids[:17], 3: ids[5:21], 1: ids[7:40], 2: ids[:1]}
    steps = [
        [(0, 0, prompts[0][:16]), (3, 0, prompts[3][:15])],
        [(0, 16, prompts[0][16:]), (2, 0, prompts[2]), (3, 15, prompts[3][15:]), (1, 0, prompts[1])],
    ]
    logits = run_model(folder, steps)[1]
    for row, slot in enumerate((0, 2, 3, 1)):
        assert_close(logits[row], expected_logits(oracle, prompts[slot])[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_transformers_generate(family, tmp_path):
    oracle = tiny_model(family)
    llm = LLM(str(save_checkpoint(oracle, tmp_path)), dtype="float32", max_kv_tokens=512)
    prompts = ["hello there", "a", "ünïcode ✓", "some longer prompt that needs more than a page or two"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0))
    for output in outputs:
        prompt_ids = output.prompt_token_ids
        expected = expected_logits(oracle, prompt_ids + output.outputs[0].token_ids).log_softmax(-1)
        for i, (token, entry) in enumerate(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)):
            row = expected[len(prompt_ids) - 1 + i]
            assert row[token] >= row.max() - 2 * TOLERANCE * row.std()
            assert entry[token].logprob == pytest.approx(row[token].item(), abs=1e-3)
