"""update_kv_buffer_fp8, flash_decoding_fp8 and flashattention2_nopad_fp8: pools of e4m3 with a scale a KV head."""

import math

import pytest
import torch

from rapid_llm.errors import KernelInputError
from rapid_llm.kernels.device import device_info, simulate_launches
from rapid_llm.kernels.ops.fallback import kvcache as fallback
from tests import reference
from tests.kernels.kv_pools import PAGE_SIZE, PagedKeys, int32, zero_pool
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of

E4M3 = torch.float8_e4m3fn
BEYOND = [448.0, 449.0, 464.0, 465.0, 480.0, 1e4, math.inf, -math.inf, math.nan, -449.0, -1e30, 2.0**-10, -(2.0**-10), 0.0, -0.0]
"""In units of a scale: what e4m3 ends at, rounds to its end or would miss, and halves of its least number."""

each_card = pytest.mark.parametrize("card", ["h200", "a100"])  # with e4m3 and without: there kernels read bytes


class PagedNumbers(PagedKeys):
    """PagedKeys whose K and V are numbers of e4m3 and their scales; ``plain`` is what these stand for."""

    def __init__(self, lengths, num_kv_heads, head_dim, device, **options):
        super().__init__(lengths, num_kv_heads, head_dim, device, **options)
        self.scales = [0.01 * torch.arange(1, num_kv_heads + 1, device=device) * factor for factor in (1, 7)]
        self.k_pool, self.v_pool = (
            (pool / scale[:, None]).clamp(-448, 448).to(E4M3)
            for pool, scale in zip((self.k_pool, self.v_pool), self.scales, strict=True)
        )

    def arguments(self):
        return super().arguments() | {"k_scale": self.scales[0], "v_scale": self.scales[1]}


def attended(op, keys, q, q_lens=None):
    """The op's answer for queries that are the last of their sequences; one query a sequence without ``q_lens``."""
    arguments = {**keys.arguments(), "seq_lens": int32(keys.lengths, q.device), "sm_scale": q.shape[2] ** -0.5}
    if q_lens is not None:
        arguments["cu_seqlens_q"] = int32([0, *torch.tensor(q_lens).cumsum(0).tolist()], q.device)
    if op in (reference.flash_decoding_fp8, reference.flashattention2_nopad_fp8):
        return op(q, **arguments)
    if q_lens is not None:
        arguments["max_seqlen_q"] = max(q_lens)
    return op(q, **arguments, out=torch.empty_like(q))


def assert_attended(actual, expected):
    """Means of values of size 1: an eps of the result and half of one for weights that are rounded."""
    eps = max(torch.finfo(actual.dtype).eps, 1e-5)
    torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=eps)


@each_row_of("update_kv_buffer_fp8")
def test_update_kv_buffer_fp8_holds_over_its_whole_sweep(update_kv_buffer_fp8, device):
    assert broken_cases(update_kv_buffer_fp8, device) == []


@each_row_of("flashattention2_nopad_fp8")
def test_flashattention2_nopad_fp8_holds_over_its_whole_sweep(flashattention2_nopad_fp8, device):
    assert broken_cases(flashattention2_nopad_fp8, device) == []


@each_row_of("flash_decoding_fp8")
def test_flash_decoding_fp8_holds_over_its_whole_sweep(flash_decoding_fp8, device):
    assert broken_cases(flash_decoding_fp8, device) == []


@pytest.mark.case("E4")
@each_row_of("update_kv_buffer_fp8")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.037, 2.0**-20], ids=str)
def test_what_e4m3_cannot_hold_becomes_its_largest_number_and_nan_stays_in_sight(update_kv_buffer_fp8, scale, dtype, device):
    values = torch.tensor(BEYOND, device=device) * scale
    values = values.to(dtype)[None, None].repeat(2, 3, 1)
    scales = torch.full((3,), scale, device=device)
    pool = torch.full((5, 6, len(BEYOND)), 0x11, dtype=torch.uint8, device=device)
    k_pool, v_pool = pool[:, :3].view(E4M3), pool[:, 3:].view(E4M3)

    update_kv_buffer_fp8(values, -values, int32([4, 1], device), k_pool=k_pool, v_pool=v_pool, k_scale=scales, v_scale=scales)

    expected = (values.float() / scale).clamp(-448, 448)
    assert torch.equal(k_pool[4].float().isnan(), ~values[0].isfinite())
    assert k_pool[4].float()[values[0].isfinite()].abs().max() == 448
    bytes_of = [torch.where(values.isfinite(), sign * expected, math.nan).to(E4M3).view(torch.uint8) for sign in (1, -1)]
    assert torch.equal(pool[[4, 1]], torch.cat(bytes_of, 1))  # bit by bit, and the same in every row
    assert (pool[[0, 2, 3]] == 0x11).all()


@each_row_of("update_kv_buffer_fp8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_writes_the_bytes_of_plain_torch(update_kv_buffer_fp8, dtype, device):
    """Of numbers at, beside and between all of those that e4m3 has."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    middles = (codes[:126] + codes[1:127]) / 2  # ties go to the even code
    values = torch.cat([codes, middles, middles.nextafter(codes[1:127]), middles.nextafter(codes[:126]), -middles])
    values = torch.nn.functional.pad(values, (0, 1024 - len(values))).to(device, dtype).view(4, 2, 128)
    scales, slots = torch.tensor([1.0, 0.7], device=device), int32([3, 0, 2, 1], device)
    pools = torch.zeros(2, 4, 2, 128, dtype=torch.uint8, device=device).view(E4M3)
    wanted = torch.zeros_like(pools)
    update_kv_buffer_fp8(values, values, slots, k_pool=pools[0], v_pool=pools[1], k_scale=scales, v_scale=scales)
    fallback.update_kv_buffer_fp8(values, values, slots, k_pool=wanted[0], v_pool=wanted[1], k_scale=scales, v_scale=scales)
    assert torch.equal(pools.view(torch.uint8), wanted.view(torch.uint8))


@each_card
@each_row_of("flash_decoding_fp8")
@each_row_of("flashattention2_nopad_fp8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_read_with_e4m3_instructions_and_without(flash_decoding_fp8, flashattention2_nopad_fp8, card, dtype, device):
    keys = PagedNumbers([40, 17, 0], 2, 64, device)
    q = torch.randn(3, 6, 64, device=device).to(dtype)
    prompts = torch.randn(33 + 17, 6, 64, device=device).to(dtype)
    with simulate_launches(device_info(card)):
        decoded = attended(flash_decoding_fp8, keys, q)
        prefilled = attended(flashattention2_nopad_fp8, keys, prompts, [33, 17, 0])
    assert_attended(decoded, attended(reference.flash_decoding_fp8, keys, q))
    assert_attended(prefilled, attended(reference.flashattention2_nopad_fp8, keys, prompts, [33, 17, 0]))


@each_card
@each_row_of("flash_decoding_fp8")
@each_row_of("flashattention2_nopad_fp8")
def test_nan_in_a_key_reaches_its_own_sequence_and_no_other(flash_decoding_fp8, flashattention2_nopad_fp8, card, device):
    keys = PagedNumbers([20, 35], 1, 64, device)
    keys.k_pool.view(torch.uint8)[keys.slots_of(int(keys.table_rows[1]), 3)[-1], 0, 5] = 0xFF
    q = torch.randn(2, 2, 64, device=device).bfloat16()
    with simulate_launches(device_info(card)):
        decoded = attended(flash_decoding_fp8, keys, q)
        prefilled = attended(flashattention2_nopad_fp8, keys, q, [1, 1])
    for found in (decoded, prefilled):
        assert found[0].isfinite().all()
        assert found[1].isnan().all()


@each_row_of("flash_decoding_fp8")
def test_queries_far_from_one_lose_nothing_on_their_way_to_fp16(flash_decoding_fp8, device):
    keys = PagedNumbers([33] * 5, 1, 64, device)
    q = torch.randn(5, 2, 64, device=device)
    factors = torch.tensor([2.0**-60, 2.0**-14, 0.0, 2.0**17, 2.0**40], device=device)
    keys.scales[0] = torch.full((1,), 2.0**-8, device=device)
    q = (q * factors[:, None, None]).bfloat16()
    assert_attended(attended(flash_decoding_fp8, keys, q), attended(reference.flash_decoding_fp8, keys, q))


@each_row_of("flash_decoding_fp8")
def test_many_small_weights_add_up_beside_a_large_one(flash_decoding_fp8, device):
    """99 keys of weight 2**-22.5 each are all of the result, and fp16 alone would make each a tenth larger."""
    keys = PagedNumbers([100], 1, 64, device)
    slots = keys.slots_of(int(keys.table_rows[0]), 100)
    keys.scales = [torch.ones(1, device=device), torch.ones(1, device=device)]
    k, v = torch.zeros(100, 1, 64, device=device), torch.ones(100, 1, 64, device=device)
    k[0, 0, 0], v[0] = 1.0, 0.0
    keys.k_pool[slots], keys.v_pool[slots] = k.to(E4M3), v.to(E4M3)
    q = torch.zeros(1, 1, 64, device=device).bfloat16()
    q[0, 0, 0] = 22.5 * math.log(2) * 8  # over the square root of head_dim
    found = attended(flash_decoding_fp8, keys, q)
    torch.testing.assert_close(found.double(), attended(reference.flash_decoding_fp8, keys, q), rtol=2**-7, atol=0)


@pytest.mark.case("A1")
@each_row_of("update_kv_buffer_fp8")
@each_row_of("flash_decoding_fp8")
@each_row_of("flashattention2_nopad_fp8")
def test_rows_past_two_to_the_31_bytes_are_where_they_are(
    update_kv_buffer_fp8, flash_decoding_fp8, flashattention2_nopad_fp8, device
):
    """2,048 bytes a row: row 1,048,576 starts at byte 2**31. A 32-bit offset reads zeros, or what is before the pool."""
    bf16 = zero_pool(524_288 + PAGE_SIZE, 8, 128, device)  # of as many bytes as twice the rows take
    pool = bf16.view(torch.uint8).view(-1, 16, 128).view(E4M3)
    keys = PagedNumbers([20], 8, 128, device)
    keys.k_pool, keys.v_pool = pool[:, :8], pool[:, 8:]
    keys.page_table = int32([[65_537, 3]], device)
    keys.table_rows = int32([0], device)
    k, v = torch.randn(2, 20, 8, 128, device=device)
    pools = {name: keys.arguments()[name] for name in ("k_pool", "v_pool", "k_scale", "v_scale")}
    update_kv_buffer_fp8(k, v, keys.slots_of(0, 20).int(), **pools)
    q = torch.randn(1, 8, 128, device=device).bfloat16()
    expected = attended(reference.flash_decoding_fp8, keys, q)
    assert expected.abs().max() > 0.1
    assert_attended(attended(flash_decoding_fp8, keys, q), expected)
    assert_attended(attended(flashattention2_nopad_fp8, keys, q, [1]), expected)


WRONG_SCALES = [
    pytest.param(lambda scale: scale[:1], id="a-head-short"),
    pytest.param(lambda scale: scale.half(), id="fp16"),
    pytest.param(lambda scale: scale[0], id="one-for-all"),
    pytest.param(lambda scale: scale.repeat_interleave(2)[::2], id="strided"),
]


@pytest.mark.parametrize("change", WRONG_SCALES)
@each_row_of("update_kv_buffer_fp8")
@each_row_of("flash_decoding_fp8")
@each_row_of("flashattention2_nopad_fp8")
def test_scales_that_are_not_one_a_head_are_refused(
    update_kv_buffer_fp8, flash_decoding_fp8, flashattention2_nopad_fp8, change, device
):
    keys = PagedNumbers([5], 2, 64, device)
    keys.scales[1] = change(keys.scales[1])
    q, k = torch.randn(1, 4, 64, device=device), torch.randn(1, 2, 64, device=device)
    pools = {name: keys.arguments()[name] for name in ("k_pool", "v_pool", "k_scale", "v_scale")}
    before = keys.k_pool.view(torch.uint8).clone()
    with pytest.raises(KernelInputError, match=r"flash_decoding_fp8\(q \[.*v_scale"):
        attended(flash_decoding_fp8, keys, q)
    with pytest.raises(KernelInputError, match="flashattention2_nopad_fp8"):
        attended(flashattention2_nopad_fp8, keys, q, [1])
    with pytest.raises(KernelInputError, match=r"update_kv_buffer_fp8\(k \["):
        update_kv_buffer_fp8(k, k, int32([0], device), **pools)
    assert torch.equal(keys.k_pool.view(torch.uint8), before)


@each_row_of("flash_decoding_fp8")
@each_row_of("flash_decoding")
def test_a_pool_of_the_other_kind_is_refused(flash_decoding_fp8, flash_decoding, device):
    numbers, plain = PagedNumbers([5], 2, 64, device), PagedKeys([5], 2, 64, device)
    q = torch.randn(1, 4, 64, device=device)
    scales = {"k_scale": numbers.scales[0], "v_scale": numbers.scales[1]}
    rest = {"seq_lens": int32([5], device), "sm_scale": 0.125, "out": torch.empty_like(q)}
    with pytest.raises(KernelInputError, match="float8_e4m3fn"):
        flash_decoding_fp8(q, **plain.arguments(), **scales, **rest)
    with pytest.raises(KernelInputError, match="float8_e4m3fn"):
        flash_decoding(q, **PagedKeys.arguments(numbers), **rest)


@each_row_of("flash_decoding_fp8")
def test_rows_of_odd_size_are_read_right_or_refused(flash_decoding_fp8, device):
    """The Triton row takes V by pairs of bytes, which then lie across an address of 16 bits."""
    keys = PagedNumbers([20], 1, 64, device)
    wide = torch.zeros(len(keys.v_pool), 1, 65, dtype=torch.uint8, device=device).view(E4M3)
    keys.v_pool = wide[..., :64].copy_(keys.v_pool)
    q = torch.randn(1, 2, 64, device=device)
    if "triton" in flash_decoding_fp8.spec.requires.packages:
        with pytest.raises(KernelInputError, match="v_pool"):
            attended(flash_decoding_fp8, keys, q)
    else:
        assert_attended(attended(flash_decoding_fp8, keys, q), attended(reference.flash_decoding_fp8, keys, q))
