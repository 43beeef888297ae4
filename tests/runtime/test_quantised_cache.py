"""Weights quantised at one start are read at the next: the same bytes, or a warning and the same model."""

import errno
import json
import os
import shutil
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rapid_llm.build import build_engine
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.config import QUANTIZE, EngineConfig
from rapid_llm.kernels import store
from rapid_llm.ledger import StartupLedger
from rapid_llm.quantization.online import Rounded
from rapid_llm.runtime import quantised_cache
from rapid_llm.runtime.quantised_cache import ENTRY_FILE, QuantisedCache
from tests.checkpoint.writers import llama_gguf, llama_tensors, write_folder
from tests.tiny_model import save_checkpoint, tiny_model


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """Entries lie in a folder of the test's own; warnings of it are not swallowed as said before."""
    monkeypatch.setenv("RAPID_QUANTIZE_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(quantised_cache, "ROOM_LEFT", 0)
    store.warn_once.cache_clear()
    return tmp_path / "kept"


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model")


def start(folder, kind="int8"):
    """Every packed tensor of the model by layer, and what the ledger noted."""
    ledger = StartupLedger()
    engine = build_engine(EngineConfig(str(folder), "cpu", max_kv_tokens=64, quantize=kind), open_checkpoint(folder), ledger)
    tensors = {}
    for number, layer in enumerate(engine.worker.model.layers):
        linears = {"qkv": layer.attention.qkv, "o": layer.attention.out, "up": layer.mlp.gate_up, "down": layer.mlp.down}
        for name, linear in linears.items():
            tensors |= {f"{number}.{name}.{part}": values for part, values in linear.weight.tensors.items()}
        tensors[f"{number}.norm"] = layer.input_norm.weight
    return tensors, "\n".join(ledger.notes)


def same(one, other):
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert torch.equal(values.view(torch.uint8), other[name].view(torch.uint8)), name


def entries(root):
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("kind", QUANTIZE)
def test_a_later_start_has_the_bytes_of_the_first_and_rounds_nothing(kind, folder, root, monkeypatch):
    first, noted = start(folder, kind)
    assert f"MB kept in {root}" in noted
    monkeypatch.setattr(Rounded, "slots", None)  # whatever rounds
    second, noted = start(folder, kind)
    same(first, second)
    assert f"weights quantised to {kind} by an earlier start" in noted
    assert len(entries(root)) == 1


def test_experts_come_back_as_they_were(tmp_path, monkeypatch):
    folder = save_checkpoint(tiny_model("qwen3_moe"), tmp_path / "experts", tokenizer=False)
    first, _ = start(folder, "int4")
    assert first["0.up.weight"].shape[0] == 8
    monkeypatch.setattr(Rounded, "slots", None)
    second, noted = start(folder, "int4")
    same(first, second)
    assert "by an earlier start" in noted


def test_files_of_an_entry_are_of_the_size_that_was_set(folder, root, monkeypatch):
    monkeypatch.setattr(quantised_cache, "FILE_BYTES", 20_000)
    first, _ = start(folder)
    [entry] = root.iterdir()
    assert len(list(entry.glob("*.safetensors"))) > 3
    same(first, start(folder)[0])


def test_each_format_has_its_entry(folder, root):
    start(folder, "int8")
    start(folder, "int4")
    assert [name.split("-")[1] for name in entries(root)] == ["int4", "int8"]


def test_a_checkpoint_that_has_changed_is_quantised_anew_and_its_old_entry_goes(folder, root):
    first, _ = start(folder)
    before = entries(root)
    write_folder(folder, tensors=llama_tensors(seed=5))
    os.utime(folder / "model.safetensors", ns=(1, 1))
    second, noted = start(folder)
    assert "kept in" in noted
    assert entries(root) != before
    assert len(entries(root)) == 1
    assert not torch.equal(first["0.o.weight"], second["0.o.weight"])


def test_entries_of_other_checkpoints_stay(folder, tmp_path, root):
    start(folder)
    start(write_folder(tmp_path / "other"))
    assert len(entries(root)) == 2


def test_an_entry_of_other_code_is_not_read(folder, root, monkeypatch):
    start(folder)
    monkeypatch.setattr(quantised_cache, "_code_hash", lambda: "other")
    assert "kept in" in start(folder)[1]
    assert len(entries(root)) == 1


def test_files_of_one_snapshot_have_an_entry_each(tmp_path, root):
    folder = tmp_path / "models--org--name" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    folder.mkdir(parents=True)
    for number in range(2):
        (folder / f"{number}.gguf").write_bytes(llama_gguf(llama_tensors(seed=number)).to_bytes())
        start(folder / f"{number}.gguf")
    assert len(entries(root)) == 2


def test_a_snapshot_of_the_hub_is_known_by_its_commit(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = write_folder(tmp_path / "hub" / "models--org--name" / "snapshots" / commit)
    first = QuantisedCache(open_checkpoint(snapshot), "int8")
    os.utime(snapshot / "model.safetensors", ns=(1, 1))
    moved = tmp_path / "elsewhere"
    shutil.move(tmp_path / "hub", moved)
    second = QuantisedCache(open_checkpoint(moved / "models--org--name" / "snapshots" / commit), "int8")
    assert first.folder == second.folder


def cut(entry):
    with next(entry.glob("*.safetensors")).open("r+b") as file:
        file.truncate(1000)


def garbled_header(entry):
    with next(entry.glob("*.safetensors")).open("r+b") as file:
        file.write(b"\xff" * 12)


def no_json(entry):
    (entry / ENTRY_FILE).write_text("{")


def another_request(entry):
    content = json.loads((entry / ENTRY_FILE).read_text())
    content["request"]["kind"] = "int4"
    (entry / ENTRY_FILE).write_text(json.dumps(content))


def a_file_outside(entry):
    content = json.loads((entry / ENTRY_FILE).read_text())
    content["files"] = {"../other/packed.safetensors": 10}
    (entry / ENTRY_FILE).write_text(json.dumps(content))


def other_shapes(entry):
    path = next(entry.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    tensors[name] = np.ascontiguousarray(tensors[name].T[:, :10])
    save_file(tensors, path)
    content = json.loads((entry / ENTRY_FILE).read_text())
    content["files"][path.name] = path.stat().st_size
    (entry / ENTRY_FILE).write_text(json.dumps(content))


@pytest.mark.parametrize("damage", [cut, garbled_header, no_json, another_request, a_file_outside, other_shapes])
def test_a_damaged_entry_costs_a_warning_and_is_written_anew(damage, folder, root):
    first, _ = start(folder)
    [entry] = root.iterdir()
    damage(entry)
    with pytest.warns(store.StoreWarning, match=f"{entry.name} cannot be used .*; the weights are quantised anew"):
        second, noted = start(folder)
    same(first, second)
    assert "kept in" in noted
    assert entries(root) == [entry.name]
    assert "by an earlier start" in start(folder)[1]


def test_a_full_disk_costs_a_warning(folder, root, monkeypatch):
    monkeypatch.setattr(quantised_cache, "ROOM_LEFT", 1 << 60)
    with pytest.warns(store.StoreWarning, match="cannot be kept in .* GB are free"):
        _, noted = start(folder)
    assert "weights quantised to int8, not kept" in noted
    assert entries(root) == []


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left on device")],
    ids=["ours", "theirs"],
)
def test_a_disk_that_fills_up_meanwhile_leaves_nothing_behind(error, folder, root, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"some")
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.warns(store.StoreWarning, match="No space left on device"):
        start(folder)
    assert entries(root) == []


def test_a_folder_that_cannot_be_made_costs_a_warning(folder, root, monkeypatch):
    root.write_text("a file in its place")
    monkeypatch.setenv("RAPID_QUANTIZE_CACHE", str(root / "below"))
    with pytest.warns(store.StoreWarning, match="cannot be kept"):
        start(folder)


def test_off_reads_and_writes_nothing(folder, root, monkeypatch):
    start(folder)
    monkeypatch.setenv("RAPID_QUANTIZE_CACHE", "off")
    assert "RAPID_QUANTIZE_CACHE is off" in start(folder)[1]
    assert len(entries(root)) == 1


def test_of_two_processes_that_write_at_once_both_are_right(folder, root, monkeypatch):
    first, _ = start(folder)
    [entry] = root.iterdir()
    shutil.rmtree(entry)
    barrier, rename = threading.Barrier(2, timeout=60), os.rename

    def together(source, target):
        barrier.wait()  # both have written beside before one is in place
        rename(source, target)

    monkeypatch.setattr(quantised_cache.os, "rename", together)
    results = [None, None]

    def run(i):
        results[i] = start(folder)[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for each in results:
        same(first, each)
    assert entries(root) == [entry.name]
    monkeypatch.setattr(quantised_cache.os, "rename", rename)
    same(first, start(folder)[0])


def test_what_a_killed_process_left_half_written_goes_after_a_day(folder, root):
    for name, age in ((".old", 2 * 86_400), (".new", 60)):
        (root / name).mkdir(parents=True)
        os.utime(root / name, (time.time() - age,) * 2)
    start(folder)
    assert [name for name in entries(root) if name.startswith(".")] == [".new"]
