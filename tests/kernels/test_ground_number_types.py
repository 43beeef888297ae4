"""The interpreter's number types against torch's."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="these are the number types of Triton's interpreter")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("these are the number types of Triton's interpreter", allow_module_level=True)

from rapid_llm.kernels.testing.number_types import decode, encode
from tests.kernels import ground_kernels as kernels

BLOCK = 64
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2

EXPECTED = {
    "add": lambda x, y: x + y,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y,
    "negate": lambda x, y: -x,
    "magnitude": lambda x, y: x.abs(),
    "smaller": torch.minimum,
    "larger": torch.maximum,
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
    "fma": lambda x, y: (x.double() * y.double() + x.double()).to(x.dtype),
    "constant": lambda x, y: torch.tensor(1.3, dtype=x.dtype, device=x.device) + x,
    "integer": lambda x, y: torch.arange(BLOCK, device=x.device).to(x.dtype),
    "scan": lambda x, y: x.float().cumsum(0).to(x.dtype),
    "sort": lambda x, y: x.sort().values,
}


@pytest.mark.parametrize("op", EXPECTED)
def test_bf16_computes_as_torch_does(op, device):
    x = (20 * torch.randn(BLOCK, device=device)).to(BF16)
    y = torch.randn(BLOCK, device=device).to(BF16)
    out = torch.empty(BLOCK, dtype=BF16, device=device)

    kernels.element_ops[(1,)](x, y, out, OP=op, BLOCK=BLOCK, num_warps=1)

    # Each element is rounded once, as torch does; a scan is rounded where it ends, whatever the order of its float32 sums.
    torch.testing.assert_close(out, EXPECTED[op](x, y), rtol=2**-8 if op == "scan" else 0.0, atol=0.0)


def test_bf16_reduces_as_float32_rounded_once(device):
    x = (20 * torch.randn(BLOCK, device=device)).to(BF16)
    out, place = torch.empty(3, device=device), torch.zeros(1, dtype=torch.int32, device=device)

    kernels.reductions[(1,)](x, out, place, BLOCK=BLOCK, num_warps=1)

    torch.testing.assert_close(out[0], x.float().sum(), rtol=2**-8, atol=1e-4)  # half an eps of bf16, and the order of the sum
    assert out[1:].tolist() == [x.max().item(), x.min().item()]
    assert place.item() == x.float().argmax().item()


@pytest.mark.parametrize("target", [pytest.param(E4M3, id="e4m3"), pytest.param(E5M2, id="e5m2")])
def test_fp8_rounds_to_even_and_saturates(target, device):
    x = torch.tensor([0.4858, 464.0, -1e6, 17.0, 2**-9, 2**-10, 0.0, float("nan")], device=device).repeat(8)
    y, out = torch.zeros(BLOCK, device=device).to(target), torch.empty(BLOCK, device=device)

    kernels.element_ops[(1,)](x, y, out, OP="down_up", BLOCK=BLOCK, num_warps=1)

    largest = torch.finfo(target).max
    torch.testing.assert_close(out, x.clamp(-largest, largest).to(target).float(), rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, E4M3, E5M2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=str)
def test_every_bit_pattern_survives_decode_and_encode(dtype):
    import triton.language as tl

    names = {BF16: tl.bfloat16, E4M3: tl.float8e4nv, E5M2: tl.float8e5}
    names |= {torch.float8_e4m3fnuz: tl.float8e4b8, torch.float8_e5m2fnuz: tl.float8e5b16}
    bits = torch.arange(1 << (16 if dtype == BF16 else 8)).to(torch.int16 if dtype == BF16 else torch.uint8)
    expected = bits.view(dtype).float()

    values = torch.from_numpy(decode(bits.numpy(), names[dtype]).copy())
    again = torch.from_numpy(encode(values.numpy(), names[dtype]).view(bits.numpy().dtype)).view(dtype).float()

    torch.testing.assert_close(values, expected, rtol=0.0, atol=0.0, equal_nan=True)
    saturated = expected.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max) if dtype != BF16 else expected
    torch.testing.assert_close(again, saturated, rtol=0.0, atol=0.0, equal_nan=True)


def test_float32_rounds_to_bf16_as_torch_does():
    import triton.language as tl

    values = torch.randn(10_000) * 10.0 ** torch.randint(-40, 38, (10_000,))
    midpoints = torch.arange(1 << 16, dtype=torch.int32).mul(1 << 16).add(1 << 15).view(torch.float32)
    values = torch.cat([values, midpoints, torch.tensor([3.4028235e38, float("inf"), -float("inf")])])

    rounded = torch.from_numpy(encode(values.numpy(), tl.bfloat16).view("int16")).view(BF16)

    torch.testing.assert_close(rounded.float(), values.to(BF16).float(), rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "precision", "error"),
    [
        pytest.param(BF16, "ieee", 1e-4, id="bf16"),
        pytest.param(torch.float16, "ieee", 1e-4, id="fp16"),
        pytest.param(torch.float32, "ieee", 1e-4, id="fp32"),
        pytest.param(torch.float32, "tf32", 0.1, id="tf32"),
    ],
)
def test_a_dot_product_is_exact_but_in_tf32(dtype, precision, error, device):
    a, b = torch.randn(32, 96, device=device).to(dtype), torch.randn(96, 32, device=device).to(dtype)
    out = torch.empty(32, 32, device=device)

    kernels.product[(1,)](a, b, out, 96, PRECISION=precision, BLOCK=32, num_warps=4)

    off = (out.double() - a.double() @ b.double()).abs().max().item()
    assert off < error
    assert precision != "tf32" or off > 1e-3  # a kernel that forgets to ask for float32 is seen without a GPU


def test_bf16_adds_atomically(device):
    x = torch.arange(8, device=device).to(BF16)
    out = torch.ones(1, dtype=BF16, device=device)

    kernels.add_to[(1,)](out, x, 8, num_warps=1)

    assert out.item() == 29.0


def test_a_launch_leaves_the_language_as_it_was(device):
    import triton.language as tl

    def members():
        return {(owner.__name__, name): value for owner in (tl, tl.core, tl.math) for name, value in vars(owner).items()}

    before = members()
    kernels.reductions[(2,)](
        torch.ones(BLOCK, device=device), torch.empty(3, device=device), torch.zeros(1).int().to(device), BLOCK=BLOCK
    )

    assert members() == before
