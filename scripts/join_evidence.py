"""Join the evidence stores that verify wrote for single ops: join_evidence.py FOLDER OUT writes OUT/<device>.json."""

import json
import sys
from pathlib import Path

from rapid_llm.kernels.dispatcher.catalog import catalog


def main() -> None:
    """Two kinds stay out: rows that failed, since what ships must serve, and fallback rows, which serve without evidence."""
    needs_evidence = {row.name for rows in catalog().rows.values() for row in rows if not row.fallback}
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    stores: dict[str, dict] = {}
    for file in sorted(folder.glob("*/evidence/*.json")):
        store = json.loads(file.read_text())
        joined = stores.setdefault(file.name, store | {"entries": []})
        joined["entries"] += [entry for entry in store["entries"] if entry["row"] in needs_evidence and not entry["failure"]]
    for name, store in stores.items():
        store["entries"].sort(key=lambda entry: (entry["op"], entry["row"]))
        (out / name).write_text(json.dumps(store, indent=1) + "\n")
        print(f"{out / name}: {len(store['entries'])} rows passed")


if __name__ == "__main__":
    main()
