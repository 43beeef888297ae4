"""Which experts a token goes to. Bound by launch and latency; one program, of one warp, per token.

Experts are put in order by keys of 64 bits, a score's bits above its expert's number, so that ties have an order and every id
that comes out is in range. Scores rise with logits: without a bias it is logits that are compared, which are exact.
"""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.device import launch_device
from rapid_llm.kernels.ops.moe.inputs import check_route_experts
from rapid_llm.kernels.ops.primitives.dependent_launch import dependent_launch, wait_for_inputs

_NO_KEY = tl.constexpr(1 << 62)  # behind every key
_NUMBERS = tl.constexpr(1 << 16)  # of experts, or of groups


def route_experts(
    logits: torch.Tensor,
    *,
    out_ids: torch.Tensor,
    out_weights: torch.Tensor,
    scoring: str = "softmax",
    renormalise: bool = True,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    num_shared: int = 0,
) -> torch.Tensor:
    """Write each token's experts and their weights, and return out_weights.

    An expert's score is the softmax, or the sigmoid, of its logit in fp32. The top_k largest of score + bias are chosen in
    falling order, ties by rising id, from the top_groups best of num_groups equal groups of neighbours; a group counts as its
    largest, or with a bias as the sum of its two largest. A weight is the score, without the bias, over the sum of the chosen
    where ``renormalise``, times ``scale``. A NaN counts as -inf and makes the weights of its token NaN; ids are always in range.

    The last num_shared columns are ids num_experts, num_experts + 1, .. of weight 1: experts of every token, stacked behind the
    others, which fused_moe then serves in the same products.

    Args:
        logits: [num_tokens, num_experts], fp32 | bf16 | fp16; inner stride 1, row stride free.
        out_ids: [num_tokens, top_k + num_shared], int32; inner stride 1, row stride free.
        out_weights: of its shape, fp32; inner stride 1, row stride free.
        scoring: "softmax" | "sigmoid".
        bias: [num_experts], fp32, finite, stride 1; or None.
    Raises: KernelInputError on any other shape, dtype, stride or device, and where top_k cannot be chosen; nothing is launched
    then.
    Twin: kernels/reference/moe.py::route_experts. Origin: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; groups, bias and
    shared experts as in DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437.
    """
    top_k = check_route_experts(logits, out_ids, out_weights, scoring, bias, num_groups, top_groups, num_shared)
    num_tokens, num_experts = logits.shape
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits, bias, out_ids, out_weights, logits.stride(0), out_ids.stride(0), out_weights.stride(0), num_experts,
            float(scale), SIGMOID=scoring == "sigmoid", RENORMALISE=renormalise, NUM_GROUPS=num_groups, TOP_GROUPS=top_groups,
            TOP_K=top_k, NUM_SHARED=num_shared, EXPERTS=triton.next_power_of_2(num_experts),
            GROUPS=triton.next_power_of_2(num_groups), COLUMNS=triton.next_power_of_2(top_k + num_shared),
            num_warps=1, num_stages=1, **dependent_launch(launch_device(logits)),
        )  # fmt: skip
    return out_weights


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    out_ids_ptr,
    out_weights_ptr,
    logits_stride,
    out_ids_stride,
    out_weights_stride,
    num_experts,
    scale,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    there = experts < num_experts
    logits = tl.load(logits_ptr + row * logits_stride + experts, mask=there, other=float("-inf")).to(tl.float32)
    faulty = logits != logits
    known = tl.where(faulty, float("-inf"), logits)
    scores = tl.sigmoid(known) if SIGMOID else _softmax(known, there)
    choice = known
    if bias_ptr is not None:
        choice = tl.where(faulty, float("-inf"), scores + tl.load(bias_ptr + experts, mask=there, other=0.0))
    if NUM_GROUPS > 1:
        is_open = there & _in_best_groups(
            choice, experts, there, num_experts, bias_ptr is not None, NUM_GROUPS, TOP_GROUPS, GROUPS
        )
    else:
        is_open = there

    keys = tl.where(is_open, _keys(choice, experts), _NO_KEY)
    columns = tl.arange(0, COLUMNS)
    ids = num_experts + columns - TOP_K  # of shared experts; the others follow
    weights = tl.full((COLUMNS,), 1.0, tl.float32)
    for column in range(TOP_K):
        first = tl.min(keys, 0)
        is_first = keys == first
        # Of softmax renormalised, the same without what is not chosen, beside which the chosen may be nothing: from logits.
        value = tl.sum(tl.where(is_first, known if RENORMALISE and not SIGMOID else scores, 0.0), 0)
        ids = tl.where(columns == column, _number(first), ids)
        weights = tl.where(columns == column, value, weights)
        keys = tl.where(is_first, _NO_KEY, keys)
    is_routed = columns < TOP_K
    if RENORMALISE:
        weights = weights / (tl.sum(tl.where(is_routed, weights, 0.0), 0) + 1e-20) if SIGMOID else _softmax(weights, is_routed)
    is_faulty = tl.max(faulty.to(tl.int32), 0) > 0
    weights = tl.where(is_routed, tl.where(is_faulty, float("nan"), weights * scale), 1.0)
    is_column = columns < TOP_K + NUM_SHARED
    tl.store(out_ids_ptr + row * out_ids_stride + columns, ids, mask=is_column)
    tl.store(out_weights_ptr + row * out_weights_stride + columns, weights, mask=is_column)


@triton.jit
def _softmax(values, there):
    """Over the values that are ``there``, whose largest may be infinite."""
    peak = tl.max(tl.where(there, values, float("-inf")), 0)
    powers = tl.where(there, tl.exp(tl.where(values == peak, 0.0, values - peak)), 0.0)
    return powers / tl.sum(powers, 0)


@triton.jit
def _in_best_groups(
    choice,
    experts,
    there,
    num_experts,
    BIASED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Whether an expert belongs to one of the TOP_GROUPS groups with the largest sums of the one or two best choice scores."""
    size = num_experts // NUM_GROUPS
    group_of = experts // size
    groups = tl.arange(0, GROUPS)
    totals = tl.full((GROUPS,), float("-inf"), tl.float32)
    for group in range(NUM_GROUPS):
        values = tl.where(there & (group_of == group), choice, float("-inf"))
        total = tl.max(values, 0)
        if BIASED:
            best = tl.min(tl.where(there & (group_of == group), _keys(choice, experts), _NO_KEY), 0)
            second = tl.max(tl.where(experts == _number(best), float("-inf"), values), 0)
            total += tl.where(size > 1, second, 0.0)
        totals = tl.where(groups == group, total, totals)
    totals = tl.where(totals != totals, float("-inf"), totals)  # of inf and -inf
    keys = tl.where(groups < NUM_GROUPS, _keys(totals, groups), _NO_KEY)
    is_open = experts < 0
    for _ in range(TOP_GROUPS):
        first = tl.min(keys, 0)
        is_open = is_open | (group_of == _number(first))
        keys = tl.where(keys == first, _NO_KEY, keys)
    return is_open


@triton.jit
def _keys(values, numbers):
    """int64 keys that ascend as fp32 ``values`` fall, and among equal ones with their numbers; 0.0 and -0.0 are equal."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    falling = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))  # of negative floats, the larger bits are those of the smaller number
    return falling.to(tl.int64) * _NUMBERS + numbers


@triton.jit
def _number(key):
    """The number in a key of ``_keys``."""
    return (key & (_NUMBERS - 1)).to(tl.int32)
