"""The compile-only ground: what it records, and that each check is red on a kernel that fails it."""

import pytest
import torch

from rapid_llm.errors import ConfigError
from rapid_llm.kernels.device import device_info, launch_device
from rapid_llm.kernels.testing.compile_only import CompileCheckError, compile_only, load_bits
from rapid_llm.kernels.testing.hazards import store_load_hazards
from tests.kernels import ground_kernels as kernels


def copy(rows=3, d=4096, wide=True, grid=None):
    x = torch.zeros(rows, d, dtype=torch.bfloat16)
    out = torch.full_like(x, 7.0)
    kernels.copy_rows[grid or (rows,)](x, out, d, d, d, MASKED=True, WIDE=wide, BLOCK_N=4096, num_warps=4)
    return out


def multiply(block, stages, k=1024, dtype=torch.bfloat16, warps=4):
    a, b = torch.zeros(block, k, dtype=dtype), torch.zeros(k, block, dtype=dtype)
    out = torch.zeros(block, block)
    kernels.product[(1,)](a, b, out, k, PRECISION="ieee", BLOCK=block, num_warps=warps, num_stages=stages)


def test_a_launch_is_recorded_and_not_run(simulated):
    with compile_only(simulated) as record:
        out = copy()

    (launch,) = record.launches
    record.check()
    assert (out == 7.0).all()
    assert (launch.kernel, launch.grid, launch.device) == ("copy_rows", (3, 1, 1), simulated)
    assert launch.specialization["x_ptr"] == ("*bf16", "D")
    assert launch.specialization["d"] == ("i32", "D")
    assert launch.constexprs["BLOCK_N"] == 4096
    assert launch.num_warps == 4
    assert launch.registers > 0
    assert f".target sm_{simulated.sm}" in launch.ptx
    assert launch.cubin.startswith(b"\x7fELF")
    assert set(launch.load_bits) == {128}


def test_launches_on_cpu_tensors_are_those_of_the_simulated_device(simulated):
    with compile_only(simulated):
        assert launch_device(torch.empty(1)) == simulated
    assert launch_device(torch.empty(1)) == device_info("h200")


def test_a_count_that_is_an_argument_compiles_three_variants(simulated):
    with compile_only(simulated) as record:
        for d in (1, 2, 15, 16, 17, 32, 48):
            copy(d=d)

    assert record.variants() == {"copy_rows": 3}
    assert {launch.specialization["d"] for launch in record.launches} == {("constexpr", 1), ("i32", ""), ("i32", "D")}


def test_an_unaligned_view_loses_the_wide_loads(simulated):
    x = torch.zeros(4097, dtype=torch.bfloat16)
    with compile_only(simulated) as record:
        kernels.copy_rows[(1,)](x[1:], x[:-1], 0, 0, 4096, MASKED=True, WIDE=True, BLOCK_N=4096, num_warps=4)

    assert set(record.launches[0].load_bits) == {16}


@pytest.mark.case("D1")
def test_shared_memory_past_the_limit_of_the_device_is_an_error():
    def shared_on(name):
        with compile_only(device_info(name)) as record:
            multiply(128, stages=3)
        return record

    shared_on("h200").check()
    with pytest.raises(
        CompileCheckError, match=r"product on rtx3090 .* too much shared memory: got 1\d\d,\d+ bytes, wanted at most 101,376"
    ):
        shared_on("rtx3090").check()


def test_spilled_registers_past_the_budget_are_an_error():
    with compile_only(device_info("rtx3090")) as record:
        multiply(128, stages=2, k=256, warps=1)
    spilled = record.launches[0].spilled

    assert spilled > 0
    record.check(max_spilled=spilled)
    with pytest.raises(CompileCheckError, match=r"registers spill: got [\d,]+ bytes of stack"):
        record.check(max_spilled=spilled - 1)


@pytest.mark.case("B1")
@pytest.mark.parametrize("grid", [(1, 65_536), (1, 1, 65_536), (0,)], ids=str)
def test_a_grid_that_cannot_be_launched_is_an_error(grid):
    with compile_only(device_info("a100")) as record:
        copy(grid=grid)
    with pytest.raises(CompileCheckError, match="the grid cannot be launched"):
        record.check()


def test_nothing_compiled_is_an_error():
    with compile_only(device_info("a100")) as record:
        pass
    with pytest.raises(CompileCheckError, match="nothing was compiled"):
        record.check()


def test_neither_a_cpu_nor_an_interpreter_compiles(monkeypatch):
    with pytest.raises(ConfigError, match="cuda device"), compile_only(device_info("cpu")):
        pass
    monkeypatch.setattr(kernels.triton.knobs.runtime, "interpret", True)
    with pytest.raises(ConfigError, match="kernels are interpreted"), compile_only(device_info("a100")):
        pass


@pytest.mark.case("F1")
def test_a_load_behind_a_store_needs_a_barrier(simulated):
    x, out = torch.zeros(1024), torch.zeros(1024)
    with compile_only(simulated) as record:
        kernels.store_then_load[(1,)](x, out, ORDERED=False, BLOCK_N=1024)
        kernels.store_then_load[(1,)](x, out, ORDERED=True, BLOCK_N=1024)
        multiply(64, stages=3)
    bare, ordered, pipelined = (store_load_hazards(launch.ttgir) for launch in record.launches)

    assert [hazard.argument for hazard in bare] == ["x_ptr"]
    assert 0 < bare[0].store_line < bare[0].load_line
    assert ordered == pipelined == []


LOOP = """
tt.func public @k(%x_ptr: !tt.ptr<f32>, %y_ptr: !tt.ptr<f32>) {
  %0 = tt.splat %x_ptr : !tt.ptr<f32> -> tensor<8x!tt.ptr<f32>>
  %1:2 = scf.for %i = %a to %b step %c iter_args(%p = %0, %q = %y_ptr) -> (tensor<8x!tt.ptr<f32>>, !tt.ptr<f32>) {
    %v = tt.load %p : tensor<8x!tt.ptr<f32>>
    BEFORE
    tt.store %p, %v : tensor<8x!tt.ptr<f32>>
    %n = tt.addptr %p, %o : tensor<8x!tt.ptr<f32>>, tensor<8xi32>
    scf.yield %n, %q : tensor<8x!tt.ptr<f32>>, !tt.ptr<f32>
  }
  BETWEEN
  %w = tt.load %1#0 : tensor<8x!tt.ptr<f32>>
  %z = tt.load %1#1 : !tt.ptr<f32>
}
"""


@pytest.mark.parametrize(
    ("before", "between", "arguments"),
    [
        pytest.param("", "ttg.barrier all", ["x_ptr"], id="next-iteration"),
        pytest.param("gpu.barrier", "ttg.barrier all", ["x_ptr"], id="barrier-on-the-wrong-side-is-met-in-the-next-iteration"),
        pytest.param("", "", ["x_ptr"], id="after-the-loop"),
        pytest.param("", "scf.if %c {\nttg.barrier all\n}", ["x_ptr"], id="barrier-on-one-side-of-a-branch"),
    ],
)
def test_hazards_are_followed_through_loops_and_branches(before, between, arguments):
    found = store_load_hazards(LOOP.replace("BEFORE", before).replace("BETWEEN", between))
    assert [hazard.argument for hazard in found] == arguments


SIDES = """
tt.func public @k(%x_ptr: !tt.ptr<f32>, %y_ptr: !tt.ptr<f32>) {
  scf.if %c {
    %p = tt.addptr %x_ptr, %o : !tt.ptr<f32>, i32
    tt.store %p, %v : !tt.ptr<f32>
  } else {
    %p = tt.addptr %y_ptr, %o : !tt.ptr<f32>, i32
    tt.store %p, %v : !tt.ptr<f32>
  }
  %w = tt.load THEN : !tt.ptr<f32>
}
"""


@pytest.mark.parametrize(("then", "arguments"), [("%x_ptr", ["x_ptr"]), ("%y_ptr", ["y_ptr"]), ("%z_ptr", [])])
def test_a_name_that_both_sides_of_a_branch_use_means_two_pointers(then, arguments):
    assert [hazard.argument for hazard in store_load_hazards(SIDES.replace("THEN", then))] == arguments


def test_the_width_of_every_kind_of_load_is_read():
    ptx = """
    ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    @%p1 ld.global.L1::evict_last.L2::cache_hint.v2.b64 { %rd4, %rd5 }, [ %rd1 ], %rd9;
    ld.global.b16 { %rs1 }, [ %rd2 + 0 ];
    cp.async.cg.shared.global [ %r9 + 0 ], [ %rd3 + 0 ], 0x10, %r10;
    cp.async.ca.shared.global.L2::128B [ %r9 + 0 ], [ %rd3 + 0 ], 0x4;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
    ld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r1 ];
    st.global.v4.b32 [ %rd1 ], { %r1, %r2, %r3, %r4 };
    """
    assert load_bits(ptx) == (128, 128, 16, 128, 32, 128)
