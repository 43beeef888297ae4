"""A family made for a test: rows whose modules are written to a folder, so that native rows can be had in every state."""

import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from rapid_llm.kernels.dispatcher import catalog as catalogs
from rapid_llm.kernels.dispatcher.dispatch import forget_choices
from rapid_llm.kernels.dispatcher.evidence import EvidenceRecord
from rapid_llm.kernels.ops.interfaces import CapabilityRequirement, Contract, Cost, Family, KernelSpec, TensorArg
from rapid_llm.kernels.ops.tile_policy import forget_tiles
from rapid_llm.kernels.provenance import source_hash
from rapid_llm.kernels.store import read_stores, user_folder, warn_once, write_user_store

ANYWHERE = CapabilityRequirement(device_types=("cuda", "cpu"))

CONTRACT = Contract(
    op="double",
    summary="twice x",
    phase="both",
    tensors=(TensorArg("x", ("num_tokens", "d")), TensorArg("out", ("num_tokens", "d"), written=True)),
    dtypes=("float32", "bfloat16"),
    maxima={"num_tokens": 1 << 20, "d": 1 << 16},
    sweep=({"num_tokens": 0, "d": 8}, {"num_tokens": 3, "d": 5}),
    defaults={"num_tokens": 1, "d": 4096},
    cost=lambda sizes, itemsize: Cost(*2 * (sizes["num_tokens"] * sizes["d"] * itemsize,)),
    free="num_tokens",
    hard=("huge",),
)


class World:
    """The synthetic family and its stores. ``rows`` may be set at any time before the catalog is asked."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        self.contract, self.family_rows = CONTRACT, []

    def module(self, name, body="def double(x, *, out):\n    out.copy_(x * 2)\n    return out\n"):
        """Write a kernel module; returns the target of its function."""
        sys.modules.pop(name, None)
        (self.folder / f"{name}.py").write_text(body, encoding="utf-8")
        return f"{name}:double"

    def row(self, name, **fields):
        """Add a row, with a module of its own unless a target is given."""
        fields.setdefault("target", self.module(f"kernel_{name.replace('.', '_')}"))
        fields.setdefault("requires", ANYWHERE)
        row = KernelSpec(op="double", name=name, dtypes=fields.pop("dtypes", ("float32", "bfloat16")), **fields)
        self.family_rows.append(row)
        self.load()
        return row

    def load(self):
        """Make the catalog again from what is there now."""
        family = Family("synthetic", (self.contract,), tuple(self.family_rows))
        self.monkeypatch.setitem(sys.modules, "synthetic_rows", SimpleNamespace(FAMILY=family))
        catalogs.catalog.cache_clear()
        forget_choices()

    def passed(self, row, device="cpu", **fields):
        """Store a passing record of a row as its source is now."""
        record = EvidenceRecord(
            row=row.name,
            op=row.op,
            source_hash=fields.pop("source_hash", None) or source_hash(row.target),
            device=device,
            toolchain=fields.pop("toolchain", {"torch": "2.13.0", "triton": None, "python": "3.11.7"}),
            cases={"count": 2, "ids": ["a", "b"]},
            errors={"float32": {"max_abs": 0.0, "max_rel": 0.0}},
            command="rapid-llm kernels verify --op double",
            commit="0" * 40,
            date="2026-11-29T00:00:00Z",
        )
        record = replace(record, **fields)
        path = user_folder("evidence") / f"{device}.json"
        older = [entry for store in read_stores("evidence") if store.path == path for entry in store.entries]
        write_user_store("evidence", device, [*older, asdict(record)])
        forget_choices()
        return record


@pytest.fixture
def world(tmp_path, monkeypatch):
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("RAPID_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("RAPID_KERNELS", raising=False)
    monkeypatch.setattr(catalogs, "FAMILY_MODULES", ("synthetic_rows",))
    made = World(folder, monkeypatch)
    _forget()
    made.load()
    yield made
    _forget()
    for name in [name for name in sys.modules if name.startswith("kernel_")]:
        del sys.modules[name]


def _forget():
    catalogs.catalog.cache_clear()
    forget_choices()
    forget_tiles()
    warn_once.cache_clear()
