"""Ids are made int64 before they are multiplied by a stride: the rule on planted sources, and on every kernel there is."""

from pathlib import Path

import pytest

import rapid_llm.kernels.ops
from rapid_llm.kernels.testing.lint import narrow_products

OPS = Path(rapid_llm.kernels.ops.__file__).parent

# Products that cannot pass 2**31 whatever the tensors: (kernel, product) -> why.
SHARED_OUT = ("_fp4_gemm_kernel", "_fp8_gemm_kernel", "_w4a16_gemm_kernel", "_w8a16_gemm_kernel")
BOUNDED = {
    ("_flash_decoding_kernel", "split * split_keys"): "a number of keys of one sequence",
    ("_place_kernel", "chunk * steps"): "a number of 128 pairs, which int32 ids number",
    **{
        ("_fp8_gemm_kernel", f"start // BLOCK_K * {stride}"): "2**10 groups of k at most, each at most 2**20 tokens or outputs on"
        for stride in ("x_scales_stride_k", "weight_scales_stride_k")
    },
    **{(kernel, "split * share"): "an element of k" for kernel in SHARED_OUT},
    **{(kernel, "split * num_tokens"): "a row of a few shares' outputs; a stride meets it in int64" for kernel in SHARED_OUT},
}

HEADER = """
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, ids_ptr, out_ptr, stride, d, BLOCK: tl.constexpr):
"""


def findings(tmp_path, body, extra=""):
    path = tmp_path / "kernel.py"
    path.write_text(HEADER + "\n".join(f"    {line}" for line in body.splitlines()) + "\n" + extra)
    return [product.source for product in narrow_products(path)]


@pytest.mark.case("A7")
@pytest.mark.parametrize(
    ("body", "found"),
    [
        pytest.param("row = tl.program_id(0)\ntl.store(out_ptr + row * stride, 0)", ["row * stride"], id="program-id"),
        pytest.param("row = tl.program_id(0).to(tl.int64)\ntl.store(out_ptr + row * stride, 0)", [], id="cast-first"),
        pytest.param("tl.store(out_ptr + tl.program_id(0) * stride, 0)", ["tl.program_id(0) * stride"], id="in-place"),
        pytest.param(
            "row = tl.program_id(0)\ntl.store(out_ptr + (row * stride).to(tl.int64), 0)", ["row * stride"], id="cast-too-late"
        ),
        pytest.param("row = tl.load(ids_ptr)\ntl.store(out_ptr + row * stride, 0)", ["row * stride"], id="loaded-id"),
        pytest.param("row = tl.load(ids_ptr).to(tl.int64)\ntl.store(out_ptr + row * stride, 0)", [], id="loaded-id-cast"),
        pytest.param(
            "rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\nptrs = x_ptr + rows[:, None] * stride\nx = tl.load(ptrs)",
            ["rows[:, None] * stride"],
            id="tile-of-rows-by-way-of-names",
        ),
        pytest.param("cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)\nx = tl.load(x_ptr + cols)", [], id="tile-width"),
        pytest.param("x = tl.load(x_ptr)\ny = tl.load(x_ptr + 1)\ntl.store(out_ptr, x * y)", [], id="product-of-values"),
        pytest.param(
            "x_ptr += tl.program_id(0) * stride\nx = tl.load(x_ptr)", ["tl.program_id(0) * stride"], id="pointer-moved-in-place"
        ),
        pytest.param(
            "pid = tl.program_id(0)\nfor i in range(pid, d):\n    tl.store(out_ptr + i * stride, 0)", ["i * stride"], id="loop"
        ),
        pytest.param(
            "a, b = tl.program_id(0), tl.program_id(1).to(tl.int64)\ntl.store(out_ptr + a * stride + b * stride, 0)",
            ["a * stride"],
            id="two-at-once",
        ),
    ],
)
def test_a_narrow_product_in_an_address_is_found(body, found, tmp_path):
    assert findings(tmp_path, body) == found


@pytest.mark.parametrize(
    ("cast", "found"),
    [pytest.param("", ["row * stride"], id="narrow"), pytest.param(".to(tl.int64)", [], id="cast-by-the-caller")],
)
@pytest.mark.parametrize(
    ("call", "helper"),
    [
        pytest.param(
            "x = _read(x_ptr, row, stride)", "def _read(ptr, row, stride):\n    return tl.load(ptr + row * stride)", id="in"
        ),
        pytest.param("x = tl.load(x_ptr + _at(row, stride))", "def _at(row, stride):\n    return row * stride", id="out"),
    ],
)
def test_ids_are_followed_into_helpers(cast, found, call, helper, tmp_path):
    body = f"row = tl.program_id(0){cast}\n{call}"
    assert findings(tmp_path, body, f"\n@triton.jit\n{helper}\n") == found


@pytest.mark.case("A7")
def test_no_kernel_multiplies_a_narrow_id_into_an_address():
    found = [product for path in sorted(OPS.glob("*/*.py")) for product in narrow_products(path)]
    assert [str(product) for product in found if (product.function, product.source) not in BOUNDED] == []
