"""``rapid-llm doctor``: what this machine has, in a second. Imports neither torch nor Triton."""

import argparse
import json
import platform
import shutil
import subprocess
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from rapid_llm.errors import RapidError
from rapid_llm.version import __version__

_SMI = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader")
_SMI_SECONDS = 5
_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "jinja2")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser("doctor", help="check driver, GPU, packages, caches and kernel evidence")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run_doctor)


def run_doctor(options: argparse.Namespace) -> int:
    """Print the report; the exit code is 1 when something would stop an engine from starting."""
    report = examine()
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print("\n".join(f"{name:<17} {value}" for name, value in report.items() if name != "problems"))
        print("\n".join(f"problem           {problem}" for problem in report["problems"]) or "no problem found")
    return 1 if report["problems"] else 0


def examine() -> dict[str, Any]:
    """Every finding by name; ``problems`` lists those that would stop an engine."""
    problems: list[str] = []
    gpus = _gpus()
    report: dict[str, Any] = {
        "rapid-llm": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "gpu": "; ".join(gpus) if gpus else "none that nvidia-smi reports: the CPU rows serve",
    }
    for name in _PACKAGES:
        report[name] = _version(name)
    problems += [f"{name} is not installed: pip install rapid-llm" for name in _PACKAGES if name != "triton" and not report[name]]
    if gpus and not report["triton"]:
        problems.append("a GPU without Triton: only fallback rows would serve; pip install 'rapid-llm[gpu]'")
    report["embedded model"] = _embedded_model()
    report["hub cache"], report["huggingface_hub"] = _hub()
    report["data folder"], report["kernel evidence"] = _evidence(problems)
    report["problems"] = problems
    return report


def _gpus() -> list[str]:
    """One line a GPU, from the driver's own tool."""
    if shutil.which(_SMI[0]) is None:
        return []
    try:
        answer = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    fields = [line.split(", ") for line in answer.stdout.splitlines() if line.count(", ") == 3]
    return [f"{name}, {memory}, sm{sm.replace('.', '')}, driver {driver}" for name, driver, memory, sm in fields]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _embedded_model() -> str:
    from rapid_llm.checkpoint.embedded import find_embedded_model

    try:
        path = find_embedded_model()
    except RapidError as error:
        return f"not installed ({error.change})"
    return f"{Path(path).name}, {Path(path).stat().st_size / 1e6:.0f} MB"


def _hub() -> tuple[str, str]:
    """The folder that models are found in by name, and whether one that is missing can be downloaded."""
    from rapid_llm.checkpoint.hub import INSTALL_COMMAND, cache_folder, offline_switch

    folder, switch = cache_folder(), offline_switch()
    version = _version("huggingface_hub") or f"not installed ({INSTALL_COMMAND} downloads models by name)"
    where = f"{folder}{'' if folder.is_dir() else ' (not made yet)'}"
    return where, f"{version}{f' (no downloads: {switch} is set)' if switch else ''}"


def _evidence(problems: list[str]) -> tuple[str, str]:
    """The folder of user stores, and how many kernel rows stand in which state on this machine."""
    from rapid_llm.entrypoints.kernels_cli import list_rows
    from rapid_llm.envs import data_folder
    from rapid_llm.kernels.device import probe_device

    try:
        folder, device = data_folder(), probe_device()
        states = Counter(row["state"].replace("_", " ") for row in list_rows(device))
    except RapidError as error:
        problems.append(str(error))
        return "unknown", "unknown"
    counts = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    return f"{folder}{'' if folder.exists() else ' (not made yet)'}", f"{counts} on {device.name} (see 'rapid-llm kernels list')"
