"""For each rule of the kernel guide one bug, planted in a copy of a real kernel, turns a check of this ground red.

The unharmed copy stays green. A mutation is a replacement of text, and a text that is no longer there fails the test.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the checks run kernels in Triton's interpreter")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the checks run kernels in Triton's interpreter", allow_module_level=True)

import rapid_llm.kernels.ops
from rapid_llm.kernels.testing.lint import narrow_products
from rapid_llm.kernels.testing.sanitizer import SanitizerError, sanitize
from tests import reference

OPS = Path(rapid_llm.kernels.ops.__file__).parent


def load(path):
    """The module of a file, imported under the file's name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def difference(actual, expected):
    """What is wrong with a result, "" when nothing is."""
    close = torch.isclose(actual.double(), expected.double(), rtol=1e-5, atol=1e-5)
    return "" if close.all() else f"{int((~close).sum())} of {close.numel()} elements off"


# ---- checks: each takes the copy's path and returns what it found, "" when nothing


def swiglu_of_a_view(path):
    gate_up, buffer = torch.randn(3, 120)[:, :100], torch.full((3, 60), 7.0)
    with sanitize():
        load(path).swiglu(gate_up, out=buffer[:, :50])
    if not (buffer[:, 50:] == 7.0).all():
        return "wrote outside out"
    return difference(buffer[:, :50], reference.swiglu(gate_up))


def kv_write_past_31_bits(path):
    row_stride = (1 << 30) + 8  # elements, so that row 2 starts past 2**31; pages that nobody writes take no memory
    memory = torch.from_numpy(np.zeros(2 * row_stride + 64, dtype=np.int16)).view(torch.bfloat16)
    pool = memory.as_strided((3, 1, 32), (row_stride, 32, 1))
    other = torch.zeros(3, 1, 32, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 32).bfloat16(), torch.randn(2, 1, 32).bfloat16()
    with sanitize():
        load(path).update_kv_buffer(k, v, torch.tensor([2, 0], dtype=torch.int32), k_pool=pool, v_pool=other)
    return difference(pool[[2, 0]], k)


def kv_write_among_padding(path):
    pool = torch.zeros(6, 2, 40)
    k, v = torch.randn(4, 1, 40), torch.randn(4, 1, 40)
    slots = torch.tensor([3, -1, 6, 0], dtype=torch.int32)
    with sanitize():
        load(path).update_kv_buffer(k, v, slots, k_pool=pool[:, :1], v_pool=pool[:, 1:])
    return difference(pool[[3, 0]], torch.cat([k, v], dim=1)[[0, 3]])


def norm_of_a_ragged_width(path):
    x, weight, out = torch.randn(3, 50), torch.randn(50), torch.empty(3, 50)
    with sanitize():
        load(path).rms_norm(x, weight, out=out, eps=1e-6)
    return difference(out, reference.rms_norm(x, weight, eps=1e-6))


def norm_of_a_row_wider_than_a_tile(path):
    x, residual, weight = torch.randn(1, 20_000), torch.randn(1, 20_000), torch.randn(20_000)
    out = torch.empty_like(x)
    total, expected = reference.add_rms_norm(x, residual, weight, eps=1e-6)
    with sanitize():
        load(path).add_rms_norm(x, residual, weight, out=out, eps=1e-6)
    return difference(residual, total) or difference(out, expected)


def offsets_in_the_source(path):
    return "; ".join(str(product) for product in narrow_products(path))


GRID = """
import importlib.util, sys, torch
from rapid_llm.kernels.device import device_info
from rapid_llm.kernels.testing.compile_only import compile_only

spec = importlib.util.spec_from_file_location("copy", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
with compile_only(device_info("a100")) as record:
    module.swiglu(torch.zeros(65_536, 64), out=torch.zeros(65_536, 32))
record.check()
"""


def grid_of_many_tokens(path):
    """Compiled, so in a process of its own: to interpret 65,536 programs would take minutes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", GRID, str(path)], capture_output=True, text=True, check=False, env=environment)
    return done.stderr


@dataclass(frozen=True)
class Mutation:
    """A planted bug: the kernel's file, what is replaced by what, the check that sees it, and words of what it says."""

    file: str
    replaced: tuple[tuple[str, str], ...]
    check: object
    told: str


MUTATIONS = {
    "int64-seen-by-the-lint": Mutation(
        "activation/swiglu.py",
        (("tl.program_id(0).to(tl.int64)", "tl.program_id(0)"),),
        offsets_in_the_source,
        "row * gate_up_stride has no int64 factor",
    ),
    "int64-seen-in-a-large-pool": Mutation(
        "kvcache/update_kv_buffer.py", (("slot.to(tl.int64)", "slot"),), kv_write_past_31_bits, "int32 overflow"
    ),
    "mask-of-a-load": Mutation(
        "activation/swiglu.py",
        (("up = tl.load(gate_ptrs + d, mask=inside, other=0.0)", "up = tl.load(gate_ptrs + d)"),),
        swiglu_of_a_view,
        "reads outside gate_up_ptr",
    ),
    "mask-of-a-store": Mutation(
        "activation/swiglu.py",
        (("result.to(out_ptr.dtype.element_ty), mask=inside)", "result.to(out_ptr.dtype.element_ty))"),),
        swiglu_of_a_view,
        "writes outside out_ptr",
    ),
    "mask-of-padding-ids": Mutation(
        "kvcache/update_kv_buffer.py",
        (("if (slot >= 0) & (slot < num_rows):", "if slot < num_rows:"),),
        kv_write_among_padding,
        "writes outside k_pool_ptr",
    ),
    "mask-without-other": Mutation(
        "norm/rms_norm.py",
        (("x = tl.load(x_rows + cols, mask=inside, other=0.0)", "x = tl.load(x_rows + cols, mask=inside)"),),
        norm_of_a_ragged_width,
        "150 of 150 elements off",
    ),
    "barrier": Mutation(
        "norm/rms_norm.py",
        (("        tl.debug_barrier()", "        pass"),),
        norm_of_a_row_wider_than_a_tile,
        "loads through residual_ptr what it has stored through residual_ptr, without a barrier",
    ),
    "stride-of-the-input": Mutation(
        "activation/swiglu.py", (("row * gate_up_stride", "row * (2 * d)"),), swiglu_of_a_view, "reads outside gate_up_ptr"
    ),
    "stride-of-the-output": Mutation(
        "activation/swiglu.py", (("row * out_stride", "row * d"),), swiglu_of_a_view, "writes outside out_ptr"
    ),
    "stride-of-the-heads": Mutation(
        "kvcache/update_kv_buffer.py",
        (("row * k_pool_stride", "row * (num_kv_heads * head_dim)"),),
        kv_write_among_padding,
        "writes outside k_pool_ptr",
    ),
    "grid": Mutation(
        "activation/swiglu.py",
        (
            ("grid = (num_tokens, triton.cdiv(d, tile.BLOCK_N))", "grid = (triton.cdiv(d, tile.BLOCK_N), num_tokens)"),
            ("row = tl.program_id(0)", "row = tl.program_id(1)"),
            ("cols = tl.program_id(1)", "cols = tl.program_id(0)"),
        ),
        grid_of_many_tokens,
        "wanted 1 to 65,535 programs on axis 1",
    ),
}


def found_in(mutation, folder, *, planted):
    """What the mutation's check finds in a copy of its kernel, with or without the bug."""
    source = (OPS / mutation.file).read_text(encoding="utf-8")
    for before, after in mutation.replaced if planted else ():
        assert source.count(before) == 1, f"{mutation.file} reads otherwise now: {before!r} stands {source.count(before)} times"
        source = source.replace(before, after)
    path = folder / f"copy_of_{Path(mutation.file).name}"
    path.write_text(source, encoding="utf-8")
    try:
        return mutation.check(path)
    except SanitizerError as error:
        return str(error)


@pytest.mark.case("A8")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_found(name, tmp_path):
    assert MUTATIONS[name].told in found_in(MUTATIONS[name], tmp_path, planted=True)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_unharmed_copy_is_clean(name, tmp_path):
    assert found_in(MUTATIONS[name], tmp_path, planted=False) == ""
