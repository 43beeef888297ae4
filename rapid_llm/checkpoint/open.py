"""One door for every kind of checkpoint: the kind is told by what lies on disk."""

from pathlib import Path

from rapid_llm.checkpoint.gguf import GgufCheckpoint
from rapid_llm.checkpoint.safetensors import SafetensorsCheckpoint
from rapid_llm.checkpoint.source import CheckpointSource
from rapid_llm.errors import CheckpointError

_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # zip archives of torch.save; bare pickles
_WANTED = "a folder with config.json and .safetensors files, or a .gguf file"


def open_checkpoint(path: str | Path) -> CheckpointSource:
    """Open a checkpoint: headers, sizes and tokenizer parts are read and checked, weights are not yet.

    Args:
        path: a folder in Hugging Face layout, a .gguf file, or a folder that holds exactly one .gguf file.

    Raises:
        CheckpointError: nothing there, of a kind that is not read (pickle never is), or broken; names file, tensor or key.
    """
    try:
        path = Path(path).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, nobody's home, a null byte
        got = str(error)[:120]
        raise CheckpointError("the model's path cannot be used", got=got, wanted=_WANTED, change="check the path") from error
    if is_folder:
        return _open_folder(path)
    if not is_file:
        raise CheckpointError(f"{path} is no checkpoint", got="no such file or folder", wanted=_WANTED, change="check the path")
    return _open_file(path)


def _open_file(path: Path) -> CheckpointSource:
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read", got=str(error.strerror), change="check its rights") from error
    if start == b"GGUF" or path.suffix == ".gguf":
        return GgufCheckpoint(path)
    if path.suffix in _PICKLES or start.startswith(_PICKLE_STARTS):
        raise _pickle_refused(path)
    change = "name its folder" if path.suffix == ".safetensors" else "check the path"
    raise CheckpointError(f"{path} is no checkpoint", got=f"a file that begins with {start!r}", wanted=_WANTED, change=change)


def _open_folder(folder: Path) -> CheckpointSource:
    names = sorted(entry.name for entry in folder.iterdir())
    ggufs = [name for name in names if name.endswith(".gguf")]
    has_weights = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)
    if "config.json" in names and has_weights:
        return SafetensorsCheckpoint(folder)
    if len(ggufs) == 1:
        return GgufCheckpoint(folder / ggufs[0])
    if ggufs:
        raise CheckpointError(
            f"{folder} holds several .gguf files", got=", ".join(ggufs[:8]), wanted="one", change="name the file"
        )
    pickles = [name for name in names if Path(name).suffix in _PICKLES]
    if pickles and not has_weights:
        raise _pickle_refused(folder / pickles[0])
    missing = "config.json" if has_weights else ".safetensors files"
    got = f"no {missing} in it" if names else "an empty folder"
    raise CheckpointError(f"{folder} is no checkpoint", got=got, wanted=_WANTED, change="check the path or fetch the rest")


def _pickle_refused(path: Path) -> CheckpointError:
    change = "convert the checkpoint to safetensors"
    return CheckpointError(
        f"{path} is a pickle, which is never loaded", got="code that would run", wanted="safetensors", change=change
    )
