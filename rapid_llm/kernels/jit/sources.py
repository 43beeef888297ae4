"""The CUDA C++ sources of the package and the options that all of them are compiled with. Torch-free.

A source is a file of this folder, and the module of the row that launches it names it: ``CUDA_SOURCE = "add_rms_norm.cu"``.
That constant is the whole convention; ``provenance.source_hash`` reads it, so that evidence covers what is compiled.
"""

from pathlib import Path

from rapid_llm.envs import nearest
from rapid_llm.errors import ConfigError

FOLDER = Path(__file__).parent
OPTIONS = ("--std=c++17",)
"""Besides the architecture. Maths stays exact: no fast-math, subnormal numbers kept."""


def read_source(name: str) -> str:
    """The text of the source ``name`` ("add_rms_norm.cu"). Raises: ConfigError when there is no such file."""
    path = FOLDER / name
    if path.suffix != ".cu" or path.parent != FOLDER or not path.is_file():
        wanted = nearest(name, (file.name for file in FOLDER.glob("*.cu")))
        raise ConfigError(f"no CUDA source in {FOLDER}", got=name, wanted=wanted, change="correct CUDA_SOURCE")
    return path.read_text(encoding="utf-8")


def what_is_compiled(name: str) -> str:
    """The source and the options, without empty lines, indentation and lines that are a comment: what evidence hangs on.

    Raises: ConfigError as ``read_source`` does.
    """
    lines = (line.strip() for line in read_source(name).splitlines())
    return "\n".join([" ".join(OPTIONS), *(line for line in lines if line and not line.startswith("//"))])
