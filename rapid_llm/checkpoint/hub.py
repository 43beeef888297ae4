"""Models by name: what "org/name" means, and where it lies in the Hugging Face hub's cache on this disk.

The cache is the one that huggingface_hub keeps: models--org--name with refs (branch or tag to commit), snapshots (the files of a
commit, as links) and blobs. It is read here without that package; ``hub_download.py`` fetches what is missing, with it.
Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rapid_llm.checkpoint.json_file import read_json_object
from rapid_llm.errors import CheckpointError, ConfigError

MAIN = "main"
"""The revision of a model for which none is named."""
INSTALL_COMMAND = "pip install 'rapid-llm[hub]'"
CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
COMMIT = re.compile(r"[0-9a-f]{40}")
SHARD = re.compile(r"-\d{5}-of-(\d{5})\.(?:safetensors|gguf)$")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9_.+@-]+(?:/[A-Za-z0-9_.+@-]+)*")
_TRUE = ("1", "ON", "YES", "TRUE")
_LISTED = 20


@dataclass(frozen=True)
class ModelName:
    """A model of the hub.

    Attributes:
        repo: "org/name".
        file: the .gguf file asked for, by its path in the repository.
        tag: in place of a file, a part of the name of exactly one .gguf file ("Q4_K_M"), in letters of any case.
    """

    repo: str
    file: str | None = None
    tag: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}:{self.choice}" if self.choice else self.repo

    @property
    def choice(self) -> str | None:
        """File or tag: what stands after the colon."""
        return self.file or self.tag

    @property
    def folder(self) -> str:
        """Its folder in the cache. Names hold no "--", so two models never share one."""
        return "models--" + self.repo.replace("/", "--")


@dataclass(frozen=True)
class Absent:
    """A model that is not whole in the cache and may be downloaded.

    Attributes:
        name, revision: what was asked for.
        cache: folder of the cache.
        missing: what of it is not there.
    """

    name: ModelName
    revision: str
    cache: Path
    missing: tuple[str, ...]


def parse_model_name(text: str) -> ModelName:
    """Read "org/name", "org/name:file.gguf", "org/name:folder/file.gguf" or "org/name:Q4_K_M".

    Raises:
        CheckpointError: no such name. One that passes cannot lead out of its folder of the cache.
    """
    repo, colon, choice = text.partition(":")
    parts = repo.split("/")
    if len(parts) == 2 and all(map(_PART.fullmatch, parts)) and not ("--" in repo or ".." in repo or repo.endswith(".git")):
        if not colon:
            return ModelName(repo)
        if choice.endswith(".gguf") and stays_inside(choice):
            return ModelName(repo, file=choice)
        if _TAG.fullmatch(choice) and not choice.endswith((".safetensors", *PICKLES)):
            return ModelName(repo, tag=choice)
    wanted = "a path that exists, or org/name or org/name:file.gguf in letters, digits, '-', '_' and '.'"
    problem = f"{text[:200]!r} is no model"
    raise CheckpointError(problem, got="no path of this disk and no name of the hub", wanted=wanted, change="correct it")


def stays_inside(path: str) -> bool:
    """Whether ``path``, from a user or a server, is a plain relative path that leads out of no folder."""
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and not any(part in ("", ".", "..") for part in parts)


def cache_folder() -> Path:
    """The hub's cache, where huggingface_hub looks for it too. An empty variable counts as not set; the folder need not exist."""
    variables = os.environ
    home = variables.get("HF_HOME") or os.path.join(variables.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    folder = variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(folder)))


def offline_switch(offline: bool = False) -> str:
    """What forbids downloads: the setting, or the variable that says so; empty where nothing does."""
    if offline:
        return "offline"
    name = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
    return name if os.environ.get(name, "").upper() in _TRUE else ""


def find_model(model: str | os.PathLike[str], revision: str | None = None, *, offline: bool = False) -> Path | Absent:
    """Where a model lies on this disk. Nothing is downloaded, and for a name nothing outside the cache is read.

    Args:
        model: a path, which wins wherever it exists, or a name that parse_model_name reads.
        revision: branch, tag or full commit hash of a name; None is "main".
        offline: refuse what would have to be downloaded. The variables HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE say the same.

    Returns: a path for open_checkpoint, or what hub_download.download takes. A path is handed on as it is.

    Raises:
        ConfigError: a revision that no name goes with, or that cannot be one of git's.
        CheckpointError: neither path nor name; or offline, and something is missing.
    """
    if not isinstance(model, str) or _is_path(model):
        if revision is not None:
            wanted = "a model of the hub, as org/name"
            raise ConfigError("revision has no effect on a path", got=str(model), wanted=wanted, change="leave revision out")
        return Path(model)
    name, revision = parse_model_name(model), _checked_revision(MAIN if revision is None else revision)
    if os.path.exists(name.repo):  # and the whole text does not: either may be meant, and a guess could load other weights
        change = f"name the file, as {name.repo}/FILE.gguf, or run it from another folder"
        raise CheckpointError(f"{name.repo} is a path here, which wins over the hub", got=str(name), change=change)
    cache = cache_folder()
    found = look(name, _snapshot(cache / name.folder, revision))
    if isinstance(found, Path):
        return found
    absent, switch = Absent(name, revision, cache, found), offline_switch(offline)
    if switch:
        raise _offline_refusal(absent, switch)
    return absent


def look(name: ModelName, snapshot: Path | None) -> Path | tuple[str, ...]:
    """What open_checkpoint takes, if the snapshot holds everything that is needed; else what is missing.

    A file of a snapshot is a link to a blob, and a blob gets its name only once it is whole.
    """
    files = [] if snapshot is None else sorted(at.relative_to(snapshot).as_posix() for at in snapshot.rglob("*") if at.is_file())
    ggufs = [file for file in files if file.endswith(".gguf")]
    if name.choice:
        chosen = choose_gguf(name, ggufs)
        return snapshot / chosen if snapshot and chosen else (name.file or f"a .gguf file with {name.tag!r} in its name",)
    if snapshot is None or not files:
        return ("every file",)
    if len(ggufs) == 1 and not has_safetensors(files):
        return snapshot / ggufs[0]
    missing = tuple(file for file in (CONFIG_FILE, TOKENIZER_FILE, *weight_files(files, snapshot)) if file not in files)
    return missing or snapshot


def choose_gguf(name: ModelName, ggufs: Sequence[str]) -> str | None:
    """The file that ``name`` asks for, if it is among these.

    Raises: CheckpointError when its tag stands in the names of several.
    """
    if name.tag is None:
        return name.file if name.file in ggufs else None
    hits = [file for file in ggufs if name.tag.lower() in PurePosixPath(file).name.lower()]
    if len(hits) > 1:
        raise several_ggufs(name, hits)
    return hits[0] if hits else None


def has_safetensors(files: Collection[str]) -> bool:
    """Whether weights in Hugging Face layout are among ``files``, or the index that names them."""
    return any("/" not in file and file.endswith((".safetensors", ".safetensors.index.json")) for file in files)


def weight_files(files: Collection[str], folder: Path) -> list[str]:
    """The weights that the safetensors reader opens in a folder of these files, or what it takes to tell.

    Args:
        files: names of what is there, or will be.
        folder: where the index is read, once it is there.
    """
    from rapid_llm.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE

    if SINGLE_FILE in files:
        return [SINGLE_FILE]
    if INDEX_FILE in files and (folder / INDEX_FILE).is_file():
        weight_map = read_json_object(folder / INDEX_FILE).get("weight_map")
        return sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []  # the reader refuses the latter
    found = [file for file in files if "/" not in file and file.endswith(".safetensors")]
    if len(found) == 1 and INDEX_FILE not in files and not SHARD.search(found[0]):
        return found
    return [INDEX_FILE if has_safetensors(files) else "*.safetensors"]


def several_ggufs(name: ModelName, ggufs: Sequence[str]) -> CheckpointError:
    """The refusal of a name that does not say which of several files is meant."""
    change = f"name it, as {name.repo}:{ggufs[0]}"
    return CheckpointError(f"{name} may be any of several .gguf files", got=listing(ggufs), wanted="one", change=change)


def listing(names: Sequence[str]) -> str:
    """The names with commas between; of very many, the first."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _is_path(model: str) -> bool:
    """Whether ``model`` exists on this disk, or is written as only a path is."""
    repo, colon, _ = model.partition(":")
    is_written_so = model.startswith(("/", "./", "../", "~")) or (not colon and model.endswith((".gguf", ".safetensors")))
    return is_written_so or repo.count("/") != 1 or os.path.exists(model)


def _checked_revision(revision: str) -> str:
    parts = revision.split("/")
    if not _REVISION.fullmatch(revision) or len(revision) > 255 or any(part in (".", "..") for part in parts):
        wanted = "a branch, a tag or a full commit hash"
        raise ConfigError("revision cannot be used", got=repr(revision)[:120], wanted=wanted, change="correct it")
    return revision


def _snapshot(store: Path, revision: str) -> Path | None:
    """Folder of the commit that ``revision`` stands for in the cache, if that is known there."""
    commit = revision
    if not COMMIT.fullmatch(commit):
        try:
            commit = (store / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
    return store / "snapshots" / commit if COMMIT.fullmatch(commit) else None


def _is_whole(name: ModelName, snapshot: Path) -> bool:
    try:
        return isinstance(look(name, snapshot), Path)
    except CheckpointError:
        return False


def _offline_refusal(absent: Absent, switch: str) -> CheckpointError:
    """Says what is missing, and which other commit of the model is whole, if one is."""
    kept = sorted((absent.cache / absent.name.folder / "snapshots").glob("*"))
    whole = [at.name for at in kept if COMMIT.fullmatch(at.name) and _is_whole(absent.name, at)]
    change = "allow the download once, or name a path" + (f", or take revision {whole[0]}, which is there" if whole else "")
    problem = f"{absent.name} (revision {absent.revision}) is not whole in {absent.cache}"
    return CheckpointError(problem, got=f"{switch}, and missing: {listing(absent.missing)}", change=change)
