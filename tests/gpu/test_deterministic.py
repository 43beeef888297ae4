"""With ``deterministic`` ids and log-probs are the same bits on a GPU: alone, in a crowd, in captured steps and launched ones."""

import random

import pytest

from rapid_llm import LLM, ConfigError, SamplingParams
from tests.tiny_model import save_checkpoint, tiny_model

pytestmark = pytest.mark.case("F2")

WATCHED = [(7 * i) % 256 for i in range(75)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True, logprobs=3, prompt_logprobs=1)


def tiny(family, folder, head_dim=64):
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}
    return str(save_checkpoint(tiny_model(family, max_position_embeddings=512, **sizes), folder))


@pytest.fixture(scope="module", params=[("llama", 64), ("qwen3", 128)], ids=["llama", "qwen3"])
def folder(request, tmp_path_factory):
    """Heads of 64 and of 128, for which other rows of attention may serve."""
    family, head_dim = request.param
    return tiny(family, tmp_path_factory.mktemp("tiny"), head_dim)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request):
    return request.param


def start(folder, dtype, **options):
    values = {"max_kv_tokens": 1 << 15, "max_num_seqs": 64, "deterministic": True} | options
    return LLM(folder, device="cuda", dtype=dtype, **values)


def seen(output):
    return output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs


@pytest.fixture(scope="module")
def alone(folder, dtype):
    return seen(start(folder, dtype, prefix_cache=False).generate([WATCHED], PARAMS)[0])


@pytest.mark.parametrize("place", [0, 7, 63])
@pytest.mark.parametrize("max_batched_tokens", [64, 2048])
def test_a_row_of_a_batch_of_64_has_the_bits_that_it_has_alone(folder, dtype, alone, place, max_batched_tokens):
    """At 64 tokens a step the prompt is cut into chunks too."""
    draw = random.Random(place)
    prompts = [[draw.randrange(256) for _ in range(draw.randint(1, 120))] for _ in range(64)]
    params = [SamplingParams(seed=i, max_tokens=draw.randint(1, 120), ignore_eos=True) for i in range(64)]
    prompts[place], params[place] = WATCHED, PARAMS
    llm = start(folder, dtype, max_batched_tokens=max_batched_tokens)
    assert seen(llm.generate(prompts, params)[place]) == alone


def test_launched_steps_and_cached_prefixes_have_the_same_bits(folder, dtype, alone):
    assert seen(start(folder, dtype, cuda_graphs=False).generate([WATCHED], PARAMS)[0]) == alone
    llm = start(folder, dtype)
    llm.generate([WATCHED], SamplingParams(max_tokens=1))
    longer = llm.generate([WATCHED], SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True, logprobs=3))[0]
    assert longer.num_cached_tokens
    assert seen(longer)[:2] == alone[:2]


@pytest.mark.parametrize(("family", "options"), [("qwen3_moe", {}), ("llama", {"quantize": "int8"})])
def test_what_is_not_known_to_keep_the_bits_is_refused(tmp_path, family, options):
    with pytest.raises(ConfigError, match="deterministic cannot be kept by"):
        start(tiny(family, tmp_path), "bfloat16", **options)
