"""Evidence: what the hash covers, the three states, and stores that cannot hurt a start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rapid_llm.errors import ConfigError
from rapid_llm.kernels.device import device_info
from rapid_llm.kernels.dispatcher.evidence import EvidenceRecord, evidence_for, load_records, record_run
from rapid_llm.kernels.ops.interfaces import CapabilityRequirement
from rapid_llm.kernels.provenance import find_source, source_hash
from rapid_llm.kernels.store import StoreWarning, user_folder, write_user_store

CPU, H200, L40S, T4 = (device_info(name) for name in ("cpu", "h200", "l40s", "t4"))

KERNEL = '''"""Twice x."""

import torch


def double(x, *, out):
    """Write 2 x."""
    out.copy_(x * 2)  # twice
    return out
'''


# ---- the hash


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("Twice x.", "Two times x.", id="module-docstring"),
        pytest.param('    """Write 2 x."""\n', "", id="function-docstring"),
        pytest.param("  # twice", "  # two times", id="comment"),
        pytest.param("\n\n\ndef", "\n\ndef", id="blank-lines"),
        pytest.param("(x, *, out)", "(\n    x,\n    *,\n    out,\n)", id="layout"),
        pytest.param("import torch\n", 'import torch\n\n"""What follows doubles."""\n', id="bare-string"),
    ],
)
def test_the_hash_ignores_what_the_compiler_does_not_read(old, new, world):
    before = source_hash(world.module("kernel_x", KERNEL))
    assert old in KERNEL

    assert source_hash(world.module("kernel_y", KERNEL.replace(old, new))) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("x * 2", "x * 3", id="constant"),
        pytest.param("x * 2", "x + 2", id="operator"),
        pytest.param("x * 2", "x * 2.0", id="type-of-a-constant"),
        pytest.param("import torch", "import numpy as torch", id="import"),
        pytest.param("double(x, *, out)", "double(x, out)", id="signature"),
        pytest.param("    return out", "    return x", id="result"),
        pytest.param("import torch", "import torch\n\nSOURCE = 'asm'", id="a-string-that-is-used"),
    ],
)
def test_the_hash_follows_what_the_compiler_reads(old, new, world):
    before = source_hash(world.module("kernel_x", KERNEL))
    assert old in KERNEL

    assert source_hash(world.module("kernel_y", KERNEL.replace(old, new))) != before


def _finder(tmp_path, sources):
    def find(module):
        path = tmp_path / f"{module}.py"
        if module not in sources:
            return None
        path.write_text(sources[module], encoding="utf-8")
        return path

    return find


OPS = "rapid_llm.kernels.ops"


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param(f"from {OPS}.primitives.scan import scan", id="from-module"),
        pytest.param(f"from {OPS}.primitives import scan", id="from-package"),
        pytest.param(f"import {OPS}.primitives.scan as scan", id="import-as"),
        pytest.param("from ..primitives.scan import scan", id="relative"),
        pytest.param("from ..primitives import scan", id="relative-from-package"),
    ],
)
def test_the_hash_covers_the_primitives_that_are_imported_directly_or_not(statement, tmp_path):
    root, scan, deep = f"{OPS}.norm.rms", f"{OPS}.primitives.scan", f"{OPS}.primitives.deep"
    sources = {root: statement, scan: f"from {OPS}.primitives import deep", deep: "x = 1"}
    before = source_hash(f"{root}:f", find=_finder(tmp_path, sources))

    assert source_hash(f"{root}:f", find=_finder(tmp_path, {**sources, deep: "x = 2"})) != before
    assert source_hash(f"{root}:f", find=_finder(tmp_path, {**sources, deep: "x = 1  # the same"})) == before


def test_the_hash_leaves_out_modules_of_the_host_side(tmp_path):
    root, policy = f"{OPS}.norm.rms", f"{OPS}.tile_policy"
    sources = {root: f"from {policy} import resolve_tiles\nimport torch", policy: "x = 1"}

    before = source_hash(f"{root}:f", find=_finder(tmp_path, sources))

    assert source_hash(f"{root}:f", find=_finder(tmp_path, {**sources, policy: "x = 2"})) == before


def test_modules_that_import_each_other_have_a_hash(tmp_path):
    one, two = f"{OPS}.primitives.one", f"{OPS}.primitives.two"
    sources = {one: f"import {two}", two: f"import {one}"}

    assert len(source_hash(f"{one}:f", find=_finder(tmp_path, sources))) == 64


def test_the_hash_is_the_same_on_every_python(world):
    # Fixed here so that a Python whose syntax trees differ shows: evidence travels between machines.
    source = "from a import b\n\ndef f(x: int, *y, z=(1, 2.5), **w) -> str:\n    return f'{x!r:>{z[0]}} {y}' if w else None\n"

    assert source_hash(world.module("kernel_golden", source)) == GOLDEN


GOLDEN = "5e9940fe3f5231ae2445512c8c546a0afe3ae97116061e31ade5db76ab6d92ee"


def test_hashing_imports_neither_the_kernel_nor_torch(world):
    world.module("kernel_bomb", "raise SystemExit('imported')\n")
    program = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None; sys.path.insert(0, sys.argv[1]);"
        "from rapid_llm.kernels.dispatcher.evidence import source_hash; print(len(source_hash('kernel_bomb:double')))"
    )

    done = subprocess.run([sys.executable, "-c", program, str(world.folder)], capture_output=True, text=True, check=False)

    assert (done.stdout.strip(), done.stderr) == ("64", "")


def test_a_kernel_without_source_has_no_hash():
    with pytest.raises(ConfigError, match=r"no_such_package\.kernel"):
        source_hash("no_such_package.kernel:f")


def test_sources_are_found_without_importing_the_parents(world):
    package = world.folder / "kernel_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    (package / "inner.py").write_text("", encoding="utf-8")

    assert find_source("kernel_package.inner") == package / "inner.py"
    assert find_source("kernel_package") == package / "__init__.py"
    assert find_source("kernel_package.outer") is None


# ---- the states


def _state(row, device, triton=None, here=True):
    return evidence_for(row, device, triton=triton, here=here, records=load_records())


def test_a_row_without_a_record_is_unverified_and_says_its_hash(world):
    row = world.row("native.double")

    evidence = _state(row, CPU)

    assert evidence.state == "unverified"
    assert f"found hash {source_hash(row.target)[:12]}, none recorded" in evidence.why_not


def test_a_passing_run_on_this_device_verifies_here(world):
    row = world.row("native.double")
    record = world.passed(row, device="cpu")

    evidence = _state(row, CPU)

    assert (evidence.state, evidence.record) == ("verified_here", record)


def test_a_passing_run_on_another_device_verifies_elsewhere_where_the_needs_are_met(world):
    row = world.row("native.double", requires=CapabilityRequirement(min_sm=80))
    world.passed(row, device="h200")

    assert _state(row, H200).state == "verified_here"
    assert _state(row, L40S).state == "verified_elsewhere"
    assert _state(row, T4).state == "unverified"
    assert "verified on h200 only" in _state(row, T4).why_not


def test_a_changed_source_is_unverified_and_both_hashes_are_told(world):
    row = world.row("native.double")
    old = world.passed(row)
    world.module("kernel_native_double", KERNEL.replace("x * 2", "x + x"))

    evidence = _state(row, CPU)

    assert evidence.state == "unverified"
    assert f"found hash {source_hash(row.target)[:12]}" in evidence.why_not
    assert f"recorded {old.source_hash[:12]} on cpu" in evidence.why_not


@pytest.mark.parametrize(
    ("recorded", "installed", "here", "state"),
    [
        pytest.param("3.6", "3.6", True, "verified_here", id="equal"),
        pytest.param("3.6", "3.9", True, "verified_elsewhere", id="another-minor"),
        pytest.param(None, "3.9", True, "verified_elsewhere", id="none-recorded"),
        pytest.param("3.6", "3.9", False, "verified_here", id="another-machine-whose-triton-is-not-known"),
    ],
)
def test_a_triton_row_is_verified_here_only_under_the_same_minor(recorded, installed, here, state, world):
    row = world.row("triton.double", requires=CapabilityRequirement(packages=("triton",)))
    world.passed(row, device="h200", toolchain={"torch": "2.11.0", "triton": recorded, "python": "3.12.3"})

    assert _state(row, H200, triton=installed, here=here).state == state


def test_the_triton_minor_does_not_matter_to_a_row_without_triton(world):
    row = world.row("native.double")
    world.passed(row)

    assert _state(row, CPU, triton="3.9").state == "verified_here"


def test_a_fallback_needs_no_evidence(world):
    assert _state(world.row("torch.double", fallback=True), CPU).state == "fallback"


def test_a_failed_run_takes_the_row_out_of_service_on_its_device_only(world):
    row = world.row("native.double")
    world.passed(row, device="l40s")
    world.passed(row, device="h200", failure="bfloat16-d=5: out: 1 of 5 elements off")

    evidence = _state(row, H200)

    assert evidence.state == "unverified"
    assert "its last run on h200 failed (2026-11-29T00:00:00Z): bfloat16-d=5" in evidence.why_not
    assert _state(row, L40S).state == "verified_here"


def test_a_row_whose_source_is_gone_is_unverified(world):
    row = world.row("native.double")
    world.passed(row)
    (world.folder / "kernel_native_double.py").unlink()

    assert "not there to be hashed" in _state(row, CPU).why_not


# ---- the stores


def _record(row, **fields):
    values = {
        "row": row.name,
        "op": row.op,
        "source_hash": source_hash(row.target),
        "device": "cpu",
        "toolchain": {"torch": "2.13.0", "triton": "3.6", "python": "3.11.7"},
        "cases": {"count": 1, "ids": ["a"]},
        "errors": {"float32": {"max_abs": 1e-7, "max_rel": 2e-7}},
        "command": "rapid-llm kernels verify --op double",
        "commit": "abc",
        "date": "2026-11-29T00:00:00Z",
        "seconds": 1.5,
        "latencies_us": {"float32 d=8": 2.5},
        "failure": "",
    }
    return EvidenceRecord(**{**values, **fields})


def test_a_recorded_run_reads_back_equal(world):
    record = _record(world.row("native.double"))

    path = record_run(record)

    assert path == user_folder("evidence") / "cpu.json"
    assert load_records() == (record,)


def test_a_run_takes_the_place_of_the_one_it_repeats_and_of_no_other(world):
    row, other = world.row("native.double"), world.row("other.double")
    kept = [
        _record(other),
        _record(row, source_hash="f" * 64),
        _record(row, toolchain={"torch": "2.15.0", "triton": "3.9", "python": "3.11.7"}),
    ]
    for record in (*kept, _record(row), _record(row, date="2026-11-30T00:00:00Z")):
        record_run(record)

    assert load_records() == (*kept, _record(row, date="2026-11-30T00:00:00Z"))


def test_a_failed_run_removes_older_evidence_of_the_same_source(world):
    row = world.row("native.double")
    record_run(_record(row, toolchain={"torch": "2.15.0", "triton": "3.9", "python": "3.11.7"}))
    record_run(_record(row))

    record_run(_record(row, failure="a: wrong"))

    assert [record.failure for record in load_records()] == ["a: wrong"]


GOOD = {"format": 1, "device": "cpu", "entries": []}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param("{", "cannot be read", id="cut-short"),
        pytest.param("", "cannot be read", id="empty"),
        pytest.param(b"\xff\xfe\x00", "cannot be read", id="binary"),
        pytest.param("[]", "is not a store file", id="foreign-list"),
        pytest.param('{"name": "left-pad"}', "is not a store file", id="foreign-object"),
        pytest.param(json.dumps({**GOOD, "format": 2}), "format 2, this version reads 1", id="future-format"),
        pytest.param(json.dumps({**GOOD, "device": "h200"}), "of the device 'cpu'", id="another-device"),
        pytest.param(json.dumps({**GOOD, "entries": [1]}), "of the device 'cpu'", id="entries-that-are-none"),
        pytest.param(json.dumps({**GOOD, "entries": [{"row": "x"}]}), "1 of 1 records are malformed", id="record-without-fields"),
    ],
)
def test_a_bad_store_file_costs_one_warning_that_names_it(content, told, world):
    path = user_folder("evidence") / "cpu.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.warns(StoreWarning, match=told) as caught:
        assert load_records() == ()
    assert load_records() == ()  # pytest makes a second warning an error

    assert len(caught) == 1
    assert str(path) in str(caught[0].message)


@pytest.mark.parametrize(
    "field",
    [
        pytest.param({"source_hash": 7}, id="number-as-hash"),
        pytest.param({"toolchain": []}, id="list-as-toolchain"),
        pytest.param({"toolchain": {"triton": 3.6}}, id="number-as-version"),
        pytest.param({"latencies_us": {"float32 d=8": "fast"}}, id="text-as-latency"),
        pytest.param({"surprise": 1}, id="unknown-field"),
    ],
)
def test_a_malformed_record_is_ignored_and_the_others_are_not(field, world):
    good = _record(world.row("native.double"))
    path = record_run(good)
    (entry,) = json.loads(path.read_text())["entries"]
    write_user_store("evidence", "cpu", [entry, {**entry, **field}])

    with pytest.warns(StoreWarning, match="1 of 2 records are malformed"):
        assert load_records() == (good,)


def test_a_file_that_cannot_be_read_is_kept_beside_what_is_written_next(world):
    path = user_folder("evidence") / "cpu.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"format": 99}', encoding="utf-8")

    with pytest.warns(StoreWarning, match="format 99"):
        record_run(_record(world.row("native.double")))

    assert path.with_suffix(".json.ignored").read_text() == '{"format": 99}'
    assert len(load_records()) == 1


def test_a_write_that_fails_leaves_the_old_file_and_no_other(world, monkeypatch):
    row = world.row("native.double")
    path = record_run(_record(row))
    before = path.read_bytes()

    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr("rapid_llm.kernels.store.os.replace", refuse)
    with pytest.raises(ConfigError, match=r"cannot write .*disk full.*RAPID_DATA_DIR"):
        record_run(_record(row, commit="other"))

    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["cpu.json"]


def test_shipped_evidence_is_read_after_the_users(world, monkeypatch, tmp_path):
    row = world.row("native.double")
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    monkeypatch.setattr("rapid_llm.kernels.store.shipped_folder", lambda kind: shipped)
    path = record_run(_record(row))
    Path(shipped / "cpu.json").write_bytes(path.read_bytes().replace(b'"abc"', b'"shipped"'))

    assert [record.commit for record in load_records()] == ["abc", "shipped"]


HASH_AND_KEEP = """
import ast, sys
from rapid_llm.kernels import provenance
if sys.argv[1] == "no parser":
    ast.parse = None
print(provenance.source_hash("a_kernel:run"))
provenance.keep_source_hashes()
"""


def test_hashes_are_kept_for_the_next_process_until_a_file_changes(tmp_path):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "RAPID_DATA_DIR": str(tmp_path / "data")}

    def found(parser="parser"):
        return subprocess.run([sys.executable, "-c", HASH_AND_KEEP, parser], env=env, capture_output=True, text=True)

    kernel = tmp_path / "a_kernel.py"
    kernel.write_text("def run(): return 1\n")
    first = found().stdout
    assert found("no parser").stdout == first
    kernel.write_text("def run(): return 22\n")
    assert found("no parser").returncode
    assert found().stdout not in (first, "")
    (tmp_path / "data" / "source_hashes.json").write_text("{}")
    kernel.write_text("def run(): return 1\n")
    assert found().stdout == first


def test_two_installations_that_share_a_data_folder_have_hashes_of_their_own(tmp_path):
    def found(installation):
        folders = os.pathsep.join([str(tmp_path / installation), *sys.path])
        env = os.environ | {"PYTHONPATH": folders, "RAPID_DATA_DIR": str(tmp_path / "data")}
        return subprocess.run([sys.executable, "-c", HASH_AND_KEEP, "parser"], env=env, capture_output=True, text=True).stdout

    for number, installation in enumerate(("older", "newer")):
        (tmp_path / installation).mkdir()
        (tmp_path / installation / "a_kernel.py").write_text(f"def run(): return {number}\n")
    assert found("older") != found("newer")
