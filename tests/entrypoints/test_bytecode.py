"""Bytecode of a torch that has none is kept for the next start, and nothing else is touched."""

import os
import subprocess
import sys

import pytest

SHOW = """
import sys
from rapid_llm.entrypoints.bytecode import keep_bytecode
keep_bytecode()
import torch
print(torch.answer, torch.__cached__)
"""


@pytest.fixture
def site(tmp_path):
    """A package called torch without bytecode."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("answer = 42\n")
    return tmp_path / "site"


def start(site, tmp_path, **variables):
    path = os.pathsep.join([str(site), *sys.path])
    env = os.environ | {"PYTHONPATH": path, "RAPID_DATA_DIR": str(tmp_path / "data")} | variables
    done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True, env=env)
    return done.stdout.split()


def bytecode_in(folder):
    return [file for file in folder.rglob("*.pyc") if "torch" in file.parts]


def test_where_python_would_keep_none_it_is_kept_in_the_data_folder(site, tmp_path):
    answer, cached = start(site, tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert answer == "42"
    assert cached.startswith(str(tmp_path / "data" / "bytecode"))
    assert len(bytecode_in(tmp_path / "data")) == 1
    assert not bytecode_in(site)


def test_where_python_keeps_it_or_nobody_wants_it_nothing_is_done(site, tmp_path):
    start(site, tmp_path, PYTHONDONTWRITEBYTECODE="1", RAPID_BYTECODE="off")
    assert not bytecode_in(tmp_path)
    start(site, tmp_path, PYTHONDONTWRITEBYTECODE="")
    assert len(bytecode_in(site)) == 1
    start(site, tmp_path, PYTHONDONTWRITEBYTECODE="1")  # it is there, so it is read
    assert not (tmp_path / "data" / "bytecode").exists()
