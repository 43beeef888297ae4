"""Fixtures of the kernel tier's tests."""

import pytest

from tests.kernels.synthetic import world as world


@pytest.fixture(autouse=True)
def _stores_of_its_own(tmp_path, monkeypatch):
    """No test, nor a process it starts, reads or writes the evidence and tiles of whoever runs it; none hangs on what ships."""
    monkeypatch.setenv("RAPID_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr("rapid_llm.kernels.store.shipped_folder", lambda kind: tmp_path / "nothing-shipped" / kind)
    monkeypatch.delenv("RAPID_KERNELS", raising=False)
