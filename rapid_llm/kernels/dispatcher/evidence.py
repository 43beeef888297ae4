"""What is known to be right: records of verify runs, and the state that they give a row on a device.

A record holds for one row, one hash of its source, one device. On another device, or under another Triton, it still says that
the source is right, not how fast it is: the row serves there, ranked by heuristic. A record that failed takes the row out of
service on its device.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from rapid_llm.errors import ConfigError
from rapid_llm.kernels.device import DeviceInfo
from rapid_llm.kernels.ops.interfaces import Contract, KernelSpec, Sizes
from rapid_llm.kernels.ops.tile_policy import shape_bucket
from rapid_llm.kernels.provenance import minor_of, source_hash, triton_minor
from rapid_llm.kernels.store import StoreFile, read_stores, user_folder, warn_once, write_user_store

State = Literal["verified_here", "verified_elsewhere", "unverified", "fallback"]
"""The three states of evidence, and "fallback" for a row that serves without any."""


@dataclass(frozen=True)
class EvidenceRecord:
    """One row's verify run on one device.

    Attributes:
        row, op: what ran.
        source_hash: of the row's target when it ran.
        device: name of the device it ran on.
        toolchain: versions of "torch", "triton" (minor), "python"; None for what was not installed.
        cases: {"count": n, "ids": [...]}.
        errors: largest error by dtype: {"bfloat16": {"max_abs": x, "max_rel": y}}.
        command, commit, date: how to repeat it, of which tree, when (ISO, UTC).
        seconds: how long it took.
        latencies_us: medians by ``latency_key``; empty when nothing was measured.
        failure: the first failing case and its error; empty when all passed.
    """

    row: str
    op: str
    source_hash: str
    device: str
    toolchain: Mapping[str, str | None]
    cases: Mapping[str, Any]
    errors: Mapping[str, Mapping[str, float]]
    command: str
    commit: str
    date: str
    seconds: float = 0.0
    latencies_us: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class Evidence:
    """What the records say of one row on one device.

    Attributes:
        state: see ``State``.
        record: the record that the state rests on, None without one.
        found_hash: hash of the row's source as it is now.
        why_not: why the row is unverified; empty in every other state.
    """

    state: State
    record: EvidenceRecord | None
    found_hash: str
    why_not: str = ""


def load_records() -> tuple[EvidenceRecord, ...]:
    """Every readable record, the user's before the shipped ones."""
    return tuple(record for store in read_stores("evidence") for record in _records_of(store))


def _records_of(store: StoreFile) -> list[EvidenceRecord]:
    records = [_read_record(entry) for entry in store.entries]
    kept = [record for record in records if record is not None and record.device == store.device]
    if len(kept) < len(records):
        warn_once(f"{store.path}: {len(records) - len(kept)} of {len(records)} records are malformed; they are ignored")
    return kept


def _read_record(entry: Mapping[str, Any]) -> EvidenceRecord | None:
    """A record from its JSON object; None for one of another shape, which is evidence of nothing."""
    names = {item.name for item in fields(EvidenceRecord)}
    if not names - {"seconds", "latencies_us", "failure"} <= set(entry) <= names:
        return None
    texts = all(isinstance(entry[name], str) for name in ("row", "op", "source_hash", "device", "command", "commit", "date"))
    tables = all(isinstance(entry.get(name, {}), Mapping) for name in ("toolchain", "cases", "errors", "latencies_us"))
    if not (texts and tables and isinstance(entry.get("failure", ""), str)):
        return None
    numbers = (entry.get("seconds", 0.0), *entry.get("latencies_us", {}).values())
    versions = entry["toolchain"].values()
    # A latency that is below zero or no number would rank anywhere.
    sound = all(isinstance(number, int | float) and 0 <= number < math.inf for number in numbers)
    sound = sound and all(isinstance(version, str | None) for version in versions)
    return EvidenceRecord(**entry) if sound else None


def evidence_for(
    row: KernelSpec, device: DeviceInfo, *, triton: str | None, here: bool, records: Iterable[EvidenceRecord]
) -> Evidence:
    """The state of ``row`` on ``device``.

    Args:
        row, device: which row, where.
        triton: Triton's minor version there; not looked at unless ``here``.
        here: whether the device is this machine's: elsewhere its Triton is not known and any will do.
        records: from ``load_records``.
    """
    found = _hash_or_none(row)
    own = [record for record in records if record.row == row.name and record.op == row.op]
    same_source = [record for record in own if record.source_hash == found]
    local = [record for record in same_source if record.device == device.name and _same_triton(row, record, triton, here)]
    failed = next((record for record in local if record.failure), None)
    if failed is not None:
        return _refused(row, failed, found, f"its last run on {device.name} failed ({failed.date}): {failed.failure}")
    if local:
        return Evidence("verified_here", local[0], found)
    passed = [record for record in same_source if not record.failure]
    if passed and not row.requires.unmet(device):
        return Evidence("verified_elsewhere", passed[0], found)
    return _refused(row, None, found, _why_unverified(device, found, passed, own))


def _refused(row: KernelSpec, record: EvidenceRecord | None, found: str, why: str) -> Evidence:
    return Evidence("fallback", record, found) if row.fallback else Evidence("unverified", record, found, why)


def _why_unverified(device: DeviceInfo, found: str, passed: list[EvidenceRecord], own: list[EvidenceRecord]) -> str:
    if passed:
        return f"verified on {passed[0].device} only, and {device.name} does not meet its needs"
    if not found:
        return "its source is not there to be hashed"
    if not own:
        return f"no passing run of its source (found hash {found[:12]}, none recorded)"
    recorded = ", ".join(sorted({f"{record.source_hash[:12]} on {record.device}" for record in own}))
    return f"no passing run of its source (found hash {found[:12]}, recorded {recorded})"


def _same_triton(row: KernelSpec, record: EvidenceRecord, triton: str | None, here: bool) -> bool:
    return not here or "triton" not in row.requires.packages or minor_of(record.toolchain.get("triton")) == triton


def _hash_or_none(row: KernelSpec) -> str:
    try:
        return source_hash(row.target)
    except (ConfigError, SyntaxError):
        return ""


def latency_key(contract: Contract, dtype: str, sizes: Sizes) -> str:
    """The key of ``EvidenceRecord.latencies_us``: dtype and the bucket of the sizes that are known when a call is made."""
    return f"{dtype} {shape_bucket({name: value for name, value in sizes.items() if name not in contract.hidden})}"


def record_run(record: EvidenceRecord) -> Path:
    """Keep one run in the user's store, in place of what it repeats: that row's runs of the same source and Triton there,
    and, when it failed, every run of that source.

    Returns: the file written. Raises: ConfigError when it cannot be.
    """
    path = user_folder("evidence") / f"{record.device}.json"
    older = [old for store in read_stores("evidence") if store.path == path for old in _records_of(store)]
    kept = [old for old in older if not _repeats(record, old)]
    return write_user_store("evidence", record.device, [asdict(entry) for entry in (*kept, record)])


def record_latencies(row: KernelSpec, device: DeviceInfo, latencies_us: Mapping[str, float]) -> bool:
    """Lay measured latencies beside a row's evidence on this machine's ``device``, in the user's store.

    Args:
        latencies_us: medians by ``latency_key``; they replace older ones of the same key.

    Returns: whether there was evidence to lay them beside. Raises: ConfigError when the store cannot be written.
    """
    evidence = evidence_for(row, device, triton=triton_minor(), here=True, records=load_records())
    if evidence.state != "verified_here" or evidence.record is None:
        return False
    record_run(replace(evidence.record, latencies_us={**evidence.record.latencies_us, **latencies_us}))
    return True


def _repeats(new: EvidenceRecord, old: EvidenceRecord) -> bool:
    same_source = (old.row, old.op, old.source_hash) == (new.row, new.op, new.source_hash)
    return same_source and (bool(new.failure) or old.toolchain.get("triton") == new.toolchain.get("triton"))
