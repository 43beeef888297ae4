"""Compiled CUDA sources on disk, in ``jit/`` of the user's data folder. Torch-free.

A file's name says all that went into it, so what changes is compiled again and what does not is never wrong. Every write is
whole: of two processes that compile at once the later file replaces an equal one. A file that is damaged or cannot be written
costs a compilation and one warning, never the start.
"""

import hashlib
from pathlib import Path

from rapid_llm.envs import data_folder
from rapid_llm.kernels.jit import nvrtc, sources
from rapid_llm.kernels.store import warn_once, write_whole

_DIGEST_BYTES = hashlib.sha256().digest_size  # at the start of a file, over the rest of it


def cuda_binary(name: str, sm: int) -> bytes:
    """The binary of a source for one device: the one on disk, or compiled now and kept there.

    Args:
        name: the source, for example "add_rms_norm.cu".
        sm: compute capability as major * 10 + minor.
    Raises: ConfigError when there is no such source or no NVRTC; CudaCompileError when it does not compile.
    """
    text = sources.read_source(name)
    path = _path(name, text, sm)
    kept = _read(path)
    if kept is not None:
        return kept
    image = nvrtc.compile_cuda(name, text, sm).image
    _write(path, image)
    return image


def _path(name: str, text: str, sm: int) -> Path:
    parts = (nvrtc.compiler_identity(), *sources.OPTIONS, f"sm{sm}", text)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return data_folder() / "jit" / f"{Path(name).stem}-sm{sm}-{key[:32]}.bin"


def _read(path: Path) -> bytes | None:
    """The binary in a file; None when there is no such file, and, after one warning, when it is not as it was written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        warn_once(f"{path} cannot be read ({error}); its source is compiled anew")
        return None
    digest, image = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(image).digest() != digest:
        warn_once(f"{path} is damaged; its source is compiled anew")
        return None
    return image


def _write(path: Path, image: bytes) -> None:
    try:
        write_whole(path, hashlib.sha256(image).digest() + image)
    except OSError as error:
        warn_once(f"{path} cannot be written ({error}); its source is compiled at every start")
