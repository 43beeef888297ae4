"""With ``deterministic`` a request's ids and log-probs are the same bits whatever runs beside it, in however many steps."""

import pytest
import torch

from rapid_llm import LLM, ConfigError, Grammar, SamplingParams
from rapid_llm.build import choose_placement
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.config import EngineConfig
from rapid_llm.kernels.device import device_info
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.dispatcher.ranking import Question, rank
from rapid_llm.kernels.ops.tile_policy import resolve_tiles, tiles_of_one_batch
from rapid_llm.models.registry import architecture
from rapid_llm.modules.batch_invariance import batch_invariant
from tests.tiny_model import save_checkpoint, tiny_model

pytestmark = pytest.mark.case("F2")

LENGTHS = (5, 37, 70, 1, 48)
PROMPTS = [[(11 * number + 7 * i) % 256 for i in range(length)] for number, length in enumerate(LENGTHS)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=3, prompt_logprobs=1),
    SamplingParams(temperature=1.3, seed=5, max_tokens=9, ignore_eos=True, logprobs=2, top_p=0.9, logprobs_mode="processed"),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0, repetition_penalty=1.3),
    SamplingParams(temperature=0.8, seed=6, max_tokens=17, ignore_eos=True, logprobs=1, top_k=7, min_p=0.01),
    SamplingParams(temperature=1.0, seed=7, max_tokens=11, ignore_eos=True, logprobs=5, grammar=Grammar("regex", "[a-z ]{20}")),
]


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_moe"])
def folder(request, tmp_path_factory):
    return str(save_checkpoint(tiny_model(request.param), tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


def start(folder, dtype, **options):
    values = {"max_kv_tokens": 1024, "max_num_seqs": 6, "deterministic": True} | options
    return LLM(folder, device="cpu", dtype=dtype, **values)


def seen(outputs):
    """Ids and log-probs, which are compared bit by bit: == on floats that are no NaN."""
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs]


@pytest.fixture(scope="module")
def alone(folder, dtype):
    """Each request as the only one of its engine, its prompt in one step."""
    llm = start(folder, dtype, prefix_cache=False)
    return seen([llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)])


@pytest.mark.parametrize("max_batched_tokens", [16, 48, 2048])
def test_a_crowd_and_the_cut_of_prompts_change_no_bit(folder, dtype, alone, max_batched_tokens):
    llm = start(folder, dtype, max_batched_tokens=max_batched_tokens)
    assert seen(llm.generate(PROMPTS, PARAMS)) == alone


def test_the_order_of_arrival_changes_no_bit(folder, dtype, alone):
    assert seen(start(folder, dtype).generate(PROMPTS[::-1], PARAMS[::-1])) == alone[::-1]


def test_what_the_prefix_cache_holds_changes_no_bit(folder, dtype, alone):
    llm = start(folder, dtype)
    llm.generate(PROMPTS, PARAMS)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert any(output.num_cached_tokens for output in outputs)
    assert seen(outputs) == alone


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemption_changes_no_bit(folder, dtype, alone, prefix_cache):
    llm = start(folder, dtype, prefix_cache=prefix_cache)
    engine, requests = llm._engine, []
    add, step = engine.add, engine.step

    def preempting_step():
        for request in requests:
            made = len(request.token_ids) - request.prompt_len
            if request.slot is not None and made > 2 + 3 * request.num_preemptions and request.num_preemptions < 2:
                engine.scheduler.preempt(request)
        return step()

    engine.add, engine.step = lambda request: (requests.append(request), add(request)), preempting_step
    assert seen(llm.generate(PROMPTS, PARAMS)) == alone
    assert [request.num_preemptions for request in requests] == [2] * len(PROMPTS)


def test_replayed_steps_change_no_bit(folder, dtype, alone):
    llm = start(folder, dtype)
    assert seen(llm.generate(PROMPTS, PARAMS)) == alone
    assert llm._engine.worker.forward._recordings
    llm._engine.worker.forward.enabled = False
    assert seen(llm.generate(PROMPTS, PARAMS)) == alone


def test_quantised_weights_keep_the_bits_too(folder):
    llm = start(folder, "float32", quantize="int8")
    first = seen([llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)])
    assert seen(llm.generate(PROMPTS, PARAMS)) == first


@pytest.mark.parametrize("deterministic", [False, True])
def test_all_rows_go_through_one_attention_only_where_it_is_asked_for(tmp_path, deterministic):
    folder = save_checkpoint(tiny_model("llama"), tmp_path)
    source = open_checkpoint(folder)
    place = choose_placement(EngineConfig(str(folder), "cpu", deterministic=deterministic), source, device_info("cpu"))
    architecture(source.config.architecture).load()(place, source.config, max_positions=64, tied_head=True)
    attention = {question.op for question in place.questions} & {"flash_decoding", "flashattention2_nopad"}
    assert attention == {"flashattention2_nopad"} | (set() if deterministic else {"flash_decoding"})


SIZES = {
    "dense_gemm": {"num_tokens": (1, 2, 17, 64, 65, 2048), "n": (4096,), "k": (4096,)},
    "flashattention2_nopad": {"q_len": (1, 16, 17, 200, 4096), "num_heads": (32,), "num_kv_heads": (8,), "head_dim": (128,)},
    "sample": {"num_seqs": (1, 7, 256), "vocab_size": (151_936,)},
}


@pytest.mark.parametrize("op", SIZES)
@pytest.mark.parametrize("device", ["a100", "h200", "rtx5090"])
def test_the_tile_of_a_gpu_does_not_hang_on_the_batch(op, device):
    fixed = {name: values[0] for name, values in SIZES[op].items() if len(values) == 1}
    name, values = next((name, values) for name, values in SIZES[op].items() if len(values) > 1)
    with tiles_of_one_batch():
        tiles = {resolve_tiles(op, device=device_info(device), dtype="bfloat16", **fixed, **{name: value}) for value in values}
    assert len(tiles) == 1
    free = {resolve_tiles(op, device=device_info(device), dtype="bfloat16", **fixed, **{name: value}) for value in values}
    assert op == "sample" or len(free) > 1


def test_rows_of_a_library_are_left_out_on_a_gpu():
    question = Question("dense_gemm", device_info("h200"), "bfloat16", {}, here=False, batch_invariant=True)
    reasons = {verdict.row.name: verdict.reasons for verdict in rank(question, catalog(), []).rejected}
    for name in ("torch.dense_gemm", "cublas.dense_gemm"):
        assert any("library" in reason for reason in reasons[name])
    assert not any("library" in reason for reason in reasons["triton.dense_gemm"])


@pytest.mark.parametrize(
    ("op", "name"),
    [("fp8_gemm", "triton.fp8_gemm"), ("fused_moe", "triton.fused_moe"), ("rms_norm", "torch.rms_norm")],
)
def test_a_row_that_may_not_keep_the_bits_is_refused_on_a_gpu(op, name):
    with pytest.raises(ConfigError, match=f"deterministic cannot be kept by {op} on a GPU: got {name}"):
        batch_invariant(catalog().row(op, name), torch.mm, on_cpu=False)
