"""What is loaded straight to a GPU is what a CPU loads."""

import numpy as np
import pytest
import torch

from rapid_llm.checkpoint.gguf import GgufCheckpoint
from rapid_llm.checkpoint.safetensors import SafetensorsCheckpoint
from rapid_llm.runtime.staging import place_pieces, plan_pieces
from tests.checkpoint.writers import F16, Q4_1, llama_gguf, llama_tensors, write_folder


def written(kind, folder):
    if kind in ("F16-gguf", "Q4_1-gguf"):
        # 4-bit blocks of any bytes are values; sizes are what counts here.
        random = np.random.default_rng(0)
        type_id = F16 if kind == "F16-gguf" else Q4_1
        file = llama_gguf(llama_tensors(), type_id, lambda rows: random.integers(0, 60, rows.size // 32 * 20).astype(np.uint8))
        (folder / "model.gguf").write_bytes(file.to_bytes())
        return GgufCheckpoint(folder / "model.gguf")
    tensors = llama_tensors(dtype=np.float16 if kind == "float16" else np.float32)
    if kind == "bfloat16":
        tensors = {name: (values.view(np.uint32) >> 16).astype(np.uint16) for name, values in tensors.items()}
    if kind == "odd-offset":  # every later tensor then starts between two floats
        tensors = {"a.b": np.zeros(3, np.float16), **tensors}
    return SafetensorsCheckpoint(write_folder(folder, tensors=tensors, num_shards=2))


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "odd-offset", "F16-gguf", "Q4_1-gguf"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("piece_bytes", [500, 1 << 20])
def test_a_gpu_gets_the_values_that_a_cpu_gets(kind, dtype, piece_bytes, device, tmp_path):
    source = written(kind, tmp_path)
    loaded = {}
    for place in (torch.device("cpu"), device):
        targets = {name: torch.full(info.shape, torch.nan, dtype=dtype, device=place) for name, info in source.tensors.items()}
        list(place_pieces(source, plan_pieces(source.tensors.values(), piece_bytes), targets, threads=4))
        loaded[place.type] = targets
    for name in source.tensors:
        assert torch.equal(loaded["cuda"][name].cpu(), loaded["cpu"][name]), name
