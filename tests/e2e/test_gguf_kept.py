"""A GGUF file whose blocks are kept gives the logits of the same file dequantised, whatever types its layers are stacked of."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from rapid_llm import LLM, ConfigError, SamplingParams, build
from rapid_llm.build import choose_formats
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.config import EngineConfig
from rapid_llm.kernels.device import device_info
from rapid_llm.quantization.formats import Plain
from rapid_llm.quantization.gguf import GgufFormats
from tests.checkpoint.writers import (
    F32,
    GgufTensor,
    gguf_name,
    llama_gguf,
    llama_tensors,
    permuted,
    quantised_q4_k,
    quantised_q6_k,
    write_folder,
)
from tests.e2e.test_families_match_transformers import assert_close, run_model

WIDTH, HEADS = 256, 16
PROMPT = [72, 101, 108, 108, 111, 32, 226, 156, 147, 5, 9, 200, 31, 64, 17, 3, 77, 12, 90, 33, 250]
NUMBERS = {"F32": 0, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
OF_OUR_OWN = {"Q4_K": quantised_q4_k, "Q6_K": quantised_q6_k}


def written(folder, types):
    """A toy llama whose matrices are of ``types``: by a part of their names, the first that fits; all others F32."""
    tensors = llama_tensors(1, hidden=WIDTH, intermediate=WIDTH, num_heads=HEADS)
    tensors = {name: values / 16 if values.ndim > 1 else values for name, values in tensors.items()}
    sizes = {"llama.embedding_length": WIDTH, "llama.feed_forward_length": WIDTH, "llama.attention.head_count": HEADS}
    file = llama_gguf(tensors, F32, **sizes)
    for i, (name, values) in enumerate(tensors.items()):
        kind = next((kind for part, kind in types.items() if part in name), "F32")
        if kind != "F32":
            rows = np.ascontiguousarray(permuted(name, values))
            quantise = OF_OUR_OWN.get(kind) or (lambda rows, kind=kind: quantize(rows, GGMLQuantizationType[kind]))
            file.tensors[i] = GgufTensor(gguf_name(name), rows.shape, NUMBERS[kind], quantise(rows).tobytes())
    path = folder / "model.gguf"
    path.write_bytes(file.to_bytes())
    return path


def kinds(path, **options):
    """How each linear layer of the first block is kept."""
    engine = build.build_engine(
        EngineConfig(str(path), "cpu", max_kv_tokens=64, **options), open_checkpoint(path), build.StartupLedger()
    )
    layer = engine.worker.model.layers[0]
    layers = {"qkv": layer.attention.qkv, "o": layer.attention.out, "gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
    return {name: None if linear.format is None else linear.format.kind for name, linear in layers.items()}


MIXED = {"q_proj": "Q4_K", "k_proj": "Q4_K", "v_proj": "Q6_K", "o_proj": "Q4_0", "gate": "Q4_1", "up": "Q4_K", "down": "Q8_0"}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_kept_blocks_give_the_logits_of_numbers(kind, tmp_path):
    path = written(tmp_path, {"_proj": kind})
    steps = [[(0, 0, PROMPT[:-1])], [(0, len(PROMPT) - 1, PROMPT[-1:])]]
    for kept, numbers in zip(run_model(path, steps, gguf="keep"), run_model(path, steps, gguf="dequantise"), strict=True):
        assert_close(kept, numbers)
    assert set(kinds(path, gguf="keep").values()) == {kind}


def test_a_layer_stacked_of_types_that_do_not_go_together_becomes_numbers_alone(tmp_path):
    path = written(tmp_path, MIXED)
    assert kinds(path, gguf="keep") == {"qkv": None, "o": "Q4_0", "gate_up": "Q4_1+Q4_K", "down": "Q8_0"}
    [kept], [numbers] = (run_model(path, [[(0, 0, PROMPT)]], gguf=gguf) for gguf in ("keep", "dequantise"))
    assert_close(kept, numbers)


def test_a_file_on_a_cpu_becomes_numbers_unless_it_is_asked_to_be_kept(tmp_path):
    path = written(tmp_path, {"_proj": "Q8_0"})
    assert set(kinds(path).values()) == set(kinds(path, gguf="dequantise").values()) == {None}


def test_numbers_of_a_file_may_be_rounded_to_another_format(tmp_path):
    path = written(tmp_path, {"_proj": "Q8_0"})
    assert set(kinds(path, quantize="int4").values()) == {"int4"}


@pytest.mark.parametrize("native", [True, False], ids=["native", "plain-torch-only"])
def test_a_gpu_keeps_blocks_where_more_than_plain_torch_reads_them(native, tmp_path, monkeypatch):
    class Row:
        fallback = not native

    monkeypatch.setattr(build, "choose", lambda op, **_: Row)
    source, device = open_checkpoint(written(tmp_path, {"_proj": "Q8_0"})), device_info("h200")
    formats = choose_formats(EngineConfig(), source, device, "bfloat16")
    assert (formats.of(["model.layers.0.mlp.down_proj"], WIDTH) is not None) is native
    assert isinstance(choose_formats(EngineConfig(gguf="keep"), source, device, "bfloat16"), GgufFormats)
    assert isinstance(choose_formats(EngineConfig(gguf="dequantise"), source, device, "bfloat16"), Plain)


def test_settings_that_contradict_or_have_no_effect_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="gguf is not supported: got 'kept'"):
        EngineConfig(gguf="kept")
    with pytest.raises(ConfigError, match="contradict each other: got quantize 'int8'"):
        EngineConfig(gguf="keep", quantize="int8")
    folder = write_folder(tmp_path, tokenizer={})
    with pytest.raises(ConfigError, match="gguf has no effect on this checkpoint"):
        LLM(str(folder), gguf="keep")


@pytest.mark.real_model
def test_the_embedded_model_kept_in_its_bits_says_the_same():
    prompt, params = "The capital of France is", SamplingParams(temperature=0, max_tokens=8)
    models = [LLM(device="cpu", max_kv_tokens=512, gguf=gguf) for gguf in ("keep", None)]
    kept, numbers = (model.generate(prompt, params)[0].outputs[0].text for model in models)
    assert kept == numbers
