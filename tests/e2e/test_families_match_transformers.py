"""Logits of tiny random llama checkpoints equal transformers', whole prompts, chunks and steps with cache alike.

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
from rapid_llm.step import Chunk, PageUpdate, SlotSetup, StepPlan
from tests.tiny_model import VOCAB_SIZE, save_checkpoint, tiny_llama

TOLERANCE = 1e-4

SHAPES = [
    pytest.param({}, id="tied-gqa2"),
    pytest.param({"tie_word_embeddings": False}, id="untied"),
    pytest.param({"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64}, id="gqa8-d64"),
    pytest.param({"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 80}, id="mha-d80"),
    pytest.param({"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 576}, id="odd-heads-9-of-3"),
    pytest.param({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 96, "hidden_size": 80}, id="odd-heads-5-d96"),
    pytest.param({"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 112, "hidden_size": 56}, id="gqa7-d112"),
    pytest.param({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}, id="d128"),
    pytest.param({"attention_bias": True, "mlp_bias": True}, id="biases"),
    pytest.param({"rope_theta": 500_000.0, "vocab_size": 1031}, id="rope-theta-odd-vocabulary"),
]


def run_model(folder, steps, device="cpu"):
    """Logits after every step; ``steps`` lists, per step, (slot, start, ids) of each sequence's chunk, decodes first."""
    engine = build_engine(
        EngineConfig(str(folder), device, "float32", max_kv_tokens=512), open_checkpoint(folder), StartupLedger()
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
                plan.pages.append(PageUpdate(slot, column, free_pages.pop(0)))
            lengths[slot] = start + len(ids)
            (plan.decodes if len(ids) == 1 else plan.prefills).append(Chunk(slot, start, tuple(ids), samples=True))
        worker.submit(plan)
    return seen


def expected_logits(oracle, ids):
    """[len(ids), vocab_size] of one sequence."""
    with torch.no_grad():
        return oracle(torch.tensor([ids])).logits[0]


def assert_close(logits, expected):
    """Equal to within TOLERANCE of their spread."""
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE * expected.std().item())


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, VOCAB_SIZE, (45,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("changes", SHAPES)
def test_prefill_chunks_and_decode_equal_transformers(changes, ids, tmp_path):
    oracle = tiny_llama(**changes)
    folder = save_checkpoint(oracle, tmp_path, tokenizer=False)
    expected = expected_logits(oracle, ids)
    steps = [[(0, 0, ids[:30])], [(0, 30, ids[30:37])], *([(0, i, ids[i : i + 1])] for i in range(37, 45))]

    logits = run_model(folder, steps)

    for got, position in zip(logits, [29, 36, *range(37, 45)], strict=True):
        assert_close(got[0], expected[position])


def test_a_prompt_cut_anywhere_gives_the_same_logits(ids, tmp_path):
    oracle = tiny_llama()
    folder = save_checkpoint(oracle, tmp_path, tokenizer=False)
    expected = expected_logits(oracle, ids)[-1]
    for cut in range(1, len(ids)):
        [_, logits] = run_model(folder, [[(0, 0, ids[:cut])], [(0, cut, ids[cut:])]])
        assert_close(logits[0], expected)


def test_a_ragged_step_of_decodes_and_prefills_equals_each_alone(ids, tmp_path):
    oracle = tiny_llama()
    folder = save_checkpoint(oracle, tmp_path, tokenizer=False)
    prompts = {0: ids[:17], 3: ids[5:21], 1: ids[7:40], 2: ids[:1]}
    steps = [
        [(0, 0, prompts[0][:16]), (3, 0, prompts[3][:15])],
        [(0, 16, prompts[0][16:]), (2, 0, prompts[2]), (3, 15, prompts[3][15:]), (1, 0, prompts[1])],
    ]
    logits = run_model(folder, steps)[1]
    for row, slot in enumerate((0, 2, 3, 1)):
        assert_close(logits[row], expected_logits(oracle, prompts[slot])[-1])


def test_greedy_text_equals_transformers_generate(tmp_path):
    oracle = tiny_llama()
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
