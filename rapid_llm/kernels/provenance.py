"""Where a fact about a kernel comes from: the hash of its source and the toolchain. Imports neither torch nor Triton.

Evidence and tuned tiles are both void once the kernel they were taken from has changed, so both carry this hash. It lies
beside the dispatcher and the tile policy because neither may import the other's folder.
"""

import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rapid_llm.envs import data_folder
from rapid_llm.errors import ConfigError
from rapid_llm.kernels.jit.sources import what_is_compiled
from rapid_llm.kernels.store import write_whole

KERNEL_PACKAGE = "rapid_llm.kernels.ops"
# Host-side modules of that package. The compiler never reads them: a new heuristic for one op must not void every record.
_HOST_MODULES = frozenset({f"{KERNEL_PACKAGE}.tile_policy", f"{KERNEL_PACKAGE}.interfaces"})

SourceFinder = Callable[[str], Path | None]


def find_source(module: str) -> Path | None:
    """The file of a module by its dotted name, found without importing it or its parents; None when there is none."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        stem = Path(folder).joinpath(*rest)
        for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def source_hash(target: str, *, find: SourceFinder | None = None) -> str:
    """Hash of what the compiler reads for ``target`` ("package.module:function").

    Covers the syntax trees of its module and, recursively, of the kernel modules it imports, and the CUDA sources that these
    name (``CUDA_SOURCE``, see ``jit/sources.py``). Comments, layout and bare strings (docstrings) are left out. The same
    source gives the same hash on every supported Python.

    Raises: ConfigError when the module, or a CUDA source that it names, has no file.
    """
    module = target.partition(":")[0]
    if find is not None:
        found = _hash_module(module, find)
    else:
        path = find_source(module)
        found = _hash_file(module, path, _stamp(path))
    if not found.cuda_sources:
        return found.trees
    # Read anew each time: the cache goes by the module's file, and an edit of the source leaves that as it was.
    parts = [found.trees, *(f"{name}={what_is_compiled(name)}" for name in found.cuda_sources)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class _Hashed(NamedTuple):
    """The hash of a module's syntax trees, the CUDA sources they name, and the files that were parsed."""

    trees: str
    cuda_sources: tuple[str, ...]
    files: tuple[Path, ...]


def keep_source_hashes() -> None:
    """Keep what this process has worked out for the next one, which then only looks whether the files are those of now.

    Parsing what a start asks about takes a third of a second. Where the data folder cannot be written, every start does.
    """
    if _new_hashes:
        _kept_hashes().update(_new_hashes)
        _new_hashes.clear()
        with contextlib.suppress(OSError):
            write_whole(_kept_path(), json.dumps(_kept_hashes()).encode())


def _stamp(path: Path | None) -> int:
    return path.stat().st_mtime_ns if path else 0


@cache
def _hash_file(module: str, path: Path | None, stamp: int) -> _Hashed:
    """Cached by the module's modification time: tests, and editors, rewrite kernels within one process."""
    name = str(path)  # not the module's: installations that share a data folder have hashes of their own
    kept = _kept_hashes().get(name, {})
    with contextlib.suppress(KeyError, TypeError, OSError):  # none, of another version, or of a file that is gone
        if kept["files"] == [_stamps(file) for file, *_ in kept["files"]]:
            return _Hashed(kept["trees"], tuple(kept["cuda_sources"]), ())
    found = _hash_module(module, find_source)
    files = [_stamps(str(file)) for file in (*found.files, Path(__file__))]
    _new_hashes[name] = {"files": files, "trees": found.trees, "cuda_sources": list(found.cuda_sources)}
    return found


_new_hashes: dict[str, Any] = {}


@cache
def _kept_hashes() -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(_kept_path().read_text())
        return kept if isinstance(kept, dict) else {}
    return {}


def _kept_path() -> Path:
    return data_folder() / "source_hashes.json"


def _stamps(file: str) -> list[object]:
    stat = os.stat(file)
    return [file, stat.st_size, stat.st_mtime_ns]


def _hash_module(root: str, find: SourceFinder) -> _Hashed:
    texts: dict[str, str] = {}
    files: list[Path] = []
    cuda_sources: set[str] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module in texts:
            continue
        path = find(module)
        if path is None:
            if module == root:
                raise ConfigError("a kernel has no source", got=module, wanted="a .py file", change="correct the row's target")
            continue  # ``from package import name`` names a function here, not a module
        parsed = _parse(path, path.stat().st_mtime_ns, module if path.name == "__init__.py" else module.rpartition(".")[0])
        texts[module] = parsed.text
        files.append(path)
        cuda_sources.update(parsed.cuda_sources)
        waiting.extend(parsed.kernel_imports)
    # The root first and without its name, so that a moved kernel is still the same kernel.
    parts = [texts.pop(root), *(f"{module}={texts[module]}" for module in sorted(texts))]
    return _Hashed(hashlib.sha256("\n".join(parts).encode()).hexdigest(), tuple(sorted(cuda_sources)), tuple(files))


class _Parsed(NamedTuple):
    """A module's canonical text, the CUDA sources it names and the names it imports from the kernel package."""

    text: str
    cuda_sources: tuple[str, ...]
    kernel_imports: tuple[str, ...]


@cache
def _parse(path: Path, stamp: int, package: str) -> _Parsed:
    """Once for all the rows that share a file, which a start asks about: parsing takes a few milliseconds."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return _Parsed(_canonical(tree), tuple(_cuda_sources(tree)), tuple(_kernel_imports(tree, package)))


def _cuda_sources(tree: ast.Module) -> Iterator[str]:
    """The values of ``CUDA_SOURCE = "name.cu"`` at the top of the tree."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            names = (target.id for target in node.targets if isinstance(target, ast.Name))
            yield from (node.value.value for name in names if name == "CUDA_SOURCE")


def _kernel_imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Every name in the kernel package that the tree imports, as module and as possible submodule."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            names = [source, *(f"{source}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name.startswith(f"{KERNEL_PACKAGE}.") and name not in _HOST_MODULES)


def _canonical(node: Any) -> str:
    """A dump of a syntax tree that does not depend on the Python that parsed it.

    ``ast.dump`` does: which empty fields it prints, and which fields there are, changed in 3.12 and 3.13. So does 3.12
    itself, which ends a nested format spec with an empty string.
    """
    if isinstance(node, ast.JoinedStr):
        return f"JoinedStr({','.join(_canonical(value) for value in node.values if not _is_empty_string(value))})"
    if isinstance(node, ast.AST):
        parts = (
            (name, value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind", "type_comment", "type_ignores")
        )
        shown = sorted(f"{name}={_canonical(value)}" for name, value in parts if value is not None and value != [])
        return f"{type(node).__name__}({','.join(shown)})"
    if isinstance(node, list):
        return f"[{','.join(_canonical(item) for item in node if not _is_bare_string(item))}]"
    return f"{type(node).__name__}:{node!r}"


def _is_bare_string(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_empty_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == ""


def is_installed(package: str) -> bool:
    """Whether a top-level package can be imported here. Does not import it.

    "nvrtc" is the compiler of that name, which has no package of its own: NVIDIA's wheels and toolkits bring its library.
    """
    if package == "nvrtc":
        from rapid_llm.kernels.jit.nvrtc import find_nvrtc

        return find_nvrtc() is not None
    return importlib.util.find_spec(package) is not None


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, read from its metadata; None when it is not there."""
    if not is_installed(package):
        return None
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def minor_of(version: str | None) -> str | None:
    """``"3.6"`` of ``"3.6.0+git1"``."""
    return ".".join(version.split(".")[:2]) if version else None


def triton_minor() -> str | None:
    """Major and minor of the Triton installed here, None when there is none."""
    return minor_of(installed_version("triton"))


def toolchain() -> dict[str, str | None]:
    """What compiled and ran a kernel here: the fields of an evidence record's ``toolchain``."""
    return {"torch": installed_version("torch"), "triton": triton_minor(), "python": platform.python_version()}
