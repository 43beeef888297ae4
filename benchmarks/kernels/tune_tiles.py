"""Fills the shipped stores on a developer's card: the search's tiles, and the rows' times beside the shipped evidence.

    python -m benchmarks.kernels.tune_tiles OUT [--op OP] [--only tiles|rows] [--recheck] [--dtype bfloat16]

Runs ``rapid-llm kernels tune`` with a data folder of its own, then writes OUT/tuned/<device>.json and OUT/evidence/<device>.json,
to be committed as the folders of the same names under rapid_llm/kernels. What OUT already holds is carried on, so that ops can be
tuned one command at a time.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rapid_llm.kernels.device import probe_device
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.provenance import source_hash
from rapid_llm.kernels.store import FORMAT, shipped_folder

_KEYS = {"tuned": ("op", "bucket", "dtype", "triton"), "evidence": ("op", "row", "source_hash")}


def main() -> None:
    """Tune, join, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--only", choices=("tiles", "rows"))
    parser.add_argument("--recheck", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    command = [sys.executable, "-m", "rapid_llm", "kernels", "tune", "--dtype", options.dtype]
    command += [part for op in options.op for part in ("--op", op)] + (["--only", options.only] if options.only else [])
    command += ["--recheck"] if options.recheck else []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        for kind in _KEYS:
            if (options.out / kind).is_dir():
                shutil.copytree(options.out / kind, data / kind)
        code = subprocess.run(command, env=os.environ | {"RAPID_DATA_DIR": folder}, check=False).returncode
        for kind in _KEYS:  # what was found before a failure is worth keeping
            write_joined(kind, probe_device().name, data / kind, shipped_folder(kind), options.out / kind)
    raise SystemExit(code)


def write_joined(kind: str, device: str, found: Path, shipped: Path, out: Path) -> None:
    """Lay what was found over what is shipped and write it. Evidence of fallback rows, and of failures, is not shipped."""
    entries = {_key(kind, entry): entry for entry in (*_read(shipped / f"{device}.json"), *_read(found / f"{device}.json"))}
    if kind == "evidence":
        native = {row.name for row in catalog().all_rows() if not row.fallback}
        entries = {key: entry for key, entry in entries.items() if entry["row"] in native and not entry["failure"]}
    entries = {key: entry for key, entry in entries.items() if _is_of_this_source(entry)}
    if not entries:
        return
    out.mkdir(parents=True, exist_ok=True)
    ordered = [entries[key] for key in sorted(entries)]
    path = out / f"{device}.json"
    path.write_text(json.dumps({"format": FORMAT, "device": device, "entries": ordered}, indent=1) + "\n")
    print(f"{path}: {len(ordered)} entries")


def _is_of_this_source(entry: dict[str, Any]) -> bool:
    """Whether an entry is of the source as it is now: what is older serves nobody and is not shipped."""
    targets = {row.name: row.target for row in catalog().all_rows()}
    target = entry.get("target") or targets.get(entry.get("row", ""))
    return target is not None and source_hash(target) == entry["source_hash"]


def _read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["entries"] if path.exists() else []


def _key(kind: str, entry: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(entry.get(name)) for name in _KEYS[kind])


if __name__ == "__main__":
    main()
