"""One JSON line a result: what was measured, on what, by which command, and how far the runs lay apart."""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy")


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest of the runs."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def write(name: str, results: dict[str, Any]) -> Path:
    """Append a line of results to results/<name>.jsonl."""
    return append(name, facts() | {"results": results})


def facts() -> dict[str, Any]:
    """What every line of a run says: when, by which command, of which commit, where. RAPID_COMMIT names it in place of git."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", *([name_of_module()] if name_of_module() else []), *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "versions": {package: _version(package) for package in PACKAGES} | {"python": platform.python_version()},
    }


def append(name: str, line: dict[str, Any]) -> Path:
    """Append a line to results/<name>.jsonl."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.jsonl"
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")
    return file


def name_of_module() -> str | None:
    """The module that was started with -m."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else None


def commit() -> str:
    """The commit measured, with a + when the tree has changes on top of it."""
    if os.environ.get("RAPID_COMMIT"):
        return os.environ["RAPID_COMMIT"]
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--", "rapid_llm"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if dirty else "")


def machine() -> str:
    """Processor and cores, and the GPU where torch sees one."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    torch = sys.modules.get("torch")
    gpu = f", {torch.cuda.get_device_name()}" if torch is not None and torch.cuda.is_available() else ""
    return f"{model}, {os.cpu_count()} cores{gpu}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
