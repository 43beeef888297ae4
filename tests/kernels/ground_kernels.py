"""Small kernels to test the ground with: each right one has flaws that a constexpr switches on."""

# ruff: noqa: N803
import triton
import triton.language as tl

from rapid_llm.kernels.ops.primitives.dependent_launch import wait_for_inputs


@triton.jit
def copy_rows(x_ptr, out_ptr, x_stride, out_stride, d, MASKED: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program a row: out[row] = x[row]."""
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    if MASKED:
        tl.store(
            out_ptr + row * out_stride + cols, tl.load(x_ptr + row * x_stride + cols, mask=cols < d, other=0.0), mask=cols < d
        )
    else:
        tl.store(out_ptr + row * out_stride + cols, tl.load(x_ptr + row * x_stride + cols), mask=cols < d)


@triton.jit
def store_rows(out_ptr, out_stride, d, SHIFT: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[row] = row, ``SHIFT`` elements to the right."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_N)
    tl.store(out_ptr + row * out_stride + cols + SHIFT, row.to(tl.float32), mask=cols < d)


@triton.jit
def row_sums(x_ptr, out_ptr, x_stride, d, FILLED: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[row] = sum of x[row]; without ``FILLED`` the masked lanes are summed too."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    if FILLED:
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < d, other=0.0)
    else:
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < d)
    tl.store(out_ptr + row, tl.sum(x.to(tl.float32)))


@triton.jit
def running_sum(x_ptr, out_ptr, SHIFT: tl.constexpr):
    """out[row] = x[row] + x[row - SHIFT]: right only where no program has overwritten what it reads."""
    row = tl.program_id(0)
    before = tl.load(x_ptr + row - SHIFT, mask=row >= SHIFT, other=0.0)
    tl.store(out_ptr + row, tl.load(x_ptr + row) + before)


@triton.jit
def store_then_load(x_ptr, out_ptr, ORDERED: tl.constexpr, BLOCK_N: tl.constexpr):
    """out = x doubled and reversed, by way of memory."""
    cols = tl.arange(0, BLOCK_N)
    tl.store(x_ptr + cols, tl.load(x_ptr + cols) * 2)
    if ORDERED:
        tl.debug_barrier()
    tl.store(out_ptr + cols, tl.load(x_ptr + (BLOCK_N - 1 - cols)))


@triton.jit
def all_to_one(out_ptr, BLOCK_N: tl.constexpr):
    """Every lane stores its number to one element."""
    cols = tl.arange(0, BLOCK_N)
    tl.store(out_ptr + cols * 0, cols.to(tl.float32))


@triton.jit
def count_up(out_ptr, counter_ptr):
    """The program that arrives last stores how many there are."""
    arrived = tl.atomic_add(counter_ptr, 1)
    if arrived == tl.num_programs(0) - 1:
        tl.store(out_ptr, arrived.to(tl.float32) + 1)


@triton.jit
def asserts_positive(x_ptr, BLOCK_N: tl.constexpr):
    """Stops at a number below zero."""
    tl.device_assert(tl.load(x_ptr + tl.arange(0, BLOCK_N)) >= 0, "negative")


@triton.jit
def product(a_ptr, b_ptr, out_ptr, k, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    """out = a @ b of [BLOCK, k] and [k, BLOCK]."""
    rows = tl.arange(0, BLOCK)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, k, BLOCK):
        a = tl.load(a_ptr + rows * k + start + cols)
        b = tl.load(b_ptr + (start + rows) * BLOCK + cols)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(out_ptr + rows * BLOCK + cols, acc)


@triton.jit
def element_ops(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    """One operation on every element, in the dtype of x."""
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols)
    y = tl.load(y_ptr + cols)
    if OP == "add":
        result = x + y
    elif OP == "multiply":
        result = x * y
    elif OP == "divide":
        result = x / y
    elif OP == "negate":
        result = -x
    elif OP == "magnitude":
        result = tl.abs(x)
    elif OP == "smaller":
        result = tl.where(x < y, x, y)
    elif OP == "larger":
        result = tl.maximum(x, y)
    elif OP == "clamp":
        result = tl.clamp(x, -0.5, 0.5)
    elif OP == "fma":
        result = tl.fma(x, y, x)
    elif OP == "constant":
        result = tl.full((BLOCK,), 1.3, x.dtype) + x
    elif OP == "integer":
        result = cols.to(x.dtype)
    elif OP == "scan":
        result = tl.cumsum(x)
    elif OP == "sort":
        result = tl.sort(x)
    elif OP == "down_up":
        result = x.to(y.dtype).to(x.dtype)
    tl.store(out_ptr + cols, result)


@triton.jit
def reductions(x_ptr, out_ptr, place_ptr, BLOCK: tl.constexpr):
    """Sum, largest, smallest, and the place of the largest."""
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr, tl.sum(x))
    tl.store(out_ptr + 1, tl.max(x))
    tl.store(out_ptr + 2, tl.min(x))
    tl.store(place_ptr, tl.argmax(x, 0))


@triton.jit
def add_to(out_ptr, x_ptr, n):
    """out[0] += every x, one atomic addition each."""
    for i in range(n):
        tl.atomic_add(out_ptr, tl.load(x_ptr + i))


@triton.jit
def weighted(x_ptr, weight_ptr, out_ptr, FLAW: tl.constexpr, BLOCK_N: tl.constexpr):
    """out = x * weight, the weight read before the kernel waits for its inputs."""
    cols = tl.arange(0, BLOCK_N)
    if FLAW == "leaves" and tl.program_id(0) > 0:
        return
    weight = tl.load(weight_ptr + cols)
    if FLAW == "reads":
        x = tl.load(x_ptr + cols)
    if FLAW == "writes":
        tl.store(out_ptr + cols, weight)
    if FLAW != "stays":
        wait_for_inputs(True)
    if FLAW != "reads":
        x = tl.load(x_ptr + cols)
    tl.store(out_ptr + cols, x * weight)
