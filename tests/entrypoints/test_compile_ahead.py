"""Compilers beside a start: none where none is needed, and none whose end could hold a start up."""

import pytest

from rapid_llm.config import EngineConfig
from rapid_llm.entrypoints import compile_ahead
from rapid_llm.entrypoints.compile_ahead import CompileAhead, cache_folder
from rapid_llm.ledger import StartupLedger


@pytest.fixture(autouse=True)
def _data_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("RAPID_DATA_DIR", str(tmp_path / "data"))


def test_a_start_on_a_cpu_starts_no_compiler(monkeypatch):
    monkeypatch.setattr(compile_ahead.subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    ledger = StartupLedger()
    with CompileAhead(EngineConfig(device="cpu"), None, ledger) as compilers:
        compilers.wait()
    assert not ledger.notes


def test_a_compiler_that_ends_early_costs_a_note(tmp_path, monkeypatch):
    """Of a model that is not there, and where no GPU is named: the engine will say it, and the start goes on until then."""
    monkeypatch.setattr(compile_ahead, "may_use_gpu", lambda config: True)
    ledger = StartupLedger()
    with CompileAhead(EngineConfig(), tmp_path / "nowhere", ledger) as compilers:
        compilers.wait()
    [note] = ledger.notes
    assert note.startswith("kernels were not compiled ahead: ")


def test_the_cache_is_looked_for_where_triton_keeps_it(tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "here"))
    assert str(cache_folder()) == triton.knobs.cache.dir
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "home"))
    assert str(cache_folder()) == triton.knobs.cache.dir
