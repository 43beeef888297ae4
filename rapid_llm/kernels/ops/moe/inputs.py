"""What the rows of the moe family ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe

MAX_EXPERTS = 1024  # shared ones included: their counts are kept in registers
MAX_CHOSEN = 32  # columns of ids
BLOCK = 128  # elements along each side of a weight that share a scale where scales are blocks
MX_GROUP = 32  # elements of k that share a power of two
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BYTES = (torch.int8, torch.float8_e4m3fn)
_LEAST_GROUP = 16  # the least depth of a matrix instruction
_MOST_GROUP = 1024  # of 4-bit codes; a group may also be all of k
_ACTIVATIONS = (
    "x and out [num_tokens, hidden] of one fp32, bf16 or fp16 dtype, ids int32 and weights fp32 [num_tokens, top_k] with top_k "
    "from 1 to 32, at most 1,024 experts, all on one device, inner stride 1"
)


def check_route_experts(
    logits: torch.Tensor,
    out_ids: torch.Tensor,
    out_weights: torch.Tensor,
    scoring: str,
    bias: torch.Tensor | None,
    num_groups: int,
    top_groups: int,
    num_shared: int,
) -> int:
    """top_k, without shared experts. Raises: KernelInputError unless the arguments fit one another."""
    top_k = out_ids.shape[1] - num_shared if out_ids.dim() == 2 else 0
    if (
        logits.dim() != 2
        or logits.dtype not in _FLOATS
        or not 1 <= logits.shape[1] <= MAX_EXPERTS
        or out_ids.shape != (logits.shape[0], top_k + num_shared)
        or out_ids.shape != out_weights.shape
        or (out_ids.dtype, out_weights.dtype) != (torch.int32, torch.float32)
        or not logits.device == out_ids.device == out_weights.device
        or not logits.stride(1) == out_ids.stride(1) == out_weights.stride(1) == 1
        or not _is_choice(scoring, logits.shape[1], num_groups, top_groups, top_k, num_shared)
        or (bias is not None and not _is_selection_bias(bias, logits))
    ):
        raise KernelInputError(
            describe(
                "route_experts", logits=logits, out_ids=out_ids, out_weights=out_weights, bias=bias, scoring=scoring,
                num_groups=num_groups, top_groups=top_groups, num_shared=num_shared,
            ),
            wanted="logits [num_tokens, num_experts] of fp32, bf16 or fp16 with at most 1,024 experts, out_ids int32 and "
            "out_weights fp32 [num_tokens, top_k + num_shared] with at most 32 columns, scoring softmax or sigmoid, bias fp32 "
            "[num_experts] or None, groups that divide experts, top_groups of them with top_k experts or more, inner stride 1",
            change="give each token top_k of the experts it may choose from, and a column more for each shared one",
        )  # fmt: skip
    return top_k


def _is_choice(scoring: str, num_experts: int, num_groups: int, top_groups: int, top_k: int, num_shared: int) -> bool:
    """Whether so many experts can be chosen in this way."""
    return (
        scoring in ("softmax", "sigmoid")
        and num_shared >= 0
        and 1 <= top_groups <= num_groups
        and num_experts % num_groups == 0
        and 1 <= top_k <= num_experts // num_groups * top_groups
        and top_k + num_shared <= MAX_CHOSEN
    )


def _is_selection_bias(bias: torch.Tensor, logits: torch.Tensor) -> bool:
    return bias.shape == logits.shape[1:] and bias.dtype == torch.float32 and bias.device == logits.device and bias.stride(0) == 1


def check_fused_moe(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if not _fit(x, gate_up, down, ids, weights, out) or not x.dtype == gate_up.dtype == down.dtype:
        raise KernelInputError(
            describe("fused_moe", x=x, gate_up=gate_up, down=down, ids=ids, weights=weights, out=out),
            wanted=f"{_ACTIVATIONS}; gate_up [num_experts, 2 * inner, hidden] and down [num_experts, hidden, inner] of x's dtype",
            change="stack the experts of a layer, gate rows before up rows",
        )


def check_fused_moe_fp8(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> int:
    """BLOCK where scales are those of blocks, 0 where an output has one. Raises: KernelInputError unless all fit one another."""
    both = ((gate_up, gate_up_scales), (down, down_scales))
    fit = _fit(x, gate_up, down, ids, weights, out) and all(
        weight.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32 and scales.device == x.device
        for weight, scales in both
    )
    if fit and all(_is_column(weight, scales) for weight, scales in both):
        return 0
    if fit and all(_are_blocks(weight, scales) for weight, scales in both):
        return BLOCK
    raise KernelInputError(
        describe(
            "fused_moe_fp8", x=x, gate_up=gate_up, down=down, gate_up_scales=gate_up_scales, down_scales=down_scales,
            ids=ids, weights=weights, out=out,
        ),
        wanted=f"{_ACTIVATIONS}; gate_up [num_experts, 2 * inner, hidden] and down [num_experts, hidden, inner] of e4m3, "
        "scales fp32: one an output, [num_experts, 2 * inner] and [num_experts, hidden], or one for every 128 x 128 elements",
        change="pass the experts as they were quantised, both products' scales of one kind",
    )  # fmt: skip


def check_fused_moe_w8a16(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> tuple[int, int]:
    """The groups along hidden and inner, 0 where an output has one scale. Raises: KernelInputError unless all fit one another."""
    groups = (-1, -1)
    if _fit(x, gate_up, down, ids, weights, out):
        groups = (_group(gate_up, gate_up_scales, x.shape[1]), _group(down, down_scales, down.shape[2]))
    if (
        min(groups) < 0
        or gate_up.dtype not in _BYTES
        or down.dtype != gate_up.dtype
        or any(scales.dtype != torch.float32 or scales.device != x.device for scales in (gate_up_scales, down_scales))
    ):
        raise KernelInputError(
            describe(
                "fused_moe_w8a16", x=x, gate_up=gate_up, down=down, gate_up_scales=gate_up_scales, down_scales=down_scales,
                ids=ids, weights=weights, out=out,
            ),
            wanted=f"{_ACTIVATIONS}; gate_up [num_experts, 2 * inner, hidden] and down [num_experts, hidden, inner] of int8 or "
            "float8_e4m3fn, scales fp32 [num_experts, 2 * inner] and [num_experts, hidden], or with a third dimension of groups "
            "that divide k and are powers of two from 16 on",
            change="pass the experts as they were quantised, with the scales of their own groups",
        )  # fmt: skip
    return groups


def check_fused_moe_w4a16(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    gate_up_zeros: torch.Tensor | None,
    down_zeros: torch.Tensor | None,
) -> tuple[int, int]:
    """The groups along hidden and inner, 0 where an output has one scale. Raises: KernelInputError unless all fit one another."""
    groups = (-1, -1)
    if _fit(x, gate_up, down, ids, weights, out, packed=True):
        groups = (
            _group(gate_up, gate_up_scales, x.shape[1], _MOST_GROUP),
            _group(down, down_scales, 2 * down.shape[2], _MOST_GROUP),
        )
    if (
        min(groups) < 0
        or not gate_up.dtype == down.dtype == torch.uint8
        or gate_up_scales.dtype not in (x.dtype, torch.float32)
        or down_scales.dtype != gate_up_scales.dtype
        or not gate_up_scales.device == down_scales.device == x.device
        or (gate_up_zeros is None) != (down_zeros is None)
        or not all(
            zeros is None or _are_zeros(zeros, scales)
            for zeros, scales in ((gate_up_zeros, gate_up_scales), (down_zeros, down_scales))
        )
    ):
        raise KernelInputError(
            describe(
                "fused_moe_w4a16", x=x, gate_up=gate_up, down=down, gate_up_scales=gate_up_scales, down_scales=down_scales,
                ids=ids, weights=weights, out=out, gate_up_zeros=gate_up_zeros, down_zeros=down_zeros,
            ),
            wanted=f"{_ACTIVATIONS}; gate_up [num_experts, 2 * inner, hidden / 2] and down [.., hidden, inner / 2] of uint8, "
            "scales [.., groups] of x's dtype or fp32 with groups that divide k and are powers of two from 16 to 1024, or are "
            "all of k, zeros uint8 of the scales' shapes, or None both",
            change="pass two codes a byte, the even one in the low half, with scales and zeros of the same groups",
        )  # fmt: skip
    return groups


def check_fused_moe_mxfp4(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if (
        not _fit(x, gate_up, down, ids, weights, out, packed=True)
        or not gate_up.dtype == down.dtype == gate_up_scales.dtype == down_scales.dtype == torch.uint8
        or not gate_up_scales.device == down_scales.device == x.device
        or not all(
            scales.shape == (*weight.shape[:2], -(-2 * weight.shape[2] // MX_GROUP)) and scales.stride(2) == 1
            for weight, scales in ((gate_up, gate_up_scales), (down, down_scales))
        )
    ):
        raise KernelInputError(
            describe(
                "fused_moe_mxfp4", x=x, gate_up=gate_up, down=down, gate_up_scales=gate_up_scales, down_scales=down_scales,
                ids=ids, weights=weights, out=out,
            ),
            wanted=f"{_ACTIVATIONS}; gate_up [num_experts, 2 * inner, hidden / 2] and down [.., hidden, inner / 2] of uint8, "
            "scales uint8 [num_experts, 2 * inner, hidden / 32] and [num_experts, hidden, inner / 32], rounded up",
            change="pass two codes a byte, the even one in the low half, and the exponent byte of every 32 of them",
        )  # fmt: skip


def _fit(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    packed: bool = False,
) -> bool:
    """Whether activations, routing and experts fit one another, two elements of k a byte where ``packed``."""
    if not (x.dim() == ids.dim() == 2 and gate_up.dim() == down.dim() == 3):
        return False
    per = 2 if packed else 1
    experts, hidden, inner = down.shape[0], down.shape[1], per * down.shape[2]
    tensors = (x, gate_up, down, ids, weights, out)
    return (
        1 <= experts <= MAX_EXPERTS
        and hidden > 0
        and inner > 0
        and hidden % per == 0
        and gate_up.shape == (experts, 2 * inner, hidden // per)
        and x.shape[1] == hidden
        and x.shape == out.shape
        and x.dtype in _FLOATS
        and x.dtype == out.dtype
        and ids.shape == weights.shape
        and ids.shape[0] == x.shape[0]
        and 1 <= ids.shape[1] <= MAX_CHOSEN
        and ids.dtype == torch.int32
        and weights.dtype == torch.float32
        and all(tensor.device == x.device and tensor.stride(-1) == 1 for tensor in tensors)
    )


def _is_column(weight: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether ``scales`` has one value for each output: [E, n] or [E, n, 1]."""
    return scales.shape in (weight.shape[:2], (*weight.shape[:2], 1))


def _are_blocks(weight: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether ``scales`` has one value for every 128 x 128 elements of each expert."""
    experts, n, k = weight.shape
    return scales.shape == (experts, -(-n // BLOCK), -(-k // BLOCK)) and scales.stride(2) == 1


def _group(weight: torch.Tensor, scales: torch.Tensor, k: int, most: int | None = None) -> int:
    """Elements along k that share a scale; 0 where an output has one, -1 where no such groups can be."""
    if _is_column(weight, scales):
        return 0
    if scales.dim() != 3 or scales.shape[:2] != weight.shape[:2] or scales.stride(2) != 1 or not scales.shape[2]:
        return -1
    group = k // scales.shape[2]
    within = k % scales.shape[2] == 0 and group >= _LEAST_GROUP and (most is None or group <= most)
    return group if within and not group & (group - 1) else -1


def _are_zeros(zeros: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether ``zeros`` has a code for each scale."""
    return (
        zeros.shape == scales.shape
        and zeros.dtype == torch.uint8
        and zeros.device == scales.device
        and (zeros.dim() == 2 or zeros.stride(2) == 1)
    )
