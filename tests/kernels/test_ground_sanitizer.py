"""The sanitizer finds each planted flaw, names it, and lets the right kernel pass."""

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the sanitizer is a mode of Triton's interpreter")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the sanitizer is a mode of Triton's interpreter", allow_module_level=True)

from rapid_llm.errors import ConfigError
from rapid_llm.kernels.testing.sanitizer import SanitizerError, sanitize
from tests.kernels import ground_kernels as kernels


def copy(x, out, rows=3, d=5, masked=True, wide=True):
    kernels.copy_rows[(rows,)](x, out, x.stride(0), out.stride(0), d, MASKED=masked, WIDE=wide, BLOCK_N=8)


def test_a_clean_launch_is_reported_with_its_grid():
    x, out = torch.randn(3, 5), torch.empty(3, 5)
    with sanitize() as report:
        copy(x, out)

    assert [(launch.kernel, launch.grid) for launch in report.launches] == [("copy_rows", (3, 1, 1))]
    assert torch.equal(out, x)


def test_a_read_past_the_end_names_kernel_argument_lane_and_offset():
    with sanitize(seed=None), pytest.raises(SanitizerError, match=r"copy_rows reads outside x_ptr.*lane 5 and 2 more") as caught:
        copy(torch.randn(1, 5), torch.empty(1, 5), rows=1, masked=False)

    error = caught.value
    assert (error.kernel, error.argument, error.lane, error.offset) == ("copy_rows", "x_ptr", 5, 5)


def test_a_read_between_the_rows_of_a_view_is_outside_it():
    wide = torch.randn(3, 16)
    with sanitize(), pytest.raises(SanitizerError, match="outside x_ptr"):
        copy(wide[:, :5], torch.empty(3, 5), rows=2, masked=False)


def test_a_read_through_k_must_not_reach_v():
    pool = torch.randn(3, 2, 5)
    with sanitize(), pytest.raises(SanitizerError, match="outside x_ptr"):
        copy(pool[:, 0], torch.empty(3, 5), rows=2, masked=False)


def test_a_write_below_the_start_is_found_and_not_done():
    buffer = torch.zeros(4, 5)
    with sanitize(), pytest.raises(SanitizerError, match="writes outside out_ptr") as caught:
        kernels.store_rows[(3,)](buffer[1:], 5, 5, SHIFT=-1, BLOCK_N=8)

    assert caught.value.offset == -1
    assert (buffer[0] == 0).all()


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x[:3, :5], id="row-strided"),
        pytest.param(lambda x: x[1:4, 3:8], id="offset"),
        pytest.param(lambda x: x[:1, :5].expand(3, 5), id="stride-of-zero"),
        pytest.param(lambda x: x.flatten().as_strided((3, 5), (2, 1)), id="overlapping"),
    ],
)
def test_every_view_of_a_tensor_may_be_read_whole(view):
    x, out = view(torch.randn(6, 16)), torch.empty(3, 5)
    with sanitize():
        copy(x, out)
    assert torch.equal(out, x)


def test_two_programs_that_store_different_values_to_one_element_race():
    with sanitize(), pytest.raises(SanitizerError, match=r"stores what another program stores otherwise.*programs 0 and 1"):
        kernels.store_rows[(2,)](torch.zeros(9), 4, 5, SHIFT=0, BLOCK_N=8)


def test_two_programs_that_store_the_same_value_do_not_race():
    with sanitize() as report:
        copy(torch.ones(1, 5).expand(3, 5), torch.zeros(1, 5).expand(3, 5))
    assert report.launches


def test_two_lanes_of_one_store_race():
    with sanitize(), pytest.raises(SanitizerError, match="different values to one element of out_ptr in one store"):
        kernels.all_to_one[(1,)](torch.zeros(1), BLOCK_N=8)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_program_that_reads_what_another_stores_is_found_in_any_order(seed):
    x = torch.ones(2)
    with sanitize(seed=seed), pytest.raises(SanitizerError, match="reads what another program stores"):
        kernels.running_sum[(2,)](x, x, SHIFT=1)


def test_programs_run_in_the_order_of_the_seed():
    def order(seed):
        seen = []
        with sanitize(seed=seed), pytest.MonkeyPatch.context() as patch:
            builder = kernels.triton.runtime.interpreter.InterpreterBuilder
            inner = builder.create_get_program_id
            patch.setattr(
                builder, "create_get_program_id", lambda self, axis: (seen.append(self.grid_idx[0]), inner(self, axis))[1]
            )
            copy(torch.ones(9, 5), torch.empty(9, 5), rows=9)
        return seen

    assert order(None) == list(range(9))
    assert sorted(order(1)) == list(range(9))
    assert order(1) == order(1) != order(2)


def test_a_program_ordered_by_an_atomic_may_store_for_all():
    out, counter = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    with sanitize():
        kernels.count_up[(5,)](out, counter)
    assert out.item() == 5.0


@pytest.mark.case("F1")
def test_a_load_of_what_was_stored_needs_a_barrier():
    x, out = torch.randn(8), torch.empty(8)
    with sanitize():
        kernels.store_then_load[(1,)](x, out, ORDERED=True, BLOCK_N=8)
        with pytest.raises(SanitizerError, match="loads through x_ptr what it has stored through x_ptr, without a barrier"):
            kernels.store_then_load[(1,)](x, out, ORDERED=False, BLOCK_N=8)


def test_masked_lanes_without_other_poison_the_result():
    x, out = torch.ones(3, 5), torch.empty(3)
    with sanitize():
        kernels.row_sums[(3,)](x, out, 5, 5, FILLED=True, BLOCK_N=8)
        assert out.tolist() == [5.0] * 3
        kernels.row_sums[(3,)](x, out, 5, 5, FILLED=False, BLOCK_N=8)
    assert out.isnan().all()


@pytest.mark.case("A7")
def test_an_offset_past_31_bits_needs_int64():
    stride = (1 << 30) + 8  # fits 32 bits, and twice it does not
    far = torch.from_numpy(np.zeros(2 * stride + 5, dtype=np.int8)).as_strided(
        (3, 5), (stride, 1)
    )  # pages nobody writes are free
    far[2] = 7
    out = torch.zeros(3, 5, dtype=torch.int8)
    with sanitize():
        copy(far, out)
        assert (out[2] == 7).all()
        with pytest.raises(SanitizerError, match=r"int32 overflow detected for operation mul.*cast to int64"):
            copy(far, out, wide=False)


def test_a_device_assert_is_live():
    with sanitize(), pytest.raises(SanitizerError, match="negative"):
        kernels.asserts_positive[(1,)](torch.tensor([1.0, -1.0]), BLOCK_N=2)


@pytest.mark.case("B1")
@pytest.mark.parametrize("axis", [1, 2])
def test_a_grid_axis_past_its_limit_is_refused(axis):
    grid = [1, 1, 1]
    grid[axis] = 65_536
    with sanitize(), pytest.raises(SanitizerError, match=f"too large on axis {axis}.*at most 65,535.*axis 0"):
        kernels.store_rows[tuple(grid)](torch.zeros(1, 5), 5, 5, SHIFT=0, BLOCK_N=8)


def test_nothing_is_patched_outside_the_block_and_blocks_do_not_nest():
    builder = kernels.triton.runtime.interpreter.InterpreterBuilder
    before = builder.create_masked_load
    with sanitize(), pytest.raises(ConfigError, match="active already"), sanitize():
        pass
    assert builder.create_masked_load is before
    copy(torch.randn(1, 8)[:, :5], torch.empty(1, 5), rows=1, masked=False)  # goes unseen, and reads what is there
