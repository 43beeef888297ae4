"""Mixtures of experts in float64, one token and one expert at a time."""

import math
from collections.abc import Callable

import torch

_Rounding = Callable[[torch.Tensor], torch.Tensor]


def route_experts(
    logits: torch.Tensor,
    *,
    top_k: int,
    scoring: str = "softmax",
    renormalise: bool = True,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    num_shared: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, int64, and float64 weights, both [T, top_k + num_shared]."""
    num_experts = logits.shape[1]
    shared = list(range(num_experts, num_experts + num_shared))
    all_ids, all_weights = [], []
    for row in logits.double().cpu():
        scores = _scores(row, scoring)
        choice = choice_scores(row, scoring, bias)
        groups = sorted(range(num_groups), key=lambda group: (-group_score(choice, group, num_groups, bias), group))[:top_groups]
        size = num_experts // num_groups
        open_to = [expert for group in groups for expert in range(group * size, (group + 1) * size)]
        chosen = sorted(open_to, key=lambda expert: (-choice[expert], expert))[:top_k]
        weights = scores[chosen]
        if renormalise:  # of softmax: the same without what is not chosen, which may be all but everything
            weights = _scores(row[chosen], scoring) if scoring == "softmax" else weights / (weights.sum() + 1e-20)
        if row.isnan().any():
            weights = torch.full_like(weights, math.nan)
        all_ids.append(chosen + shared)
        all_weights.append([*(weights * scale).tolist(), *[1.0] * num_shared])
    shape = (logits.shape[0], top_k + num_shared)
    return torch.tensor(all_ids, dtype=torch.int64).view(shape), torch.tensor(all_weights, dtype=torch.float64).view(shape)


def choice_scores(row: torch.Tensor, scoring: str, bias: torch.Tensor | None) -> list[float]:
    """What the experts of one token are ordered by: logits, as scores rise with them, or biased scores. NaN counts as -inf."""
    choice = row.double().cpu() if bias is None else _scores(row.double().cpu(), scoring) + bias.double().cpu()
    return [-math.inf if math.isnan(value) else value for value in choice.tolist()]


def group_score(choice: list[float], group: int, num_groups: int, bias: torch.Tensor | None) -> float:
    """The largest choice score of a group, or with a bias the sum of its two largest."""
    size = len(choice) // num_groups
    best = sorted(choice[group * size : (group + 1) * size], reverse=True)
    return best[0] if bias is None else sum(best[:2])


def _scores(row: torch.Tensor, scoring: str) -> torch.Tensor:
    if scoring == "sigmoid":
        return torch.sigmoid(row)
    peak = max((value for value in row.tolist() if not math.isnan(value)), default=math.nan)
    powers = torch.exp(torch.where(row == peak, 0.0, row - peak))  # exactly 1 at the peak, which may be infinite
    return powers / powers.nansum()


def fused_moe(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """[T, H], [E, 2I, H], [E, H, I], int [T, K], [T, K] -> float64 [T, H]."""
    return _mixture(x, gate_up.double(), down.double(), ids, weights)


def fused_moe_fp8(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """e4m3 weights, scales [E, n] or of blocks of 128 x 128 -> float64 [T, H]. What is rounded to e4m3 has x's dtype before."""
    by_blocks = _is_blocks(down_scales, down)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        values = values.to(x.dtype).float()
        return torch.cat([_nearest_e4m3(part) for part in torch.split(values, 128 if by_blocks else len(values))])

    return _mixture(x, numbers_fp8(gate_up, gate_up_scales), numbers_fp8(down, down_scales), ids, weights, rounded)


def fused_moe_w8a16(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """int8 or e4m3 weights, scales [E, n] or [E, n, G] -> float64 [T, H]."""
    return _mixture(x, numbers_w8(gate_up, gate_up_scales), numbers_w8(down, down_scales), ids, weights)


def fused_moe_w4a16(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    gate_up_zeros: torch.Tensor | None = None,
    down_zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """uint8 weights of two codes, scales and zeros [E, n] or [E, n, G] -> float64 [T, H]."""
    wide = numbers_w4(gate_up, gate_up_scales, gate_up_zeros), numbers_w4(down, down_scales, down_zeros)
    return _mixture(x, *wide, ids, weights)


def fused_moe_mxfp4(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """uint8 weights of two e2m1 codes, exponent bytes [E, n, G] -> float64 [T, H]."""
    return _mixture(x, numbers_mxfp4(gate_up, gate_up_scales), numbers_mxfp4(down, down_scales), ids, weights)


def numbers_fp8(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What e4m3 [E, n, k] with scales [E, n] or of blocks of 128 x 128 stands for, float64."""
    if not _is_blocks(scales, weight):
        return numbers_w8(weight, scales)
    wide = scales.double().repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)
    return weight.float().double() * wide[:, : weight.shape[1], : weight.shape[2]]


def numbers_w8(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What int8 or e4m3 [E, n, k] with scales [E, n] or [E, n, G] stands for, float64."""
    return weight.float().double() * _spread(scales, weight)


def numbers_w4(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """What uint8 [E, n, k / 2] with scales and zeros [E, n] or [E, n, G] stands for, float64 [E, n, k]."""
    codes = _codes(weight).double()
    offsets = torch.full_like(scales, 8.0, dtype=torch.float64) if zeros is None else zeros
    return (codes - _spread(offsets, codes)) * _spread(scales, codes)


def numbers_mxfp4(weight: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """What uint8 [E, n, k / 2] of e2m1 codes with exponent bytes [E, n, ceil(k / 32)] stands for, float64 [E, n, k]."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64, device=weight.device)
    codes = _codes(weight).long()
    powers = torch.exp2(exponents.double() - 127)
    powers[exponents == 255] = math.nan
    spread = powers.repeat_interleave(32, dim=2)[:, :, : codes.shape[2]]
    return table[codes & 7] * torch.where(codes >= 8, -1.0, 1.0) * spread


def _mixture(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    rounded: _Rounding | None = None,
) -> torch.Tensor:
    """The sum over each token's experts; what goes into a product passes through ``rounded``."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, experts in enumerate(ids.tolist()):
        row = x[token].double() if rounded is None else rounded(x[token]).double()
        for slot, expert in enumerate(experts):
            if 0 <= expert < down.shape[0]:
                gate, up = (gate_up[expert] @ row).chunk(2)
                activation = gate * torch.sigmoid(gate) * up
                if rounded is not None:
                    activation = rounded(activation).double()
                out[token] += weights[token, slot].double() * (down[expert] @ activation)
    return out


def _nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    """fp32 values as e4m3 with a scale of their own holds them; the scale and the quotients are fp32, as the op defines them."""
    scale = (values.nan_to_num(0.0, math.inf, -math.inf).abs().amax() / 448).clamp(min=2.0**-100)
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float().double() * scale.double()


def _codes(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=3).flatten(2)


def _spread(grouped: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """One float64 value for each element of ``numbers`` [E, n, k] of the [E, n] or [E, n, G] that groups have."""
    grouped = grouped.double().reshape(*numbers.shape[:2], -1)
    return grouped.repeat_interleave(numbers.shape[2] // grouped.shape[2], dim=2)


def _is_blocks(scales: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``scales`` are those of squares, not of outputs."""
    return scales.dim() == 3 and scales.shape[:2] != weight.shape[:2]
