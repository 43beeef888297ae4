"""Compiled Python of packages that have none beside them, kept in the user's data folder.

Images for containers are often built without any (``PYTHONDONTWRITEBYTECODE``, a read-only layer), and then each start
compiles a thousand files of torch's anew: more than half of ``import torch``.
"""

import importlib.util
import os
import sys
from pathlib import Path

from rapid_llm.envs import bytecode_folder

_LARGEST = "torch"


def keep_bytecode() -> None:
    """Have this process, and those it starts, keep bytecode in ``RAPID_BYTECODE`` where Python would keep none of torch's."""
    folder = bytecode_folder()
    if folder is None or sys.pycache_prefix is not None or not _is_compiled_each_time():
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _is_compiled_each_time() -> bool:
    """Whether torch has no bytecode, and importing it would leave none."""
    spec = importlib.util.find_spec(_LARGEST)
    if spec is None or spec.cached is None or Path(spec.cached).exists():
        return False
    return sys.dont_write_bytecode or not os.access(Path(spec.cached).parents[1], os.W_OK)
