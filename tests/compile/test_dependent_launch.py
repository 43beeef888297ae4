"""Kernels that begin while the one before them ends: which are, and that what looks into them is red on one that is wrong.

test_native_rows.py looks into every kernel of the sweeps.
"""

import pytest
import torch

from rapid_llm.kernels.device import device_info
from rapid_llm.kernels.testing.compile_only import compile_only
from tests.compile.early_accesses import early_accesses
from tests.compile.launches import NATIVE_ROWS, compiled_call, why_not_compiled
from tests.kernels import ground_kernels as kernels

DEPENDENT = [row for row in NATIVE_ROWS if ".ops.quantization." in row.target or ".ops.fused." in row.target]


@pytest.mark.parametrize("row", DEPENDENT, ids=lambda row: row.name)
def test_all_kernels_of_quantised_and_fused_rows_begin_early_where_they_can(row, simulated, skip_unless_its_turn):
    skip_unless_its_turn(1)
    if why_not := why_not_compiled(row, simulated):
        pytest.skip(f"{row.name} {why_not}")
    for tokens in (1, 16):
        launches = compiled_call(row, simulated, "bfloat16", num_tokens=tokens)
        assert launches
        for launch in launches:
            assert launch.constexprs["PDL"] == (simulated.sm >= 90), launch.kernel
            assert early_accesses(launch) == ([] if simulated.sm >= 90 else [f"{launch.kernel} never waits"])


@pytest.mark.parametrize(
    ("flaw", "found"),
    [
        ("", []),
        ("reads", ["ld.global.b32 of x_ptr"]),
        ("writes", ["st.global.b32 of out_ptr"]),
        ("leaves", ["a branch around the wait"]),
        ("stays", ["weighted never waits"]),
    ],
    ids=["none", "reads", "writes", "leaves", "does-not-wait"],
)
def test_what_comes_before_the_wait_is_found(flaw, found):
    x, weight, out = torch.zeros(128), torch.zeros(128), torch.zeros(128)
    with compile_only(device_info("h200")) as record:
        kernels.weighted[(2,)](x, weight, out, FLAW=flaw, BLOCK_N=128, launch_pdl=True)
    assert early_accesses(record.launches[0]) == found
