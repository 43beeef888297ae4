"""Downloads of models from the Hugging Face hub into its cache, by the huggingface_hub package. Imported when one starts."""

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rapid_llm.checkpoint.hub import (
    COMMIT,
    CONFIG_FILE,
    INSTALL_COMMAND,
    PICKLES,
    SHARD,
    TOKENIZER_FILE,
    Absent,
    ModelName,
    choose_gguf,
    has_safetensors,
    listing,
    look,
    several_ggufs,
    stays_inside,
    weight_files,
)
from rapid_llm.checkpoint.json_file import read_json_object
from rapid_llm.checkpoint.safetensors import INDEX_FILE, QUANTIZATION_FILE, SINGLE_FILE
from rapid_llm.errors import CheckpointError
from rapid_llm.models.config import ModelConfig
from rapid_llm.version import __version__

Progress = Callable[[int, int, float], None]
"""Called while a model is fetched with bytes done, bytes in all, seconds so far."""

# Read beside config, tokenizer and weights where a repository has it. What is not on these lists is never fetched.
_EXTRAS = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    QUANTIZATION_FILE,
)
_LIST_SECONDS = 30  # to wait for the list of a repository's files
_PROGRESS_SECONDS = 0.2
_LOG_IN = "set HF_TOKEN or run `hf auth login`"
_SECRET = re.compile(r"bearer\s+\S+|hf_[a-z0-9]{16,}", re.IGNORECASE)
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def download(absent: Absent, progress: Progress | None = None) -> Path:
    """Fetch what is missing and return the path for open_checkpoint. Files that came whole before are kept.

    Fetched are config, tokenizer, templates and the safetensors that will be read, or one .gguf file; never a pickle or code.
    File after file, in the calling thread: Ctrl-C ends it at once, and the client itself splits a large file over connections.

    Args:
        absent: what find_model returned.
        progress: called a few times a second, from another thread, about the bytes that are fetched once it is known which.

    Raises:
        CheckpointError: huggingface_hub is not installed; the hub cannot be reached or does not give the model; the repository
            holds nothing that is served. A model that this version cannot run is refused before its weights come.
    """
    repository = _Repository(absent)
    gguf = _gguf_to_fetch(absent.name, repository.sizes)
    if gguf is None:
        _fetch_folder(repository, progress)
    else:
        repository.fetch([gguf], progress)
    found = look(absent.name, repository.snapshot)
    if isinstance(found, Path):
        return found
    raise CheckpointError(f"{absent.name} is still not whole", got=f"no {listing(found)}", change="run it again")


class _Repository:
    """One revision of a repository on the hub, and the way its files come into the cache.

    Attributes:
        name: what was asked for.
        sizes: bytes of each file, by its path in the repository.
        snapshot: folder that the files appear in.
    """

    def __init__(self, absent: Absent) -> None:
        try:
            import huggingface_hub
        except ImportError as error:
            got = f"no huggingface_hub to download it with, and missing: {listing(absent.missing)}"
            change = f"run `{INSTALL_COMMAND}`, or name a path"
            raise CheckpointError(f"{absent.name} is not whole in {absent.cache}", got=got, change=change) from error
        self.name, self._absent, self._client = absent.name, absent, huggingface_hub
        with _explained(absent):
            api = huggingface_hub.HfApi(library_name="rapid_llm", library_version=__version__)
            info = api.model_info(absent.name.repo, revision=absent.revision, files_metadata=True, timeout=_LIST_SECONDS)
        # What a server says becomes paths, so it is held to the rules of names.
        self._commit = str(info.sha)
        if not COMMIT.fullmatch(self._commit):
            got = repr(info.sha)[:80]
            raise CheckpointError(f"{self.name.repo} has no commit", got=got, wanted="a hash", change="check HF_ENDPOINT")
        self.sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or () if stays_inside(entry.rfilename)}
        self._store = absent.cache / absent.name.folder
        self.snapshot = self._store / "snapshots" / self._commit

    def fetch(self, files: Sequence[str], progress: Progress | None = None) -> None:
        """Bring each of ``files`` that is not there yet."""
        total = sum(self.sizes.get(file, 0) for file in files if not (self.snapshot / file).is_file())
        with _no_bars(), _watched(self._store / "blobs", total, progress):
            for file in files:
                with _explained(self._absent):
                    path = self._client.hf_hub_download(
                        self.name.repo,
                        file,
                        revision=self._absent.revision,  # by its own name: then the client notes the commit it stands for
                        cache_dir=self._absent.cache,
                        library_name="rapid_llm",
                        library_version=__version__,
                    )
                if not Path(path).as_posix().endswith(f"/{self._commit}/{file}"):
                    problem = f"{self.name.repo} changed while it was fetched"
                    raise CheckpointError(problem, got=str(path), wanted=f"commit {self._commit}", change="run it again")


def _fetch_folder(repository: _Repository, progress: Progress | None) -> None:
    """Fetch a model in Hugging Face layout, weights last: what is cut short anywhere is seen to be missing something."""
    sizes, folder = repository.sizes, repository.snapshot
    repository.fetch([CONFIG_FILE])
    ModelConfig.from_hf(read_json_object(folder / CONFIG_FILE), folder / CONFIG_FILE)
    if INDEX_FILE in sizes and SINGLE_FILE not in sizes:
        repository.fetch([INDEX_FILE])
    needed = [TOKENIZER_FILE, *weight_files(sizes, folder)]
    if lost := [file for file in needed if file not in sizes]:
        got, change = f"no {listing(lost)} in it", "name another model or revision"
        raise CheckpointError(f"{repository.name.repo} cannot be served", got=got, change=change)
    repository.fetch([*(file for file in _EXTRAS if file in sizes), *needed], progress)


def _gguf_to_fetch(name: ModelName, files: Collection[str]) -> str | None:
    """The .gguf file that is named, or the only one where nothing else is served; None for a model in Hugging Face layout."""
    ggufs = sorted(file for file in files if file.endswith(".gguf"))
    if name.choice:
        chosen = choose_gguf(name, ggufs)
        if chosen is None:
            got, change = listing(ggufs) or "no .gguf file in it", "name one of those" if ggufs else "leave the file out"
            raise CheckpointError(f"{name.repo} has no {name.choice}", got=got, wanted="a .gguf file", change=change)
    elif CONFIG_FILE in files and has_safetensors(files):
        return None
    elif len(ggufs) == 1:
        chosen = ggufs[0]
    else:
        raise several_ggufs(name, ggufs) if ggufs else _not_served(name, files)
    shard = SHARD.search(chosen)
    if shard and int(shard[1]) > 1:
        problem, got = f"{chosen} of {name.repo} is a part of a split file", f"one of {int(shard[1])} parts"
        raise CheckpointError(problem, got=got, wanted="one file", change="name another")
    return chosen


def _not_served(name: ModelName, files: Collection[str]) -> CheckpointError:
    pickles = [file for file in sorted(files) if file.endswith(PICKLES)]
    if has_safetensors(files):
        got = f"no {CONFIG_FILE} in it"
    else:
        got = f"pickles, which are code and never fetched: {listing(pickles)}" if pickles else "no weights of a kind that is read"
    wanted = f"{CONFIG_FILE} and .safetensors files, or a .gguf file"
    return CheckpointError(f"{name.repo} cannot be served", got=got, wanted=wanted, change="name a converted model")


@contextmanager
def _explained(absent: Absent) -> Iterator[None]:
    """Say what to do about whatever the client raises: errors of its own, of the transport below it, of the disk."""
    try:
        yield
    except Exception as error:
        raise _explanation(error, absent) from error


def _explanation(error: BaseException, absent: Absent) -> CheckpointError:
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # "not in the cache either" is only what it tried next
    repo = absent.name.repo
    status = getattr(getattr(error, "response", None), "status_code", None)
    got = f"status {status}" if status else f"{type(error).__name__} {_one_line(error)}".strip()
    if isinstance(error, errors.GatedRepoError) or status == 403:
        change = f"ask for access on the model's page, then {_LOG_IN}"
        return CheckpointError(f"the hub does not give {repo} to this user", got=got, change=change)
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{repo} has no revision {absent.revision!r}", got=got, change="correct the revision")
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        change = f"correct the name or path, or, if the model is private, {_LOG_IN}"
        return CheckpointError(f"the hub shows no model {repo}, and there is no such path here", got=got, change=change)
    if status == 401:
        return CheckpointError("the hub refuses the token", got=got, change=f"{_LOG_IN}, with a valid token")
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return CheckpointError(f"{absent.cache} cannot be written", got=str(error.strerror), change="free it or set HF_HUB_CACHE")
    change = "check the network and run it again, or name a path; a model that is whole in the cache needs no network"
    return CheckpointError(f"{repo} could not be downloaded", got=got, wanted="an answer from the hub", change=change)


def _one_line(error: BaseException) -> str:
    """The beginning of an error's text, without what may be a secret."""
    return _SECRET.sub("[secret]", " ".join(str(error).split()))[:200]


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep the client's own progress bars off, unless its variable or the user's program has settled them."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    group = "huggingface_hub"
    if "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ or are_progress_bars_disabled(group):
        yield
        return
    disable_progress_bars(group)
    try:
        yield
    finally:
        enable_progress_bars(group)


@contextmanager
def _watched(blobs: Path, total: int, progress: Progress | None) -> Iterator[None]:
    """Report how ``blobs`` grows by ``total`` bytes: the one measure that holds for every transport and version of the client."""
    if progress is None or not total:
        yield
        return
    start, before, ended = time.perf_counter(), _bytes_in(blobs), threading.Event()

    def report() -> None:
        while not ended.wait(_PROGRESS_SECONDS):
            progress(min(max(_bytes_in(blobs) - before, 0), total), total, time.perf_counter() - start)

    watcher = threading.Thread(target=report, name="download progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    progress(total, total, time.perf_counter() - start)


def _bytes_in(folder: Path) -> int:
    """Bytes of whole and of growing files."""
    total = 0
    for file in folder.glob("*"):
        try:
            total += file.stat().st_size
        except OSError:  # it got its final name since it was listed
            continue
    return total
