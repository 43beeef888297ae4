"""Mixtures of experts in plain torch: one expert after another, of those that somebody goes to."""

from collections.abc import Callable

import torch

from rapid_llm.kernels.ops.moe.inputs import (
    BLOCK,
    MX_GROUP,
    check_fused_moe,
    check_fused_moe_fp8,
    check_fused_moe_mxfp4,
    check_fused_moe_w4a16,
    check_fused_moe_w8a16,
    check_route_experts,
)

_CHUNK = 1 << 20  # elements of a weight that are fp32 at one time: 4 MiB, which a CPU's cache holds until they are multiplied
_LARGEST, _LEAST_SCALE = 448.0, 2.0**-100  # of e4m3; of a row of zeros, so that a quotient is never 0 / 0

_Product = Callable[[torch.Tensor, int], torch.Tensor]
"""Activations fp32 [rows, k] and the number of an expert -> fp32 [rows, n]."""


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
    Raises: KernelInputError on any other shape, dtype, stride or device, and where top_k cannot be chosen; nothing is written
    then.
    Twin: kernels/reference/moe.py::route_experts. Origin: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; groups, bias and
    shared experts as in DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437.
    """
    top_k = check_route_experts(logits, out_ids, out_weights, scoring, bias, num_groups, top_groups, num_shared)
    num_tokens, num_experts = logits.shape
    if not num_tokens:
        return out_weights
    wide = logits.float()
    faulty = wide.isnan()
    known = wide.masked_fill(faulty, -torch.inf)
    scores = known.sigmoid() if scoring == "sigmoid" else _softmax(known)
    choice = known if bias is None else (scores + bias).masked_fill_(faulty, -torch.inf)  # scores rise with logits
    if num_groups > 1:
        groups = choice.view(num_tokens, num_groups, -1)
        best = groups.topk(1 if bias is None else min(2, groups.shape[2]), dim=2).values.sum(2)
        kept = best.sort(dim=1, descending=True, stable=True).indices[:, :top_groups]
        first = kept.sort(dim=1).values.unsqueeze(2) * groups.shape[2]
        open_to = (first + torch.arange(groups.shape[2], device=logits.device)).flatten(
            1
        )  # ascending, so that ties stay in order
        chosen = open_to.gather(1, _largest(choice.gather(1, open_to), top_k))
    else:
        chosen = _largest(choice, top_k)
    weights = scores.gather(1, chosen)
    if renormalise and scoring == "softmax":  # the same without what is not chosen, beside which these may be nothing
        weights = _softmax(known.gather(1, chosen))
    elif renormalise:
        weights /= weights.sum(1, keepdim=True) + 1e-20
    weights.masked_fill_(faulty.any(1, keepdim=True), torch.nan)
    out_ids[:, :top_k] = chosen
    out_weights[:, :top_k] = weights * scale
    out_ids[:, top_k:] = torch.arange(num_experts, num_experts + num_shared, device=logits.device)
    out_weights[:, top_k:] = 1.0
    return out_weights


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    """Over each row, whose largest may be infinite."""
    peak = logits.amax(1, keepdim=True)
    powers = torch.where(logits == peak, 0.0, logits - peak).exp_()
    return powers.div_(powers.sum(1, keepdim=True))


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the ``count`` largest of each row in falling order, ties by rising column."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def fused_moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the sum over each token's experts of weight * down(silu(gate x) * up x), accumulated in fp32, into ``out``.

    Args:
        x: [num_tokens, hidden], fp32 | bf16 | fp16; inner stride 1, row stride free.
        gate_up: [num_experts, 2 * inner, hidden], dtype of x, gate rows first; inner stride 1, others free.
        down: [num_experts, hidden, inner], dtype of x; inner stride 1, others free.
        ids: [num_tokens, top_k], int32; inner stride 1, row stride free. One that is no expert's, such as -1, adds nothing.
        weights: [num_tokens, top_k], fp32; inner stride 1, row stride free.
        out: [num_tokens, hidden], dtype and device of x, apart from it; inner stride 1, row stride free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/moe.py::fused_moe. Origin: this repo.
    """
    check_fused_moe(x, gate_up, down, ids, weights, out)

    def product(weight: torch.Tensor) -> _Product:
        return lambda rows, expert: _by_chunks(rows, weight.shape[1], lambda part: weight[expert, part].float())

    return _mixture(x, ids, weights, out, down.shape[0], product(gate_up), product(down))


def fused_moe_fp8(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """``fused_moe`` of e4m3 experts; x, and the activation as x's dtype holds it, are rounded to e4m3 with scales of their own.

    Args:
        x, ids, weights, out: as in ``fused_moe``.
        gate_up, down: float8_e4m3fn of the shapes there; inner stride 1, others free.
        gate_up_scales, down_scales: fp32: [num_experts, n], one an output, and a token has one; or
            [num_experts, ceil(n / 128), ceil(k / 128)], one a square of 128 x 128, and every 128 of k of a token have one; inner
            stride 1 then, others free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/moe.py::fused_moe_fp8. Origin: this repo; blocks as in DeepSeek-AI 2024,
    https://arxiv.org/abs/2412.19437.
    """
    block = check_fused_moe_fp8(x, gate_up, down, gate_up_scales, down_scales, ids, weights, out)
    values = _every_e4m3(x.device)

    def product(weight: torch.Tensor, scales: torch.Tensor) -> _Product:
        n, k = weight.shape[1:]

        def numbers(expert: int, part: slice) -> torch.Tensor:
            wide = _looked_up(values, weight[expert, part])
            if not block:
                return wide.mul_(scales[expert, part].view(-1, 1))
            outputs = torch.arange(part.start, part.stop, device=x.device) // BLOCK
            return wide.mul_(scales[expert].index_select(0, outputs).repeat_interleave(BLOCK, dim=1)[:, :k])

        return lambda rows, expert: _by_chunks(
            _as_e4m3(rows.to(x.dtype).float(), block, values), n, lambda part: numbers(expert, part)
        )

    return _mixture(x, ids, weights, out, down.shape[0], product(gate_up, gate_up_scales), product(down, down_scales))


def fused_moe_w8a16(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """``fused_moe`` of experts of a byte an element.

    Args:
        x, ids, weights, out: as in ``fused_moe``.
        gate_up, down: int8 | float8_e4m3fn, both, of the shapes there; inner stride 1, others free.
        gate_up_scales, down_scales: fp32 [num_experts, n], one an output; or [num_experts, n, groups] along k, inner stride 1,
            others free. A group is a power of two from 16 on.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/moe.py::fused_moe_w8a16. Origin: this repo.
    """
    check_fused_moe_w8a16(x, gate_up, down, gate_up_scales, down_scales, ids, weights, out)
    values = _every_e4m3(x.device)

    def product(weight: torch.Tensor, scales: torch.Tensor) -> _Product:
        def numbers(expert: int, part: slice) -> torch.Tensor:
            stored = weight[expert, part]
            wide = stored.float() if stored.dtype == torch.int8 else _looked_up(values, stored)
            return _scaled(wide, scales[expert, part])

        return lambda rows, expert: _by_chunks(rows, weight.shape[1], lambda part: numbers(expert, part))

    return _mixture(x, ids, weights, out, down.shape[0], product(gate_up, gate_up_scales), product(down, down_scales))


def fused_moe_w4a16(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor,
    gate_up_zeros: torch.Tensor | None = None,
    down_zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """``fused_moe`` of experts of 4-bit codes.

    Args:
        x, ids, weights, out: as in ``fused_moe``.
        gate_up, down: [num_experts, 2 * inner, hidden / 2] and [num_experts, hidden, inner / 2], uint8, two codes a byte: element
            2i in the low half, 2i + 1 in the high one; inner stride 1, others free.
        gate_up_scales, down_scales: [num_experts, n, groups] along k, dtype of x or fp32; inner stride 1, others free. A group is
            a power of two from 16 to 1024, or all of k ([num_experts, n] says so too).
        gate_up_zeros, down_zeros: uint8 of the scales' shapes, the code that stands for 0; strides as there. None is 8.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/moe.py::fused_moe_w4a16. Origin: this repo.
    """
    check_fused_moe_w4a16(x, gate_up, down, gate_up_scales, down_scales, ids, weights, out, gate_up_zeros, down_zeros)

    def product(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> _Product:
        def numbers(expert: int, part: slice) -> torch.Tensor:
            codes = _codes(weight[expert, part]).float()
            if zeros is None:
                codes.sub_(8)
            else:
                points = zeros[expert, part].reshape(codes.shape[0], -1)
                codes.view(codes.shape[0], points.shape[1], -1).sub_(points.unsqueeze(2))
            return _scaled(codes, scales[expert, part].float())

        return lambda rows, expert: _by_chunks(rows, weight.shape[1], lambda part: numbers(expert, part))

    first, second = product(gate_up, gate_up_scales, gate_up_zeros), product(down, down_scales, down_zeros)
    return _mixture(x, ids, weights, out, down.shape[0], first, second)


def fused_moe_mxfp4(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """``fused_moe`` of experts of e2m1 codes with a power of two for every 32 along k.

    Args:
        x, ids, weights, out: as in ``fused_moe``.
        gate_up, down: [num_experts, 2 * inner, hidden / 2] and [num_experts, hidden, inner / 2], uint8, two codes a byte: element
            2i in the low half, 2i + 1 in the high one; inner stride 1, others free.
        gate_up_scales, down_scales: [num_experts, n, ceil(k / 32)], uint8: 2 ** (byte - 127), NaN for 255; inner stride 1, others
            free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/moe.py::fused_moe_mxfp4. Origin: this repo; the format is that of Rouhani et al. 2023,
    https://arxiv.org/abs/2310.10537.
    """
    check_fused_moe_mxfp4(x, gate_up, down, gate_up_scales, down_scales, ids, weights, out)
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=x.device)
    every_e2m1 = torch.cat((sizes, -sizes))
    powers = torch.exp2(torch.arange(256, dtype=torch.float64, device=x.device) - 127).float()
    powers[255] = torch.nan

    def product(weight: torch.Tensor, exponents: torch.Tensor) -> _Product:
        k = 2 * weight.shape[2]

        def numbers(expert: int, part: slice) -> torch.Tensor:
            codes = _codes(weight[expert, part])
            wide = every_e2m1.index_select(0, codes.reshape(-1).int()).view(codes.shape)
            scales = powers.index_select(0, exponents[expert, part].reshape(-1).int()).view(codes.shape[0], -1)
            return wide.mul_(scales.repeat_interleave(MX_GROUP, dim=1)[:, :k])

        return lambda rows, expert: _by_chunks(rows, weight.shape[1], lambda part: numbers(expert, part))

    return _mixture(x, ids, weights, out, down.shape[0], product(gate_up, gate_up_scales), product(down, down_scales))


def _mixture(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    num_experts: int,
    first: _Product,
    second: _Product,
) -> torch.Tensor:
    """Into ``out``: the weighted sum over each token's experts of the second product of the gated first one."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    order = ids.flatten().sort(stable=True)
    for expert, count, end in zip(*_runs(order.values), strict=True):
        if 0 <= expert < num_experts:
            pairs = order.indices[end - count : end]
            tokens = pairs // ids.shape[1]
            gate, up = first(x.index_select(0, tokens).float(), expert).chunk(2, dim=1)
            result = second(torch.nn.functional.silu(gate).mul_(up), expert)
            shares = weights[tokens, pairs % ids.shape[1]]
            total.index_add_(0, tokens, result.mul_(shares.unsqueeze(1)))
    return out.copy_(total)


def _runs(ascending: torch.Tensor) -> tuple[list[int], list[int], list[int]]:
    """The values of an ascending tensor, how often each stands there, and where its run ends."""
    values, counts = torch.unique_consecutive(ascending, return_counts=True)
    return values.tolist(), counts.tolist(), counts.cumsum(0).tolist()


def _by_chunks(rows: torch.Tensor, n: int, numbers: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """``rows`` [R, k] times the rows of a weight that ``numbers`` gives as fp32, a chunk of its ``n`` outputs at a time."""
    step = max(_CHUNK // rows.shape[1], 1)
    return torch.cat([torch.mm(rows, numbers(slice(start, min(start + step, n))).t()) for start in range(0, n, step)], dim=1)


def _scaled(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 ``numbers`` [n, k] times their ``scales``, [n] or [n, groups]; in place."""
    scales = scales.reshape(numbers.shape[0], -1)
    numbers.view(numbers.shape[0], scales.shape[1], -1).mul_(scales.unsqueeze(2))
    return numbers


def _codes(packed: torch.Tensor) -> torch.Tensor:
    """The 4-bit codes [n, k] of bytes [n, k / 2]."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def _every_e4m3(device: torch.device) -> torch.Tensor:
    """The fp32 value of each of the 256 bytes."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).to(torch.float32)


def _looked_up(values: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """e4m3 numbers as fp32: looked up, since torch converts them on a CPU seven times slower than that."""
    return values.index_select(0, stored.view(torch.uint8).reshape(-1).int()).view(stored.shape)


def _as_e4m3(rows: torch.Tensor, block: int, values: torch.Tensor) -> torch.Tensor:
    """fp32 rows [R, k] as e4m3 holds them with a scale a row, or one for every ``block`` of its elements."""
    rounded = []
    for part in torch.split(rows, block or rows.shape[1], dim=1):
        largest = part.abs().masked_fill(part.isnan(), 0.0).amax(1, keepdim=True)
        scales = (largest / _LARGEST).clamp_(min=_LEAST_SCALE)
        codes = (part / scales).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        rounded.append(_looked_up(values, codes) * scales)
    return torch.cat(rounded, dim=1)
