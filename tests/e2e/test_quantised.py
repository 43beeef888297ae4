"""A model whose weights are rounded while they are loaded says what a float model with the rounded weights says."""

import pytest
import torch

from rapid_llm import LLM, ConfigError, SamplingParams
from tests.e2e.test_families_match_transformers import DENSE, FAMILIES, assert_close, run_model
from tests.quantization.test_online import KINDS, quantised
from tests.tiny_model import VOCAB_SIZE, expected_logits, save_checkpoint, tiny_model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(3)).tolist()


def with_rounded_weights(oracle, kind):
    """The oracle, every linear layer but the head and the routers rounded."""
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith(("_proj", "_proj.weight")):
                for matrix in parameter.view(-1, *parameter.shape[-2:]):  # a stack's, one after the other
                    matrix.copy_(quantised(kind, matrix.detach()).numbers())
    return oracle


EXPERT_KINDS = ("fp8", "int8", "int4")


@pytest.mark.parametrize(
    ("family", "kind"), [(family, kind) for family in FAMILIES for kind in KINDS if family in DENSE or kind in EXPERT_KINDS]
)
def test_logits_equal_those_of_a_float_model_with_the_rounded_weights(family, kind, ids, tmp_path):
    oracle = tiny_model(family, tie_word_embeddings=False)
    folder = save_checkpoint(oracle, tmp_path, tokenizer=False)
    steps = [[(0, 0, ids[:20])], *([(0, i, ids[i : i + 1])] for i in range(20, 24))]

    logits = run_model(folder, steps, quantize=kind)

    expected = expected_logits(with_rounded_weights(oracle, kind), ids)
    for got, position in zip(logits, [19, 20, 21, 22, 23], strict=True):
        assert_close(got[0], expected[position])


@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_experts_whose_rows_divide_into_other_groups_than_their_inputs(kind, ids, tmp_path):
    oracle = tiny_model("qwen3_moe", hidden_size=128, mlp_only_layers=[1])  # int4: groups of 128 and of 32
    folder = save_checkpoint(oracle, tmp_path, tokenizer=False)
    [logits] = run_model(folder, [[(0, 0, ids)]], quantize=kind)
    assert_close(logits[0], expected_logits(with_rounded_weights(oracle, kind), ids)[-1])


def test_experts_that_cannot_be_kept_so_are_refused_by_layer(tmp_path):
    folder = save_checkpoint(tiny_model("qwen3_moe", moe_intermediate_size=24), tmp_path)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.experts\.0\.down_proj cannot be int4: got rows of 24"):
        LLM(str(folder), quantize="int4")


@pytest.mark.parametrize("kind", sorted({*KINDS} - {*EXPERT_KINDS}))
def test_experts_in_a_format_that_no_op_for_experts_reads_are_refused_by_layer(kind, tmp_path):
    folder = save_checkpoint(tiny_model("mixtral"), tmp_path)
    message = rf"model\.layers\.0\.block_sparse_moe\.experts cannot be served in their format: got {kind}, .*quantize='fp8'"
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), quantize=kind)


@pytest.mark.real_model
@pytest.mark.parametrize("kind", KINDS)
def test_the_embedded_model_still_knows_the_capital(kind):
    llm = LLM(device="cpu", quantize=kind, max_kv_tokens=1024)
    [output] = llm.chat(
        [{"role": "user", "content": "Name the capital of France."}], SamplingParams(temperature=0, max_tokens=16)
    )
    assert "Paris" in output.outputs[0].text


@pytest.mark.parametrize("kind", ["int2", "INT8", "", 8])
def test_a_format_that_is_not_served_is_refused(kind):
    with pytest.raises(ConfigError, match=r"quantize is not supported.*int8 \| int4"):
        LLM(quantize=kind)
