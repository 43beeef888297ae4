"""What a start has compiled before it launches is what it launches."""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from rapid_llm.config import EngineConfig
from rapid_llm.entrypoints import compile_ahead
from rapid_llm.entrypoints.compile_ahead import CompileAhead
from rapid_llm.kernels.device import device_info
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.dispatcher.dispatch import load_target
from rapid_llm.kernels.measure.workloads import workload
from rapid_llm.kernels.ops.activation.swiglu import swiglu
from rapid_llm.kernels.ops.norm.rms_norm import rms_norm
from rapid_llm.kernels.ops.sampling.sample import sample
from rapid_llm.kernels.rehearsal import rehearse
from rapid_llm.kernels.testing.compile_only import compile_only
from rapid_llm.ledger import StartupLedger
from tests.compile.launches import why_not_compiled
from tests.tiny_model import save_checkpoint, tiny_model

H200 = device_info("h200")
GLUON = next(row for row in catalog().all_rows() if row.name == "gluon.flashattention2_nopad")


def launch(device):
    for rows in (1, 7, 64):
        gate_up = torch.empty((rows, 512), dtype=torch.bfloat16, device=device)
        swiglu(gate_up, out=torch.empty((rows, 256), dtype=torch.bfloat16, device=device))
        x, weight = gate_up[:, :256], torch.empty(256, dtype=torch.bfloat16, device=device)
        rms_norm(x, weight, eps=1e-6, out=torch.empty_like(x))


def test_a_rehearsal_without_memory_names_each_binary_once():
    with compile_only(H200) as record:
        launch("cpu")
    kernels = []
    with rehearse(H200, kernels.append):
        launch("meta")
    assert sorted(kernel.compile().hash for kernel in kernels) == sorted({launch.variant for launch in record.launches})


def draw(device):
    """A launch of four kernels that share functions, and those functions constants."""
    logits = torch.empty((1, 4096), dtype=torch.bfloat16, device=device)
    floats, ints = torch.empty(1, device=device), torch.empty(1, dtype=torch.int32, device=device)
    sample(logits, floats, ints, floats, floats, ints.long(), ints, out_ids=torch.empty_like(ints))


def prefill(device):
    """A launch in Gluon, another language than Triton's with the same functions."""
    if why_not := why_not_compiled(GLUON, H200):
        pytest.skip(f"{GLUON.name} {why_not}")
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "num_seqs": 1, "q_len": 512, "kv_len": 512}
    given = workload(GLUON.op, sizes, "bfloat16", device="cpu", max_sets=1).sets[0]
    load_target(GLUON)(**{name: like(value, device) if torch.is_tensor(value) else value for name, value in given.items()})


def like(tensor, device):
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def name_in_cache(kernel):
    return kernel.compile().hash


@pytest.mark.parametrize(("launch", "count"), [(draw, 4), (prefill, 1)], ids=["of-shared-functions", "in-gluon"])
def test_another_process_compiles_them_in_any_order_under_the_names_of_their_launches(launch, count, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "of launches"))
    with compile_only(H200) as record:
        launch("cpu")
    kernels = []
    with rehearse(H200, kernels.append):
        launch("meta")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "of the other process"))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        names = list(pool.map(name_in_cache, kernels[::-1]))
    assert len(names) == count
    assert sorted(names) == sorted(launch.variant for launch in record.launches)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A start on a machine whose nvidia-smi names an H200, of a small model."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nvidia-smi").write_text('#!/bin/sh\necho "NVIDIA H200, 9.0"\n')
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_ahead, "may_use_gpu", lambda config: True)
    model = save_checkpoint(tiny_model("qwen3"), tmp_path / "model")

    def begin(**settings):
        config = EngineConfig(str(model), max_num_seqs=2, max_batched_tokens=16, **settings)
        return CompileAhead(config, model, StartupLedger())

    return begin


def test_what_is_missing_is_compiled_once_and_then_found(start, tmp_path, monkeypatch):
    seen = []
    with start() as compilers:
        compilers.wait(lambda done, of: seen.append((done, of)))
    [note] = compilers._ledger.notes
    assert "kernels compiled ahead, or found" in note
    assert seen[-1][0] == seen[-1][1] == len(seen)
    [listing] = (tmp_path / "data" / "launches").glob("*.json")
    names = json.loads(listing.read_text())["kernels"]
    assert len(names) == len(seen)
    assert all(list((tmp_path / "cache" / name).glob("*.cubin")) for name in names)

    def no_more(*_, **__):
        pytest.fail("a process was started though nothing is missing")

    with monkeypatch.context() as patch:
        patch.setattr(compile_ahead.subprocess, "Popen", no_more)
        start().wait()
    (tmp_path / "cache" / names[0]).rename(tmp_path / "elsewhere")
    with start() as compilers:
        assert compilers._process is not None
    assert compilers._process.poll() is not None  # a start that fails leaves no compiler behind
