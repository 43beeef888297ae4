"""`rapid-llm models` says what the tables say, and docs/models.md is what it prints."""

import subprocess
import sys
from pathlib import Path

from rapid_llm.checkpoint.ggml_types import BLOCK_TYPES
from rapid_llm.entrypoints.cli import main
from rapid_llm.models.registry import ARCHITECTURES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_is_what_the_command_prints(capsys):
    assert main(["models", "--markdown"]) == 0
    assert capsys.readouterr().out == PAGE.read_text()


def test_every_architecture_and_tensor_type_is_named(capsys):
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    for row in ARCHITECTURES:
        assert all(name in printed for name in (row.name, *row.hf_names))
    assert all(name in printed for name in BLOCK_TYPES)


def test_the_command_needs_no_torch():
    program = "import sys; sys.modules['torch'] = None; from rapid_llm.entrypoints.cli import main; sys.exit(main(['models']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "qwen3" in done.stdout
