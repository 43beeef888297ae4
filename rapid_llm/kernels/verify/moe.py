"""Cases of the moe family. Experts are chosen by scores that are equal or well apart, so that ids are compared exactly."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from rapid_llm.kernels.ops.interfaces import Contract, Sizes
from rapid_llm.kernels.ops.moe.rows import (
    FUSED_MOE,
    FUSED_MOE_FP8,
    FUSED_MOE_MXFP4,
    FUSED_MOE_W4A16,
    FUSED_MOE_W8A16,
    ROUTE_EXPERTS,
)
from rapid_llm.kernels.reference import moe as reference
from rapid_llm.kernels.verify.buffers import Stage, spikes, uniform, view_of
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check

_APART = 1e-6  # of scores of about 1 that fp32 must not swap
_FAR = 1000.0  # between the scales of neighbouring groups
# num_groups, top_groups, with a bias, scoring, renormalise, scale, num_shared: a model's way to choose, by turns.
_WAYS: tuple[tuple[int, int, bool, str, bool, float, int], ...] = (
    (1, 1, False, "softmax", True, 1.0, 0),
    (1, 1, False, "softmax", False, 1.0, 2),
    (4, 2, True, "sigmoid", True, 2.5, 1),
    (4, 2, False, "softmax", False, 16.0, 0),
    (1, 1, True, "sigmoid", True, 1.0, 0),
    (1, 1, False, "sigmoid", False, 1.5, 0),
    (2, 1, True, "softmax", True, 1.0, 1),
)


def _route_experts(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    tokens, experts, top_k = sizes["num_tokens"], sizes["num_experts"], sizes["top_k"]
    turn = tokens + experts + top_k + ROUTE_EXPERTS.dtypes.index(str(dtype).removeprefix("torch."))
    num_groups, top_groups, biased, scoring, renormalise, scale, shared = _WAYS[turn % len(_WAYS)]
    if hard == "ties" and biased:
        scoring = "sigmoid"  # of 0 it is 1 / 2 wherever it is computed
    stage = Stage(ROUTE_EXPERTS, sizes, dtype, device)
    values, offsets = _logits((tokens, experts), hard, generator), None
    if biased:
        offsets = torch.randint(-4, 5, (experts,), generator=generator) / 8.0
        if hard != "ties":
            offsets = uniform((experts,), -0.5, 0.5, generator)
            _move_apart(values, dtype, scoring, offsets, num_groups, generator)
    how: dict[str, Any] = {
        "scoring": scoring,
        "renormalise": renormalise,
        "scale": scale,
        "bias": None if offsets is None else stage.place("bias", offsets),
        "num_groups": num_groups,
        "top_groups": top_groups,
        "num_shared": shared,
    }
    logits = stage.place("logits", values)
    ids, weights = reference.route_experts(logits, top_k=top_k, **how)
    out_ids, out_weights = (stage.unwritten(name, (tokens, top_k + shared)) for name in ("out_ids", "out_weights"))
    # exp and a sum in fp32: an exponent of 80 is off by 80 times half an eps, and so is what comes of it.
    checks = [
        Check("out_ids", lambda: out_ids, ids, 0.0, 0.0),
        Check("out_weights", lambda: out_weights, weights, 2e-5, 1e-7 * scale),
    ]
    arguments = {"logits": logits, **how, "out_ids": out_ids, "out_weights": out_weights}
    return Case(hard or "random", arguments, [*checks, *stage.guards()])


def _logits(shape: tuple[int, int], hard: str | None, generator: torch.Generator) -> torch.Tensor:
    """Logits as a router gives them, with every other row (the first included) hostile in the named way."""
    logits = 2 * torch.randn(shape, generator=generator)
    hostile = logits[::2]
    if hard == "nan_row":
        hostile[:, shape[1] // 3] = math.nan
        hostile[::2] = math.nan
    elif hard == "all_minus_inf":
        hostile[:] = -math.inf
    elif hard == "plus_inf":
        hostile[:, shape[1] // 2] = math.inf
    elif hard == "ties":
        logits.zero_()
    elif hard == "large_magnitude":
        hostile.mul_(100.0)
    return logits


def _move_apart(
    logits: torch.Tensor, dtype: torch.dtype, scoring: str, bias: torch.Tensor, num_groups: int, generator: torch.Generator
) -> None:
    """Redraw rows until no two biased scores of a row, or of its groups, are nearly equal, wherever that can be had."""
    for row in logits:
        for _ in range(200):
            choice = reference.choice_scores(row.to(dtype), scoring, bias)
            groups = [reference.group_score(choice, group, num_groups, bias) for group in range(num_groups)]
            if _are_apart(choice) and _are_apart(groups):
                break
            row.copy_(torch.where(row.isfinite(), 2 * torch.randn(row.shape, generator=generator), row))


def _are_apart(scores: list[float]) -> bool:
    ordered = sorted(score for score in scores if math.isfinite(score))
    return all(later - earlier > _APART for earlier, later in pairwise(ordered))


def _fused_moe(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    stage = Stage(FUSED_MOE, sizes, dtype, device)
    shrunk = 1 / 64 if hard == "large_magnitude" and dtype == torch.float16 else 1.0  # or the activation would pass 65,504
    experts = {}
    for name, shape in _shapes(sizes).items():
        experts[name] = stage.place(name, torch.randn(shape, generator=generator) * shrunk / math.sqrt(shape[2]))
    return _case(stage, sizes, generator, hard, reference.fused_moe, torch.Tensor.double, experts)


def _fused_moe_fp8(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    stage = Stage(FUSED_MOE_FP8, sizes, dtype, device)
    shrunk = 1 / 64 if hard == "large_magnitude" and dtype == torch.float16 else 1.0
    experts: dict[str, torch.Tensor | None] = {}
    scales: dict[str, torch.Tensor | None] = {}
    for name, shape in _shapes(sizes).items():
        codes = torch.randint(0, 256, shape, generator=generator)
        codes = torch.where(codes & 127 > 0x6F, codes - 16, codes)  # no NaN, and nothing past 240
        experts[name] = _place_bytes(FUSED_MOE_FP8, name, sizes, dtype, codes.to(device)).view(torch.float8_e4m3fn)
        count, k, n = shape[0], shape[2], shape[1]
        kept = (count, -(-n // 128), -(-k // 128)) if sizes["group"] else (count, n, 1)
        values = uniform(kept, 0.5, 1.5, generator) * shrunk / (64 * math.sqrt(k))
        placed = stage.place(f"{name}_scales", values)
        scales[f"{name}_scales"] = placed if sizes["group"] or sizes["num_tokens"] % 2 else placed[:, :, 0]
    return _case(stage, sizes, generator, hard, reference.fused_moe_fp8, reference.numbers_fp8, experts, scales)


def _fused_moe_w8a16(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None
) -> Case:
    is_e4m3 = sizes["num_experts"] % 2 == 1
    stage = Stage(FUSED_MOE_W8A16, sizes, dtype, device)
    experts: dict[str, torch.Tensor | None] = {}
    scales: dict[str, torch.Tensor | None] = {}
    for name, shape in _shapes(sizes).items():
        codes = _all_codes(shape, 256, hard, generator)
        if is_e4m3:
            codes = torch.where(codes & 127 == 127, 0, codes)  # NaN would hide what the row does with other weights
        placed = _place_bytes(FUSED_MOE_W8A16, name, sizes, dtype, codes.to(device))
        experts[name] = placed.view(torch.float8_e4m3fn if is_e4m3 else torch.int8)
        kept = stage.place(f"{name}_scales", _scales(shape, sizes["group"], hard, dtype, generator) / 64)
        scales[f"{name}_scales"] = kept if kept.shape[2] > 1 or sizes["num_tokens"] % 2 else kept[:, :, 0]
    return _case(stage, sizes, generator, hard, reference.fused_moe_w8a16, reference.numbers_w8, experts, scales)


def _fused_moe_w4a16(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None
) -> Case:
    stage = Stage(FUSED_MOE_W4A16, sizes, dtype, device)
    experts: dict[str, torch.Tensor | None] = {}
    scales: dict[str, torch.Tensor | None] = {}
    zeros: dict[str, torch.Tensor | None] = {}
    for name, (count, n, k) in _shapes(sizes).items():
        codes = _all_codes((count, n, k // 2), 256, hard, generator)
        experts[name] = _place_bytes(FUSED_MOE_W4A16, name, sizes, dtype, codes.to(device))
        values = _scales((count, n, k), sizes["group"], hard, dtype, generator) / 4
        # fp32 beside any dtype, or x's own
        scales[f"{name}_scales"] = values.to(device) if count % 3 == 0 else stage.place(f"{name}_scales", values)
        points = _all_codes(tuple(values.shape), 16, hard, generator)
        with_zeros = count % 2 == 0 or hard == "every_code"
        zeros[f"{name}_zeros"] = (
            _place_bytes(FUSED_MOE_W4A16, f"{name}_zeros", sizes, dtype, points.to(device)) if with_zeros else None
        )
    return _case(stage, sizes, generator, hard, reference.fused_moe_w4a16, reference.numbers_w4, experts, scales, zeros)


def _fused_moe_mxfp4(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None
) -> Case:
    stage = Stage(FUSED_MOE_MXFP4, sizes, dtype, device)
    experts: dict[str, torch.Tensor | None] = {}
    scales: dict[str, torch.Tensor | None] = {}
    shrunk = 8 if hard == "large_magnitude" and dtype == torch.float16 else 0
    for name, (count, n, k) in _shapes(sizes).items():
        codes = _all_codes((count, n, k // 2), 256, hard, generator)
        experts[name] = _place_bytes(FUSED_MOE_MXFP4, name, sizes, dtype, codes.to(device))
        exponents = torch.randint(-2, 2, (count, n, -(-k // 32)), generator=generator) - round(math.log2(k) / 2) - shrunk
        if hard == "far_scales":
            exponents.view(-1)[::2] -= 10
        scales[f"{name}_scales"] = _place_bytes(FUSED_MOE_MXFP4, f"{name}_scales", sizes, dtype, (127 + exponents).to(device))
    return _case(stage, sizes, generator, hard, reference.fused_moe_mxfp4, reference.numbers_mxfp4, experts, scales)


def _shapes(sizes: Sizes) -> dict[str, tuple[int, int, int]]:
    """[experts, n, k] of both weights."""
    experts, hidden, inner = sizes["num_experts"], sizes["hidden_size"], sizes["intermediate_size"]
    return {"gate_up": (experts, 2 * inner, hidden), "down": (experts, hidden, inner)}


def _case(
    stage: Stage,
    sizes: Sizes,
    generator: torch.Generator,
    hard: str | None,
    twin: Callable[..., torch.Tensor],
    numbers: Callable[..., torch.Tensor],
    *experts: dict[str, Any],
) -> Case:
    """The case of these experts: activations, who goes where, and what must come out.

    Args:
        numbers: gives the float64 weight of a product's tensors, which stand in ``experts`` in the order of its arguments.
    """
    tokens, top_k, hidden = sizes["num_tokens"], sizes["top_k"], sizes["hidden_size"]
    values = torch.randn((tokens, hidden), generator=generator)
    if hard == "large_magnitude":
        values[::2] = spikes((-(-tokens // 2), hidden), generator)
    elif hard == "nan_token":
        values[1::3, hidden // 2] = math.nan
    x = stage.place("x", values)
    routed = {
        "ids": stage.place("ids", _routes(sizes, hard, generator)),
        "weights": stage.place("weights", uniform((tokens, top_k), 0.05, 1.5, generator)),
    }
    out = stage.unwritten("out", (tokens, hidden))
    named = {name: tensor for tensors in experts for name, tensor in tensors.items()}
    expected = twin(x, **named, **routed)
    gate_up, down = (numbers(*parts) for parts in zip(*(tensors.values() for tensors in experts), strict=True))
    check = Check("out", lambda: out, expected, *_tolerance(x, gate_up, down, **routed, by_e4m3=twin is reference.fused_moe_fp8))
    return Case(hard or "random", {"x": x, **named, **routed, "out": out}, [check, *stage.guards()])


def _routes(sizes: Sizes, hard: str | None, generator: torch.Generator) -> torch.Tensor:
    """Other experts for each column of a token, or all tokens on one, or ids that are no expert's among them."""
    tokens, experts, top_k = sizes["num_tokens"], sizes["num_experts"], sizes["top_k"]
    if hard == "one_expert":
        return torch.full((tokens, top_k), experts - 1)
    ids = torch.rand((tokens, experts), generator=generator).argsort(1)[:, :top_k]
    if hard == "foreign_ids":
        foreign = torch.tensor([-1, experts, -2, (1 << 31) - 1, -(1 << 31), experts + 1])
        chosen = torch.rand(ids.shape, generator=generator) < 0.4
        ids = torch.where(chosen, foreign[torch.arange(ids.numel()).view(ids.shape) % len(foreign)], ids)
        ids[::4] = -1
    return ids


def _all_codes(shape: tuple[int, ...], count: int, hard: str | None, generator: torch.Generator) -> torch.Tensor:
    """Codes below ``count``: random ones, or every one in turn."""
    if hard == "every_code":
        return torch.arange(math.prod(shape)).remainder(count).view(shape)
    return torch.randint(0, count, shape, generator=generator)


def _scales(
    shape: tuple[int, int, int], group: int, hard: str | None, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """A scale of about 1 / sqrt(k) for each group of each output, or every other one a thousandth of that."""
    experts, n, k = shape
    scales = uniform((experts, n, k // group if group else 1), 0.5, 1.5, generator) / math.sqrt(k)
    if hard == "far_scales":
        scales.view(-1)[::2] /= _FAR
    if hard == "large_magnitude" and dtype == torch.float16:
        scales /= 256  # or the activation would pass 65,504
    return scales


def _place_bytes(contract: Contract, name: str, sizes: Sizes, dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    """A view that holds the bytes ``values`` [experts, rows, columns], between others, in the view whose turn it is."""
    experts, rows, columns = values.shape
    view = view_of(contract, name, sizes, dtype)
    stride, offset = columns + (16 if view == "strided" else 0), 64 + (view == "offset")
    whole = rows * stride + (16 if view == "strided" else 0)
    storage = torch.full((offset + experts * whole + 64,), 0x7F, dtype=torch.uint8, device=values.device)
    return storage.as_strided((experts, rows, columns), (whole, stride, 1), offset).copy_(values)


def _tolerance(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, by_e4m3: bool
) -> tuple[float, float]:
    """What roundings on the way add up to, like a random walk; 4 is for the worst of many outputs.

    Gate and up are sums of fp32 products over hidden; the activation and each expert's result are rounded to x's dtype; sums over
    inner and over top_k follow, and one rounding of the result. Where activations are rounded to e4m3, a difference before that
    may send an element to its other neighbour, an eighth of it away at most: one of 32 at worst, since a step of bf16 before it
    is as much of a step of e4m3.
    """
    fp32, dtype = torch.finfo(torch.float32).eps, torch.finfo(x.dtype)
    half = dtype.eps / 2
    largest = 0.0
    for token, experts in enumerate(ids.tolist()):
        row = x[token].double()
        square = torch.zeros_like(row)
        for slot, expert in enumerate(experts):
            if not 0 <= expert < down.shape[0] or not row.isfinite().all():
                continue
            (gate, up), weight = (gate_up[expert] @ row).chunk(2), weights[token, slot].double()
            gate_walk, up_walk = (gate_up[expert].square() @ row.square()).sqrt().chunk(2)
            silu = gate * torch.sigmoid(gate)
            early = fp32 / 2 * math.sqrt(len(row)) * (1.1 * gate_walk * up.abs() + silu.abs() * up_walk)
            late = (half + fp32 / 2 * math.sqrt(len(gate)) + (by_e4m3 / 8 / math.sqrt(32))) * (silu * up).abs()
            square += weight.square() * (down[expert].square() @ (early + late).square())
            square += (weight * half * (down[expert] @ (silu * up))).square()
        largest = max(largest, float(square.max()) if len(square) else 0.0)
    rtol = 2 * fp32 + (half if x.dtype != torch.float32 else 0.0)
    return rtol, 4 * math.sqrt(largest) + dtype.smallest_normal * dtype.eps


CASES: dict[str, CaseMaker] = {
    "route_experts": _route_experts,
    "fused_moe": _fused_moe,
    "fused_moe_fp8": _fused_moe_fp8,
    "fused_moe_w8a16": _fused_moe_w8a16,
    "fused_moe_w4a16": _fused_moe_w4a16,
    "fused_moe_mxfp4": _fused_moe_mxfp4,
}
