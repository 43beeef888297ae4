"""Traffic of every kind on a GPU: nothing is compiled or loaded once the engine is ready, and memory is what was said then."""

import re
import subprocess

import pytest
import torch

from rapid_llm import LLM
from tests.gpu.module_loads import module_loads
from tests.soak import one_process
from tests.soak.traffic import OPTIONS
from tests.tiny_model import save_checkpoint, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = tiny_model("llama", hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    return str(save_checkpoint(model, tmp_path_factory.mktemp("tiny")))


def test_a_library_kernel_that_is_used_for_the_first_time_is_counted(device):
    there = torch.ones(33, 33, device=device)
    with module_loads() as loads:
        torch.special.bessel_j0(there)
    assert loads


def test_the_driver_loads_nothing_after_ready(folder):
    llm = LLM(folder, device="cuda", **OPTIONS)
    with module_loads() as loads:
        ends = one_process.talk_to(llm, 500, seed=2)
    assert loads == []
    assert llm._engine.worker.num_compiles == 0
    assert ends["preemptions"]


def test_the_memory_line_adds_up_to_what_the_driver_reports(folder):
    llm = LLM(folder, device="cuda", max_kv_tokens=20_000_000)
    llm.generate(["a", "the second"])
    line = next(note for note in llm.ledger.notes if note.startswith("GPU memory, GB: "))
    parts = sum(float(value) for value in re.findall(r" ([0-9.]+)(?:,|$)", line.partition(";")[0]))
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    assert parts == pytest.approx(int(subprocess.check_output(query, text=True)) * 2**20 / 1e9, rel=0.03)
