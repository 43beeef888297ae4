"""The parts of the memory line add up to what the driver says is in use."""

import re

import torch

from rapid_llm.runtime.memory_budget import MemoryBudget


def test_the_parts_add_up_to_what_the_driver_says(monkeypatch):
    reserved = iter([100_000_000, 16_100_000_000, 50_100_000_000, 51_300_000_000])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(reserved))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90_000_000_000, 143_000_000_000))
    budget = MemoryBudget(torch.device("cuda"))
    for part in ("weights", "KV pool", "workspace and graphs"):
        budget.note(part)

    line = budget.to_text()

    assert "weights 16.00, KV pool 34.00, workspace and graphs 1.20, CUDA, kernels and other programs 1.70;" in line
    assert line.endswith("53.00 of 143.00 in use, 90.00 free")
    parts = [float(value) for value in re.findall(r" ([\d.]+)[,;]", line)]
    assert abs(sum(parts) + 0.1 - 53.0) < 0.02  # 0.1 was torch's before the start
