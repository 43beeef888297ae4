"""docs/add-a-kernel.md, followed word for word in a copy of the package, leads to an op that verifies and explains itself."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-a-kernel.md").read_text()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The package with the page's files written and its one edit made."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "rapid_llm", folder / "rapid_llm", ignore=shutil.ignore_patterns("__pycache__"))
    files = re.findall(r"```python\n# (rapid_llm/\S+)\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(files) == 7
    for name, text in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    [(name, new, old)] = re.findall(r"In `(\S+)`, put `(.+?)` in place of `(.+?)`", PAGE)
    text = (folder / name).read_text()
    assert text.count(old) == 1
    (folder / name).write_text(text.replace(old, new))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run(tree, *arguments, code=None):
    others = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), *others])}
    environment["RAPID_DATA_DIR"] = str(tree / "data")
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "rapid_llm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tree, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


DEVICE = [] if torch.cuda.is_available() else ["--device", "h200"]


def test_verify_passes_and_explain_tells(tree):
    assert "passed   relu_squared  torch.relu_squared" in run(tree, "kernels", "verify", "--op", "relu_squared")
    answer = json.loads(run(tree, "kernels", "explain", "relu_squared", *DEVICE, "--json"))
    [loser] = answer["rejected"]
    if torch.cuda.is_available():  # then it was verified just now
        assert (answer["chosen"], loser["name"]) == ("triton.relu_squared", "torch.relu_squared")
    else:
        assert (answer["chosen"], loser["name"]) == ("torch.relu_squared", "triton.relu_squared")
        assert "no passing run of its source" in " ".join(loser["reasons"])


RUN_CASES = """
import torch
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.dispatcher.dispatch import load_target
from rapid_llm.kernels.verify.case import compare
from rapid_llm.kernels.verify.runner import case_maker
if torch.cuda.is_available() is False:
    from rapid_llm.kernels.testing.number_types import install
    install()
row, contract = catalog().row("relu_squared", "triton.relu_squared"), catalog().contract("relu_squared")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
for dtype in row.dtypes:
    for sizes in contract.sweep:
        case = case_maker(catalog(), row.op)(sizes, getattr(torch, dtype), device, torch.Generator().manual_seed(0), None)
        load_target(row)(**case.arguments)
        for check in case.checks:
            assert not compare(check).problem, (dtype, sizes, compare(check).problem)
print("ran")
"""

CAN_RUN_TRITON = bool(importlib.util.find_spec("triton")) and (
    os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available()
)


@pytest.mark.parametrize(
    "code", [RUN_CASES] if CAN_RUN_TRITON else ["print('ran')"], ids=["triton" if CAN_RUN_TRITON else "no-triton"]
)
def test_the_pages_kernel_passes_its_cases(tree, code):
    assert run(tree, code=code).strip() == "ran"


@pytest.mark.skipif(not importlib.util.find_spec("ruff"), reason="ruff comes with the dev extra")
def test_the_pages_code_is_as_clean_as_the_packages(tree):
    for command in (["check"], ["format", "--check"]):
        files = [str(path.relative_to(tree)) for path in tree.rglob("*squared*") if path.suffix == ".py"]
        assert files
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *files], capture_output=True, text=True, check=False, cwd=tree
        )
        assert done.returncode == 0, done.stdout
